"""Other libraries' function names over flashgen's kernels."""
