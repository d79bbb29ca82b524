"""What raycomm does on real GPUs, in one command: `make test-gpu`, or ``python -m tests.gpu --json gpu.json``.

`suite` runs the steps, each a process of its own with a limit, and `report` shows what came of them. `ranks` forks the processes
of a step that have a GPU each, or share one. The steps: `environment`, `conformance`, `exchange`, `overlap`, `memory`,
`overhead`, `death`, `graphs`. docs/gpu.md says what each shows.

With RAYCOMM_TEST_GPU=pretend all of it runs on what `tests.unit.pretend_nccl` puts in place of a GPU and of NCCL, with small
sizes: that checks the suite, and measures nothing.
"""
