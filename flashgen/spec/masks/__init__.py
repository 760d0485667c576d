"""Masks: bands, named masks, and masks given as functions or tensors."""
