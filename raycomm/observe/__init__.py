"""Says what a graph is doing. Reads; never changes anything."""
