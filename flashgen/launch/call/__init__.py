"""Calls: arguments checked, sizes settled and parameters packed, once per combination of shapes."""
