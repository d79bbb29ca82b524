"""Chaos: random graphs, random values, and everything that can go wrong, against the same graphs in plain Python.

    python -m tests.chaos --seconds 600 [--seed N] [--first G --graphs 1]

`values` makes and compares values, `methods` says what each method gives, `actors` runs them on Ray, `graphs` draws a graph,
`reference` computes it here, `driving` uses it as users do, `events` disturbs it, `watching` looks for hangs, leaks and growth.
"""
