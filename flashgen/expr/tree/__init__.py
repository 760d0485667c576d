"""The tree of a mask or a score: its nodes, how they are built, walked and printed as Python."""
