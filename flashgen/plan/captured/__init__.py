"""Plans for captured tensors: their gradients, their extremes per tile, and when to load them."""
