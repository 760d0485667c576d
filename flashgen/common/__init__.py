"""Small helpers that every layer may use; none knows what attention is."""
