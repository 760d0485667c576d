"""Mask and score functions under torch.compile: recorded as programs, which are constants of the graph."""
