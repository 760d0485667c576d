"""The caller's arrays, whichever library they come from."""
