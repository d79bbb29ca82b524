"""Ways to broadcast a value from one process to others, an adapter file each. See `base`."""
