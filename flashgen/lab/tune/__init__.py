"""Finding the fastest schedule of a spec on a GPU."""
