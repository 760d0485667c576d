"""Four readings of a tree: NumPy values, CUDA C++, tile rules and derivatives. The fifth, text, is in ``tree``."""
