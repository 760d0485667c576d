"""The commands of the laboratory: what teaches and measures."""
