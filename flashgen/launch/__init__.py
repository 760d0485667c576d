"""From a compiled kernel and the caller's arrays to a launch: arguments, packing, targets."""
