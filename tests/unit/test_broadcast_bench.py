"""The broadcast bench: what it sends and checks, which systems it leaves out, its processes, and its command line."""

from __future__ import annotations

import csv
import os
import pickle
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from microbench import broadcast, systems
from microbench import fleet as fleet_module
from microbench.broadcast_session import QUICK, BroadcastEffort
from microbench.copy_and_sum import CopyAndSum
from microbench.document import read
from microbench.fleet import START_LIMIT_S, Fleet, ReaderFailed, Times
from microbench.process import BenchProcess
from microbench.systems import SYSTEMS
from microbench.transports.base import LIMIT_S, limited
from microbench.workloads import LISTS, TENSORS, WORKLOADS, Sort, Workload, WrongMessage

SMALL = BroadcastEffort(warmups=2, messages=6, turn_limit_s=60.0, pace_s=0.0005)
LIGHT = ("raycomm:msgpack", "raycomm:pickle", "iceoryx2", "zmq:pubsub", "zmq:pubsub:msgpack", "zmq:pubsub:tcp:msgpack")
WITH_TENSORS = ("raycomm:msgpack", "raycomm:pickle", "iceoryx2", "zmq:pubsub", "zmq:pubsub:msgpack", "gloo", "gloo:aligned")


def invoke(*args: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(broadcast.main)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.stdout, result.stderr


# what is sent


def test_rows_are_the_sizes_that_were_promised() -> None:
    assert [workload.size for workload in LISTS] == [*range(101, 1011, 101), *(2**power for power in range(10, 19))]
    assert (TENSORS[0].name, TENSORS[-1].name, TENSORS[3].name) == ("tensor_4B", "tensor_256MiB", "tensor_4KiB")
    assert len(WORKLOADS) == len(LISTS) + len(TENSORS)


@given(number=st.integers(0, 500), other=st.integers(0, 500), sort=st.sampled_from(Sort))
def test_a_message_is_right_for_its_number_only(number: int, other: int, sort: Sort) -> None:
    workload = Workload(sort, 404)
    value = workload.message(number)
    workload.check(number, value, workload.take(value))
    workload.check_whole(number, value)
    if number != other and (sort is Sort.LIST or number % 8 != other % 8):
        with pytest.raises(WrongMessage, match=f"{workload.name}: message {other} "):
            workload.check(other, value, workload.take(value))


@given(place=st.integers(0, 100), sort=st.sampled_from(Sort))
def test_one_wrong_element_is_found(place: int, sort: Sort) -> None:
    workload = Workload(sort, 101 if sort is Sort.LIST else 404)
    value = workload.message(3)
    value[place] += 1
    with pytest.raises(WrongMessage, match="wrong contents"):
        workload.check_whole(3, value)


def test_a_tensor_with_garbage_in_it_is_found() -> None:
    workload = Workload(Sort.TENSOR, 404)
    value = workload.message(3)
    value[7] = float("nan")
    with pytest.raises(WrongMessage, match="sums to nan"):
        workload.check(3, value, workload.take(value))


def test_a_list_cut_short_is_found() -> None:
    workload = Workload(Sort.LIST, 101)
    value = workload.message(3)
    with pytest.raises(WrongMessage, match="came as 100 ints"):
        workload.check(3, value[:-1], None)


def test_large_rows_send_less() -> None:
    assert QUICK.messages_of(WORKLOADS["list_101"]) == (QUICK.warmups, QUICK.messages)
    assert QUICK.messages_of(WORKLOADS["tensor_256MiB"]) == (QUICK.fewest // 2, QUICK.fewest)


# which systems


def test_a_system_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "nowhere", systems.System("nowhere", "nowhere:Nowhere", needs=("no_such_module",)))
    monkeypatch.setitem(SYSTEMS, "vllm", systems.System("vllm", "transports.vllm_queue:VllmQueue", python="/nowhere/python"))
    turns, left_out = broadcast.plan(["vllm", "nowhere", "raycomm:msgpack"], [LISTS[0], TENSORS[0]], 4)
    assert [(turn.system, turn.topology, turn.rows) for turn in turns] == [
        ("raycomm:msgpack", "4 readers", ("list_101", "tensor_4B"))
    ]
    assert {row["left_out"] for row in left_out if row["system"] == "vllm"} == {"no environment for it; make bench-vllm"}
    assert {row["left_out"] for row in left_out if row["system"] == "nowhere"} == {
        "not installed: no_such_module; pip install 'raycomm[bench]'"
    }


def test_every_adapter_can_be_named() -> None:
    for system in SYSTEMS.values():
        if system.name != "vllm" and system.lacks(1) is None:
            assert callable(system.load()), system.name


def test_the_table_shows_what_failed_and_who_was_first() -> None:
    results: list[dict[str, Any]] = [
        {"row": "list_202", "system": "b", "mean_us": 50.0},
        {"row": "list_202", "system": "a", "mean_us": 20.0, "unpaced_us": 3.0},
        {"row": "list_101", "system": "b", "error": "it hangs"},
        {"row": "list_101", "system": "a", "left_out": "not installed"},
    ]
    described = broadcast.described(results, ["a", "b"])
    assert [(row["row"], row["system"]) for row in described] == [
        ("list_101", "a"), ("list_101", "b"), ("list_202", "a"), ("list_202", "b")
    ]  # fmt: skip
    assert (described[0]["kind"], described[0]["size"]) == ("list", 101)
    drawn = broadcast.table(described, Sort.LIST)
    assert drawn is not None
    cells = [list(column.cells) for column in drawn.columns]
    assert cells == [["list_101", "list_202"], ["-", "[bold]20.0 / 3.00[/bold]"], ["failed", "50.0 / "]]
    assert broadcast.table(described, Sort.TENSOR) is None


# its processes


def test_times_are_there_once_all_readers_are(tmp_path: Path) -> None:
    times = Times(tmp_path / "times", 3)
    for rank, at in ((1, 70), (3, 90)):
        times.of(rank)[5] = at
        assert times.last(5) == 0
    Times(tmp_path / "times", 3).of(2)[5] = 80
    assert times.last(5) == 90
    times.clear()
    assert times.last(5) == 0
    times.close()
    with pytest.raises(ValueError, match="released"):
        times.last(5)


def test_what_readers_can_make_themselves_is_not_sent() -> None:
    workload = WORKLOADS["list_262144"]
    message = workload.message(7)
    received = pickle.loads(pickle.dumps(workload))
    assert len(pickle.dumps(workload)) < 200
    received.prepare()
    received.check_whole(7, message)


def test_a_wait_without_a_limit_of_its_own_gets_one() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"the queue was not ready within 0\.05 s"), limited("the queue was not ready", 0.05):
        time.sleep(60)
    with limited("the queue was not ready", 0.05):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before


def measure(system: str, readers: int, *rows: str) -> list[dict[str, float]]:
    with BenchProcess("microbench.broadcast_session:Session") as process:
        process.ask("open", system, f"{readers} readers", limit_s=START_LIMIT_S)
        return [process.ask("measure", row, SMALL, limit_s=START_LIMIT_S) for row in rows]


@pytest.mark.parametrize("system", LIGHT)
def test_lists_arrive(system: str) -> None:
    for row in measure(system, 2, "list_101", "list_1024"):
        assert row["count"] == SMALL.messages
        assert min(row["call_p50_us"], row["unpaced_us"], row["irregular_mean_us"]) > 0
        assert 100 < row["encoded_bytes"] < 6000
        assert row["p50_us"] <= row["p99_us"]


@pytest.mark.slow
@pytest.mark.parametrize("system", [*WITH_TENSORS, "raycomm:graph", "ray:compiled_graph"])
def test_lists_and_tensors_arrive(system: str) -> None:
    rows = measure(system, 2, "list_16384", "tensor_4B", "tensor_64KiB", "tensor_1MiB", "list_101")
    assert [row["count"] for row in rows] == [SMALL.messages] * 5
    assert rows[3]["encoded_bytes"] >= 1 << 20


def test_copy_and_sum_has_no_readers() -> None:
    (row,) = measure("copy", 1, "tensor_64KiB")
    assert row["encoded_bytes"] == 65536
    system = CopyAndSum(1)
    system.begin(WORKLOADS["tensor_64KiB"], 2)
    with pytest.raises(WrongMessage):
        system.write(WORKLOADS["tensor_64KiB"].message(5))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_reader_that_dies_is_named_at_once(signum: signal.Signals) -> None:
    before = set(psutil.Process().children())
    system = SYSTEMS["raycomm:msgpack"]
    fleet = Fleet(system.name, system.load(), 2)
    try:
        first, *_ = sorted(set(psutil.Process().children()) - before, key=lambda child: child.pid)
        workload = WORKLOADS["list_101"]
        fleet.begin(workload, 3)
        fleet.write(workload.message(0))
        fleet.wait_for(0)
        os.kill(first.pid, signum)
        first.wait(LIMIT_S)
        fleet.write(workload.message(1))
        with pytest.raises(ReaderFailed, match="reader 1 died"):
            fleet.wait_for(1)
    finally:
        fleet.close()


def test_a_reader_that_does_not_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    system = SYSTEMS["raycomm:msgpack"]
    monkeypatch.setattr(fleet_module, "LIMIT_S", 0.2)
    fleet = Fleet(system.name, system.load(), 2)
    try:
        _, second = sorted(set(psutil.Process().children()) - before, key=lambda child: child.pid)
        second.suspend()
        with pytest.raises(TimeoutError, match=r"reader 2 did not listen within 0\.2 s"):
            fleet._tell(bytes(1 << 20))
    finally:
        fleet.close()


@pytest.mark.parametrize("way", ["kill", "close"])
@pytest.mark.parametrize("system", ["iceoryx2", "zmq:pubsub"])
def test_a_system_leaves_no_files(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process = BenchProcess("microbench.broadcast_session:Session")
    process.ask("open", system, "1 readers", limit_s=START_LIMIT_S)
    process.ask("measure", "list_101", SMALL, limit_s=START_LIMIT_S)
    (directory,) = tmp_path.iterdir()
    if way == "kill":
        process.kill()
    else:
        process.close()
    assert list(tmp_path.iterdir()) == []
    assert [path for path in Path("/dev/shm").iterdir() if directory.name in path.name] == []


def test_a_reader_that_gets_something_else_says_so() -> None:
    system = SYSTEMS["raycomm:msgpack"]
    fleet = Fleet(system.name, system.load(), 1)
    try:
        workload = WORKLOADS["list_101"]
        fleet.begin(workload, 3)
        fleet.write(workload.message(0))
        fleet.write(workload.message(2))
        with pytest.raises(
            ReaderFailed, match=r"reader 1: WrongMessage: list_101: message 1 came as 101 ints that begin with .2"
        ):
            fleet.wait_for(2)
    finally:
        fleet.close()


# its command line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--rows", "lists_"], "--rows: no row matches 'lists_'; rows: list_101, "),
        (["--rows", "("], "--rows: not a regular expression: '(' ("),
        (["--systems", "raykom"], "--systems: no system matches 'raykom'; systems: raycomm:msgpack, "),
        (["--rows", "list_101", "--systems", "copy"], "--rows: none of copy sends list_101"),
        (["--json", "/nowhere/x.json"], "--json: cannot write /nowhere/x.json: No such"),
    ],
)
def test_bad_input_is_refused_in_a_line(args: list[str], says: str) -> None:
    code, out, err = invoke(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(says)


def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "broadcast.json"
    chosen = ["--quick", "--rounds", "2", "--readers", "1", "--rows", "list_101$", "--systems", "^(raycomm:msgpack|nccl)$"]
    rows = tmp_path / "broadcast.csv"
    code, out, err = invoke(*chosen, "--json", str(path), "--csv", str(rows))
    assert (code, err) == (0, ""), err
    assert "left out: nccl: takes a GPU per process, 2; found " in out
    document = read(path)
    assert (document["bench"], document["machine"]["readers"], document["machine"]["pace_ms"]) == ("broadcast", 1, 2.0)
    ours, theirs = document["rows"]
    assert (ours["row"], ours["system"]) == ("list_101", "raycomm:msgpack")
    assert (ours["kind"], ours["size"], ours["rounds"]) == ("list", 101, 2)
    assert ours["mean_us_low"] <= ours["mean_us"] <= ours["mean_us_high"]
    assert {"std_us", "p50_us", "p99_us", "call_mean_us", "unpaced_us", "encoded_bytes"} <= set(ours)
    assert theirs["left_out"].startswith("takes a GPU")
    with rows.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["system"], float(first["mean_us"]), first["left_out"]) == ("raycomm:msgpack", ours["mean_us"], "")
    assert (second["system"], second["mean_us"], second["left_out"]) == ("nccl", "", theirs["left_out"])
