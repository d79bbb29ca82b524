"""What each process does, as data: made from a graph, checked, printed, read back. Imports neither Ray nor torch.

Import from the modules. Nothing is gathered here: an actor reads plans and never makes one, so it loads `actions` and no more.
"""
