"""Calls of kernels whose keys and values are in a cache."""
