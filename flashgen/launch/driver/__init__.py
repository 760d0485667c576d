"""The CUDA driver: launches, launch attributes, tensor maps and counters."""
