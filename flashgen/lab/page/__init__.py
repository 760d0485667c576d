"""The page of a spec: one HTML file that needs no network."""
