"""NumPy arrays on this machine's GPUs, for commands that verify kernels there."""
