"""Plans of the mma.sync kernels, which run on every supported GPU."""
