"""One adapter per system compared."""
