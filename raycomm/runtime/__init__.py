"""Runs a plan: set-up of the actors, their loops, and the driver. The only package besides `ray_dag` that imports Ray."""
