"""What a GPU can do at most, measured, and how near to that attention kernels come."""
