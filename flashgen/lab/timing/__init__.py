"""Timing calls on a GPU, or on a CPU where a test stands in for one."""
