"""``python -m tests.gpu``: exits 0 if no step failed, 1 if one did, 2 if there is no GPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from tests.gpu import report, suite
from tests.gpu.setting import Setting

PRETEND = "RAYCOMM_TEST_GPU"  # =pretend: see the package
FAILED = 1
NO_GPU = 2


def main() -> int:
    """Run the suite."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What raycomm does on this machine's GPUs.")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the figures go; the trace goes beside it")
    parser.add_argument("--seconds", type=float, default=400.0, help="limit of the whole suite")
    parser.add_argument("--only", action="append", metavar="STEP", help="a step by its name; may be repeated")
    arguments = parser.parse_args()
    steps = [step for step in suite.STEPS if arguments.only is None or step.name in arguments.only]
    if not steps:
        parser.error(f"there is no such step; there are {', '.join(step.name for step in suite.STEPS)}")
    stand_in = os.environ.get(PRETEND) == "pretend"
    gpus = 0 if stand_in else torch.cuda.device_count()  # the steps are other programs, which CUDA in this one does not touch
    if not gpus and not stand_in:
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        print(f"no NVIDIA GPU: torch finds no CUDA device; {built}; see nvidia-smi and CUDA_VISIBLE_DEVICES", file=sys.stderr)
        return NO_GPU
    path: Path = arguments.json.absolute()
    setting = Setting(gpus, stand_in, 0.0, str(path.with_suffix(".trace.json")))
    begin = time.monotonic()
    print(f"{setting.sharing}; at most {arguments.seconds:g} s\n\n{report.HEAD}", flush=True)
    records = suite.run(steps, setting, arguments.seconds, lambda record: print(report.line_of(record), flush=True))
    report.write_json(path, setting, records, time.monotonic() - begin)
    print(f"{report.foot(records)}\n{path}")
    return 0 if report.passed(records) else FAILED


if __name__ == "__main__":
    sys.exit(main())
