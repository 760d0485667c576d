"""Specs as text: TOML and JSON files, command lines, and the expressions in them."""
