"""What can be proven about a tree: intervals, bounds, and parts that a kernel computes once for many pairs."""
