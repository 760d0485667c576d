"""From a Python function, or from text, to a tree."""
