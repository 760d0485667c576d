"""The cases that a kernel is checked on: fixed ones, drawn ones, and the values and layouts of their arrays."""
