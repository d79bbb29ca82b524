"""Ray actor graphs over native channels."""
