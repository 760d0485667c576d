"""flashgen inside other libraries, by the doors that these have for it."""
