"""Nodes that users write, and the checked graph made of them. Imports neither Ray nor torch.

Import from the modules. Nothing is gathered here: an actor needs the words of a graph (`model`), not its nodes or checks.
"""
