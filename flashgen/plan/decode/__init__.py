"""The kernels for few new queries and a cache."""
