"""Benchmarks of raycomm against its peers and against the floor of the machine they run on."""
