"""NumPy arrays on a GPU and back, without any framework."""
