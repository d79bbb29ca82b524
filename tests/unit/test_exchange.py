"""The two-rank exchange as a program: refused, hanging, or right."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
import typer
from typer.testing import CliRunner

from dags import exchange
from dags.exchange_ranks import COUNT, share_gpu

ROOT = Path(__file__).parents[2]

app = typer.Typer()
app.command()(exchange.main)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("policy", ["link", "direction"])
def test_streams_of_their_own_exchange_the_right_values(policy: str) -> None:
    code, output = run("--policy", policy, "--executions", "20")
    assert code == 0
    for execution in range(20):
        assert f"execution {execution}: right at both ranks: {'; '.join(exchange.expected(execution))}\n" in output


def test_wrong_values_of_the_simulation_are_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    given = exchange.expected(1)
    monkeypatch.setattr(exchange, "expected", lambda execution: given if execution else exchange.NAMES)
    code, output = run("--executions", "2")
    assert code == exchange.WRONG
    assert output.endswith("and should have given rank0.make; rank1.make; rank0.add; rank1.add\n")
    assert "right" not in output


def test_a_shared_stream_is_refused_with_the_circle() -> None:
    code, output = run("--policy", "shared")
    assert code == exchange.DEADLOCK
    assert "DeadlockError" in output
    assert "rank0: send 1 from r1 on link 0 stream 1 with rank1: r2 = recv 1 on link 0 stream 1" in output
    assert "stream policy 'link'" in output


def test_a_shared_stream_hangs_where_it_is_not_refused() -> None:
    code, output = run("--policy", "shared", "--no-verify")
    assert code == exchange.HANG
    assert "stream 1 of rank0: send of channel 1 to rank1 on link 0 waits for rank1 to receive channel 1" in output
    assert "execution 0" not in output


@pytest.mark.parametrize("policy", ["link", "direction"])
def test_two_processes_exchange_the_right_values(policy: str) -> None:
    code, output = run("--policy", policy, "--device", "gloo", "--executions", "5")
    assert code == 0, output
    assert output.count(f"all {COUNT} elements are right at both ranks") == 5
    assert "link 1 2 -> 1 over gloo" in output


def test_between_processes_too_a_shared_stream_is_refused_and_nothing_starts() -> None:
    code, output = run("--policy", "shared", "--device", "gloo")
    assert code == exchange.DEADLOCK
    assert "DeadlockError" in output
    assert "execution 0" not in output


def test_processes_that_hang_on_a_shared_stream_are_reported_and_end() -> None:
    begin = time.monotonic()
    code, output = run("--policy", "shared", "--device", "gloo", "--no-verify", "--limit", "1")
    assert code == exchange.HANG, output
    assert "execution 0 gave no result within 1 s" in output
    assert re.search(
        r"rank0 \(pid \d+, alive\) waits for the tensors of rank1.make#1 of execution 0, which come from rank1", output
    )
    assert re.search(
        r"rank1 \(pid \d+, alive\) waits for the tensors of rank0.make#0 of execution 0, which come from rank0", output
    )
    assert "stream 1 holds send 1 from r1 on link 0 stream 1, then r2 = recv 2 on link 1 stream 1" in output
    assert time.monotonic() - begin < 60.0


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (signal.SIGKILL, r"died by signal 9 in execution \d+\n"),
        (signal.SIGINT, r"left its loop in execution \d+: KeyboardInterrupt"),
    ],
)
def test_a_rank_that_is_killed_or_leaves_is_named_and_the_other_one_ends(sent: signal.Signals, said: str) -> None:
    command = [sys.executable, "-m", "dags.exchange", "--device", "gloo", "--executions", "100000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            next(line for line in program.stdout if line.startswith("execution 1:"))
            ranks = psutil.Process(program.pid).children()
            assert len(ranks) == 2
            ranks[0].send_signal(sent)
            program.stdout.read()
            assert program.wait(60) == exchange.FAILED
            assert re.search(rf"failed: rank[01] {said}", program.stderr.read())
        finally:
            program.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line() -> None:
    code, output = run("--device", "cuda")
    assert code == exchange.FAILED
    assert output.startswith("failed: torch finds no CUDA device here")
    assert output.count("\n") == 1


@pytest.mark.parametrize(("version", "multi_rank", "host"), [(22809, None, "rank1"), (23000, "1", None), (23203, "1", None)])
def test_how_ranks_share_a_gpu_depends_on_nccl(
    monkeypatch: pytest.MonkeyPatch, version: int, multi_rank: str | None, host: str | None
) -> None:
    nccl = types.SimpleNamespace(get_version=lambda: version)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=nccl))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "environ", {})
    share_gpu(1)
    assert os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == multi_rank
    assert os.environ.get("NCCL_HOSTID") == host


def test_without_ray_the_ranks_run_all_the_same() -> None:
    """A module finder that refuses it stands for its absence, in the driver and, through the environment, in the ranks."""
    code = (
        "import importlib.util, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'ray': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'ray' else real(name, package)\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sitecustomize.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "dags.exchange", "--device", "gloo", "--executions", "1"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": directory},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert "execution 0" in done.stdout
