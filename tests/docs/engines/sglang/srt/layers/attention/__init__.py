"""A stub."""
