"""The bench's GPU rows: what is run where, what is left out and how that is said, the split, and one run without a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from microbench import accelerated_dag_gpu, command, console
from microbench.accelerated_dag_gpu import NOTHING_OF_GPUS, Device, plan_parts, rows_of
from microbench.command import Rivals
from microbench.document import validate
from microbench.gpu_found import Looker, look_for_gpus
from microbench.gpu_rows import GPU_ROWS, SHAPES, TORCH, Gpus, Wiring, plan_gpu_turns
from microbench.gpu_session import Simulated
from microbench.harness import Effort, Result, Turn
from microbench.process import BenchProcess
from microbench.rivals.base import Calls
from microbench.rivals.gpu_workers import Bare, GpuActors
from microbench.rows import RAY_GRAPH, RAYCOMM, ROWS, select
from microbench.session import WrongResult
from microbench.split import split
from microbench.targets import judge

DAG = "exec_ray_dag_gpu_nccl"
NO_GPU = "this machine cannot run the GPU rows: it has no GPU; docs/gpu.md says what it needs; or use --device simulated"
BRIEF = Effort(0.0, 0.0, 4, 100, 10, idle_s=0.0, idle_rounds=1, turn_limit_s=30.0)
ALL = list(GPU_ROWS.values())


def cards(count: int, nccl: int = 23203) -> Gpus:
    return Gpus(count, "Card", "2.11", "14.2", nccl)


# rows


def test_every_variation_is_there_in_every_shape() -> None:
    variations = [
        "exec_nccl_gpu",
        DAG,
        f"{DAG}_static_shape",
        f"{DAG}_direct_return",
        f"{DAG}_static_shape_direct_return",
        "chain4_gpu",
    ]
    assert list(GPU_ROWS) == [f"{variation}_{shape}" for variation in variations for shape in ("1x1", "4x24576", "100000B")]
    assert [2 * math.prod(shape) for shape in SHAPES.values()] == [2, 196_608, 100_000]
    assert GPU_ROWS[f"{DAG}_4x24576"].request(7) == (7, 4, 24576)
    for name, row in GPU_ROWS.items():
        assert (row.static_shape, row.direct_return) == ("static_shape" in name, "direct_return" in name)
    assert not set(GPU_ROWS) & set(ROWS)


def test_a_graph_that_promises_a_shape_is_opened_for_that_shape_alone() -> None:
    turns, _ = plan_gpu_turns(ALL, (RAY_GRAPH, TORCH), None)
    assert all(len(turn.rows) == (1 if "static_shape" in turn.topology else 3) for turn in turns)
    opened = {turn.topology for turn in turns}
    assert {row.opens for row in ALL} == opened


def test_turns_alternate_between_the_systems_within_a_wiring() -> None:
    turns, left_out = plan_gpu_turns(ALL, (RAY_GRAPH, TORCH), None)
    assert left_out == []
    order = [(GPU_ROWS[turn.rows[0]].wiring, turn.system) for turn in turns]
    assert list(dict.fromkeys(order)) == [
        (Wiring.BARE, RAYCOMM),
        (Wiring.BARE, TORCH),
        (Wiring.PAIR, RAYCOMM),
        (Wiring.PAIR, RAY_GRAPH),
        (Wiring.CHAIN4, RAYCOMM),
        (Wiring.CHAIN4, RAY_GRAPH),
    ]
    alone, _ = plan_gpu_turns(ALL, (), None)
    assert {turn.system for turn in alone} == {RAYCOMM}


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (cards(1), {RAY_GRAPH: {"needs 2 GPUs": 12, "needs 4 GPUs": 3}}),
        (cards(2), {RAY_GRAPH: {"needs 4 GPUs": 3}}),
        (cards(4), {}),
        (cards(4, nccl=22907), {}),
        (
            cards(1, nccl=22907),
            {
                RAYCOMM: {"needs 2 GPUs": 15, "needs 4 GPUs": 3},
                TORCH: {"needs 2 GPUs": 3},
                RAY_GRAPH: {"needs 2 GPUs": 12, "needs 4 GPUs": 3},
            },
        ),
    ],
)
def test_rows_that_need_more_gpus_are_left_out(gpus: Gpus, wanted: dict[str, dict[str, int]]) -> None:
    turns, left_out = plan_gpu_turns(ALL, (RAY_GRAPH, TORCH), gpus)
    counted: dict[str, dict[str, int]] = {}
    for result in left_out:
        of_system = counted.setdefault(result["system"], {})
        of_system[result["left_out"]] = of_system.get(result["left_out"], 0) + 1
    assert counted == wanted
    run = {(row, turn.system) for turn in turns for row in turn.rows}
    out = {(result["row"], result["system"]) for result in left_out}
    assert run | out == {(row.name, system) for row in ALL for system in row.systems}
    assert not run & out


@pytest.mark.parametrize(
    ("device", "found", "wanted"),
    [
        (Device.AUTO, "none", [ROWS]),
        (Device.AUTO, cards(1), [ROWS, GPU_ROWS]),
        (Device.CPU, None, [ROWS]),
        (Device.GPU, cards(1), [GPU_ROWS]),
        (Device.SIMULATED, None, [GPU_ROWS]),
    ],
)
def test_each_device_has_its_rows(device: Device, found: Gpus | str | None, wanted: list[dict[str, Any]]) -> None:
    rows = rows_of(device, found)
    assert list(rows) == [name for part in wanted for name in part]
    gpus = found if isinstance(found, Gpus) else None
    parts = plan_parts(select(None, rows), Rivals.RAY, device, gpus)
    on = "Simulated" if device is Device.SIMULATED else "OnGpus"
    serves = {id(ROWS): "microbench.session:Session", id(GPU_ROWS): f"microbench.gpu_session:{on}"}
    assert [part.serves for part in parts] == [serves[id(part)] for part in wanted]


def test_a_part_with_nothing_to_run_is_no_part() -> None:
    rows = rows_of(Device.AUTO, cards(1))
    assert [part.serves for part in plan_parts(select("^chain4_gpu", rows), Rivals.NONE, Device.AUTO, cards(1))] == [
        "microbench.gpu_session:OnGpus"
    ]
    assert plan_parts(select("^plain_actor_call", rows), Rivals.NONE, Device.AUTO, cards(1)) == []


# what a machine has


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_no_gpu_it_says_so() -> None:
    assert look_for_gpus() == NO_GPU


@pytest.mark.parametrize(
    ("lacks", "wanted"),
    [
        ({"cuda": None, "device": None}, "its torch is built without CUDA; docs/gpu.md"),
        ({"cupy": "No module named 'cupy'"}, "pip install cupy-cuda12x"),
        ({"cupy_cuda": 13}, "its torch is built for CUDA 12 and its cupy for CUDA 13.*pip install cupy-cuda12x"),
        ({"nccl": 0}, "pip install nvidia-nccl-cu12"),
    ],
)
def test_what_is_missing_beside_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], wanted: str) -> None:
    from raycomm.device import found

    facts = {"cuda": 12, "device": "cuda:0", "driver": True, "cupy_cuda": 12, "nccl": 23203}
    monkeypatch.setattr(found, "look_for_gpu", lambda: found.Found(**{**facts, **lacks}))
    said = Looker().look()
    assert isinstance(said, str)
    assert "\n" not in said
    with pytest.raises(AssertionError, match=rf"this machine cannot run the GPU rows: .*{wanted}"):
        raise AssertionError(said)


# the run, with made-up figures


class MadeUp:
    """In place of `Rounds`: raycomm's graph takes 50 us, Ray's 200, anything bare 10."""

    def __init__(self, *_: Any) -> None: ...

    def run(self, turns: Sequence[Turn], rounds: int) -> list[Result]:
        def p50(row: str, system: str) -> float:
            return 10.0 if row.startswith("exec_nccl_gpu") else 200.0 if system == RAY_GRAPH else 50.0

        return [
            {"row": row, "system": turn.system, "p50_us": p50(row, turn.system), "p99_us": 300.0, "mean_us": 60.0, "count": 9}
            for turn in turns
            for row in turn.rows
        ]


def invoke(monkeypatch: pytest.MonkeyPatch, found: Gpus | str, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(accelerated_dag_gpu, "look_for_gpus", lambda: found)
    monkeypatch.setattr(accelerated_dag_gpu, "Rounds", MadeUp)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    app = Typer()
    app.command()(accelerated_dag_gpu.main)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_device_gpu_without_one_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, NO_GPU, "--device", "gpu") == (2, "", f"--device gpu: {NO_GPU}\n")


def test_auto_without_a_gpu_says_why_there_are_no_gpu_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = invoke(monkeypatch, NO_GPU, "--rows", "exec_nccl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("--rows: no row matches 'exec_nccl'")
    assert err.endswith(f"; {NO_GPU}\n")
    code, out, _ = invoke(monkeypatch, NO_GPU, "--rows", "^echo_int$", "--rivals", "none")
    assert (code, f"device: cpu ({NO_GPU})" in out) == (0, True)


def test_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, _ = invoke(monkeypatch, cards(1), "--device", "gpu", "--json", str(path))
    assert code == 0
    assert "1 x Card; torch 2.11, cupy 14.2, NCCL 2.32.3" in out
    assert out.index("medians over the rounds") < out.index("split: DAG time")
    assert "against the targets" not in out
    document = json.loads(path.read_text())
    assert document["machine"]["device"] == "gpu"
    assert document["machine"]["gpu"] == {"card": "Card", "count": 1, "torch": "2.11", "cupy": "14.2", "nccl": "2.32.3"}
    rows = validate(document)
    assert [row["row"] for row in rows] == [row.name for row in ALL for _ in row.systems]
    left_out = [row for row in rows if "left_out" in row]
    assert {row["system"] for row in left_out} == {RAY_GRAPH}
    assert all(set(row) == {"row", "system", "left_out"} for row in left_out)
    assert out.count("needs 2 GPUs") == 24  # a line in each table
    assert out.count("needs 4 GPUs") == 3


def test_gpu_rows_are_asked_for_nothing_by_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    invoke(monkeypatch, cards(1), "--json", str(path))
    rows = validate(json.loads(path.read_text()))
    cpu = [row for row in rows if row["row"] in ROWS]
    assert len(rows) - len(cpu) == 36
    assert json.loads(path.read_text())["machine"]["device"] == "cpu and gpu"
    assert rows[: len(cpu)] == cpu
    assert judge(rows) == judge(cpu)


# the split


def result(row: str, system: str, **rest: Any) -> Result:
    return {"row": row, "system": system, **rest}


def test_the_split_takes_the_bare_time_of_the_same_shape_and_system() -> None:
    results = [
        result("exec_nccl_gpu_1x1", RAYCOMM, p50_us=10.0),
        result("exec_nccl_gpu_1x1", TORCH, p50_us=20.0),
        result("exec_nccl_gpu_4x24576", RAYCOMM, p50_us=15.0),
        result(f"{DAG}_1x1", RAYCOMM, p50_us=40.0),
        result(f"{DAG}_1x1", RAY_GRAPH, p50_us=170.0),
        result(f"{DAG}_direct_return_4x24576", RAYCOMM, p50_us=35.0),
        result("chain4_gpu_1x1", RAYCOMM, p50_us=99.0),
    ]
    first, second = split(results)
    assert (first.ours.dag_us, first.ours.bare_us, first.ours.overhead_us) == (40.0, 10.0, 30.0)
    assert first.theirs is not None
    assert (first.theirs.dag_us, first.theirs.bare_us, first.theirs.overhead_us) == (170.0, 20.0, 150.0)
    assert first.ratio == 5.0
    assert (second.ours.row, second.ours.overhead_us, second.theirs, second.ratio) == (
        f"{DAG}_direct_return_4x24576",
        20.0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("changes", "lacks", "overhead"),
    [
        ([result(f"{DAG}_1x1", RAY_GRAPH, left_out="needs 2 GPUs")], "DAG: needs 2 GPUs", None),
        ([result(f"{DAG}_1x1", RAY_GRAPH, error="hung")], "DAG: failed", None),
        ([result("exec_nccl_gpu_1x1", TORCH, error="died")], "bare: failed", None),
        ([result(f"{DAG}_1x1", RAY_GRAPH, p50_us=15.0)], "", -5.0),  # within the noise: no ratio
        ([result(f"{DAG}_1x1", RAY_GRAPH, p50_us=21.0, error="in round 3")], "", 1.0),
    ],
)
def test_what_the_split_lacks_it_says(changes: list[Result], lacks: str, overhead: float | None) -> None:
    given = [
        result("exec_nccl_gpu_1x1", RAYCOMM, p50_us=10.0),
        result("exec_nccl_gpu_1x1", TORCH, p50_us=20.0),
        result(f"{DAG}_1x1", RAYCOMM, p50_us=40.0),
        result(f"{DAG}_1x1", RAY_GRAPH, p50_us=170.0),
    ]
    changed = {(each["row"], each["system"]) for each in changes}
    (comparison,) = split([*changes, *(each for each in given if (each["row"], each["system"]) not in changed)])
    theirs = comparison.theirs
    assert theirs is not None
    assert (theirs.lacks, theirs.overhead_us) == (lacks, overhead)
    assert (comparison.ratio is None) == (overhead is None or overhead < 0)
    terminal = Console(width=140)
    with terminal.capture() as capture:
        console.show(terminal, console.split_table([comparison]))
    shown = capture.get()
    assert lacks in shown
    assert ("-5.00" in shown) == ("A negative overhead says nothing" in shown) == (overhead == -5.0)


def test_without_rows_of_the_bare_transfer_the_split_says_so() -> None:
    (comparison,) = split([result(f"{DAG}_1x1", RAYCOMM, p50_us=40.0)])
    assert comparison.ours.lacks == "bare: not measured"
    assert split([result("echo_int", RAYCOMM, p50_us=2.0)]) == []


# measuring


def measure(opened: Any, name: str) -> dict[str, float]:
    session = Simulated()
    session._opened = opened
    return session.measure(name, BRIEF)


def calls(call: Callable[[Any], Any]) -> Calls:
    return Calls(call, call, call)


def test_a_stale_tensor_is_noticed() -> None:
    name = f"{DAG}_1x1"
    assert measure(calls(lambda request: float(request[0])), name)["count"] == BRIEF.min_calls
    stale: Iterator[float] = iter([1.0, 1.0])
    with pytest.raises(WrongResult, match=rf"{name} returned 1\.0 where 2\.0 was wanted"):
        measure(calls(lambda request: next(stale)), name)
    with pytest.raises(WrongResult, match=r"returned 1\.0 where None was wanted"):
        measure(calls(lambda request: 1.0), "chain4_gpu_1x1")


def test_a_bare_receive_of_something_else_is_noticed() -> None:
    class Sent(Bare):
        wrong = False

        def run(self, request: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
            return [1000] * count, [float(request[0])] + [0.0] * self.wrong

    pool: Any = GpuActors
    sent = Sent(pool)
    figures = {"p50_us": 1.0, "p99_us": 1.0, "mean_us": 1.0, "std_us": 0.0, "count": BRIEF.min_calls}
    assert measure(sent, "exec_nccl_gpu_1x1") == figures
    sent.wrong = True
    with pytest.raises(WrongResult, match=r"received \[1\.0, 0\.0\] where 1 was sent"):
        measure(sent, "exec_nccl_gpu_1x1")


def test_rows_over_nccl_on_the_stand_in() -> None:
    """What `--device gpu` does with two actors and one GPU, as far as Ray and raycomm can see."""
    with BenchProcess("tests.unit.gpu_bench:OnPretendedGpu") as process:
        for name in ("exec_nccl_gpu_1x1", f"{DAG}_static_shape_direct_return_1x1"):
            process.ask("open", RAYCOMM, GPU_ROWS[name].opens, limit_s=60.0)
            assert process.ask("environments", limit_s=30.0) == ["1", "1"]
            assert process.ask("measure", name, BRIEF, limit_s=60.0)["count"] >= BRIEF.min_calls
            process.ask("close", False, limit_s=30.0)


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    """The rows themselves, raycomm's alone, one round."""
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "microbench.accelerated_dag_gpu", "--device", "simulated", "--quick", "--rounds", "1"]
    command += ["--rows", "exec_.*1x1", "--rivals", "none", "--json", str(path)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110)
    assert (run.returncode, run.stderr) == (0, "")
    assert NOTHING_OF_GPUS in run.stdout
    assert run.stdout.index("medians over the rounds") < run.stdout.index("split: DAG time")
    document = json.loads(path.read_text())
    assert (document["machine"]["device"], document["machine"]["note"]) == ("simulated", NOTHING_OF_GPUS)
    assert "gpu" not in document["machine"]
    rows = validate(document)
    assert [row["row"] for row in rows] == [name for name in GPU_ROWS if name.startswith("exec_") and name.endswith("_1x1")]
    assert [row for row in rows if "error" in row or row["system"] != RAYCOMM or row["count"] < 3] == []
