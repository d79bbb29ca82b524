"""The pipeline bench's own logic, without a cluster: rows, turns, checks of values, letting go of a rival."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from microbench.harness import Effort, time_throughput
from microbench.pipeline_rows import LENGTHS, ROWS, Shape, Wiring, choose, ideal_per_s, plan_turns
from microbench.pipeline_session import PipelineSession, measure, slept_s
from microbench.rivals import pipeline_graphs
from microbench.rivals.base import Calls
from microbench.rivals.pipeline_graphs import RayPipelines, connect, idle, returns_within
from microbench.rows import RAY_GRAPH, RAYCOMM, same
from microbench.session import WrongResult

BRIEF = Effort(0.0, 0.0, 4, 100, 10, idle_s=0.0, idle_rounds=1, turn_limit_s=30.0)


# rows


def test_every_row_is_there() -> None:
    assert list(ROWS) == [
        *("inflight_1", "inflight_2", "inflight_4", "inflight_10"),
        *("inflight_1_tensor", "inflight_2_tensor", "inflight_4_tensor", "inflight_10_tensor"),
        *("chain_1", "chain_2", "chain_4", "chain_8", "chain_16"),
        *("fan_1", "fan_2", "fan_4", "fan_8", "fan_16"),
        *("compute_0", "compute_0.1", "compute_1", "compute_10"),
    ]
    facts = {name: dict(row.facts) for name, row in ROWS.items()}
    assert facts["inflight_10_tensor"] == {"in_flight": 10}
    assert (facts["chain_16"], facts["fan_8"], facts["compute_0.1"]) == ({"hops": 16}, {"fan_out": 8}, {"compute_ms": 0.1})
    assert {ROWS[name].shape.actors for name in ROWS if name.startswith(("inflight", "compute"))} == {4}
    assert [(ROWS[f"chain_{length}"].shape.actors, ROWS[f"fan_{length}"].shape.actors) for length in LENGTHS] == [
        (length, length) for length in LENGTHS
    ]


def test_values_of_a_row_differ_and_their_checks_can_tell() -> None:
    torch = pytest.importorskip("torch")
    tensors = [ROWS["inflight_10_tensor"].value(place) for place in range(10)]
    assert [(tensor.dtype, tensor.nbytes) for tensor in tensors] == [(torch.float16, 192 << 10)] * 10
    assert not any(same(one, other) for place, one in enumerate(tensors) for other in tensors[place + 1 :])
    assert [ROWS["chain_1"].value(place) for place in range(3)] == [12345, 12346, 12347]
    assert ROWS["compute_0.1"].value(3) == 0.0001
    assert ROWS["fan_2"].expected(7) == [7, 7]
    assert ROWS["fan_1"].expected(7) == [7]
    assert ROWS["chain_2"].expected(7) == 7


def test_per_hop_is_chosen_as_its_chains() -> None:
    chains = [f"chain_{length}" for length in LENGTHS]
    assert [row.name for row in choose("per_hop")] == chains
    assert [row.name for row in choose("^per_hop|fan_1$")] == [*chains, "fan_1"]
    assert [row.name for row in choose("chain_[12]$")] == ["chain_1", "chain_2"]
    assert choose(None) == list(ROWS.values())


def test_a_system_measures_all_its_families_before_the_next() -> None:
    turns = plan_turns(choose(None))
    assert [(turn.system, turn.topology) for turn in turns] == [
        (system, family) for system in (RAYCOMM, RAY_GRAPH) for family in ("inflight", "chain", "fan", "compute")
    ]
    assert [row for turn in turns[:4] for row in turn.rows] == list(ROWS)
    assert [(turn.system, turn.rows) for turn in plan_turns(choose("fan_2"), (RAYCOMM,))] == [(RAYCOMM, ("fan_2",))]


def test_the_slowest_stage_sets_the_ideal() -> None:
    assert ideal_per_s(0.01, 4, 4) == pytest.approx(100)
    assert ideal_per_s(0.01, 4, 10) == pytest.approx(100)
    assert ideal_per_s(0.01, 4, 1) == pytest.approx(25)
    assert slept_s(0.001) >= 0.001


def test_a_graph_is_a_chain_or_a_fan() -> None:
    class Actor:
        def __init__(self, name: str) -> None:
            self.echo, self.pause = f"{name}.echo", f"{name}.pause"

    actors = [Actor("a"), Actor("b")]

    def bind(method: str, node: str) -> str:
        return f"{method}({node})"

    assert connect("x", actors, ROWS["chain_2"].shape, bind, tuple) == "b.echo(a.echo(x))"
    assert connect("x", actors, ROWS["fan_2"].shape, bind, tuple) == ("a.echo(x)", "b.echo(x)")
    assert connect("x", actors, ROWS["compute_1"].shape, bind, tuple) == "b.pause(a.pause(x))"


# measuring


class Pipe:
    """Executions that come back in order, changed by `spoil(number, value)`; remembers how many were outstanding."""

    def __init__(self, spoil: Callable[[int, Any], Any] = lambda number, value: value) -> None:
        self._spoil = spoil
        self._pending: deque[Any] = deque()
        self.outstanding: list[int] = []
        self.fetched = 0

    def submit(self, value: Any) -> None:
        self._pending.append(value)

    def fetch(self, ticket: None) -> Any:
        self.outstanding.append(len(self._pending))
        self.fetched += 1
        return self._spoil(self.fetched, self._pending.popleft())

    def call(self, value: Any) -> Any:
        self.submit(value)
        return self.fetch(None)

    @property
    def calls(self) -> Calls:
        return Calls(self.call, self.submit, self.fetch)


def test_the_figures_of_a_row() -> None:
    assert set(measure(ROWS["chain_2"], Pipe().calls, BRIEF)) == {"p50_us", "p99_us", "mean_us", "std_us", "count"}
    pipe = Pipe()
    measurement = measure(ROWS["inflight_4"], pipe.calls, BRIEF)
    assert (measurement["count"], measurement["per_s"] > 0) == (4, True)
    assert pipe.outstanding[4:] == [1, 1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1]  # a call, the warm-up, the timed and the last


def test_the_graph_is_full_before_the_clock_starts() -> None:
    pipe = Pipe()
    measurement, _ = time_throughput(pipe.submit, pipe.fetch, 1, 4, BRIEF)
    assert pipe.fetched == 4 + measurement["count"] + 4


@pytest.mark.parametrize("row", ["inflight_4", "chain_2"])
@pytest.mark.parametrize("wrong", [1, 2])
def test_a_stale_value_is_noticed_before_anything_is_timed(row: str, wrong: int) -> None:
    pipe = Pipe(lambda number, value: value - 1 if number == wrong else value)
    with pytest.raises(WrongResult, match=rf"{row} returned 1234\d where 1234\d was wanted"):
        measure(ROWS[row], pipe.calls, BRIEF)
    assert pipe.fetched == wrong


def test_a_wrong_value_at_the_end_is_noticed() -> None:
    pipe = Pipe(lambda number, value: [value] if number > 7 else [value, value])
    with pytest.raises(WrongResult, match="fan_2 returned"):
        measure(ROWS["fan_2"], pipe.calls, BRIEF)
    assert pipe.fetched == 2 + 1 + 1 + BRIEF.min_calls


class Pretended:
    """A system that keeps what it was told to do."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    def compile(self, shape: Shape) -> Calls:
        self._told.append(f"{self._name} compiles {shape.actors}")
        if shape.actors == 8:
            raise ValueError("no room")
        fan = shape.wiring is Wiring.FAN_OUT
        return Pipe(lambda number, value: [value] * shape.actors if fan else value).calls

    def teardown(self) -> None:
        self._told.append(f"{self._name} tears down")

    def rest(self) -> None:
        self._told.append(f"{self._name} rests")

    def discard(self) -> None:
        self._told.append(f"{self._name} discards")


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def session(told: list[str]) -> PipelineSession:
    session = PipelineSession()
    session._systems = {name: Pretended(name, told) for name in "ab"}
    return session


def test_rows_of_one_shape_share_a_graph(session: PipelineSession, told: list[str]) -> None:
    session.open("a", "inflight")
    session.measure("inflight_1", BRIEF)
    session.measure("inflight_2", BRIEF)
    session.close(False)
    session.open("a", "fan")
    session.measure("fan_2", BRIEF)
    session.close(False)
    session.open("b", "fan")
    assert told == ["a tears down", "a compiles 4", "a tears down", "a tears down", "a compiles 2", "a tears down", "a rests"]


def test_a_failed_graph_is_not_used_again(session: PipelineSession, told: list[str]) -> None:
    session.open("a", "chain")
    session.measure("chain_2", BRIEF)
    with pytest.raises(ValueError, match="no room"):
        session.measure("chain_8", BRIEF)
    session.close(True)
    assert told[-2:] == ["a tears down", "a discards"]
    session.open("a", "chain")
    session.measure("chain_2", BRIEF)
    assert told[-1] == "a compiles 2"


def test_the_ideal_is_that_of_the_sleep_as_it_is(session: PipelineSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbench.pipeline_session.slept_s", lambda seconds: 2 * seconds)
    for system in "ab":
        session.open(system, "compute")
        assert session.measure("compute_10", BRIEF).items() >= {"stage_us": 20_000.0, "ideal_per_s": 50.0}.items()
        assert "ideal_per_s" not in session.measure("compute_0", BRIEF)


def test_nothing_is_measured_before_a_system_is_open() -> None:
    with pytest.raises(RuntimeError, match="no system is open"):
        PipelineSession().measure("chain_1", BRIEF)


# letting go of a rival


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What a call that hangs waits for; set at the end."""
    over = threading.Event()
    yield over
    over.set()


def test_a_call_that_hangs_is_left_behind(hung: threading.Event) -> None:
    assert returns_within(lambda: None, 30.0)
    assert not returns_within(hung.wait, 0.05)
    assert not returns_within(lambda: 1 // 0, 30.0)


class Pool:
    """In place of `Actors`."""

    def __init__(self) -> None:
        self.killed: list[tuple[list[Any], list[int]]] = []

    def kill(self, actors: list[Any], pids: list[int]) -> None:
        self.killed.append((actors, pids))


class Dag:
    def __init__(self, teardown: Callable[[], Any]) -> None:
        self.teardown = teardown


def rival(dag: Dag | None, pids: list[int]) -> tuple[RayPipelines, Pool]:
    rival, pool = RayPipelines.__new__(RayPipelines), Pool()
    rival.__dict__ |= {"_pool": pool, "_actors": ["actor"] * len(pids), "_pids": pids, "_dag": dag}
    return rival, pool


def test_actors_go_on_after_a_teardown_and_not_after_one_that_hangs(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_graphs, "TEARDOWN_LIMIT_S", 5.0)
    torn_down: list[int] = []
    good, pool = rival(Dag(lambda: torn_down.append(1)), [1])
    good.teardown()
    good.teardown()
    assert (torn_down, pool.killed) == ([1], [])
    monkeypatch.setattr(pipeline_graphs, "TEARDOWN_LIMIT_S", 0.05)
    bad, pool = rival(Dag(hung.wait), [1, 2])
    bad.teardown()
    bad.teardown()
    assert pool.killed == [(["actor"] * 2, [1, 2])]


def test_actors_that_spin_or_are_gone_do_not_stay_for_the_other_systems_turn() -> None:
    def kept(code: str) -> bool:
        with subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                system, pool = rival(None, [process.pid])
                system.rest()
                return pool.killed == []
            finally:
                process.kill()

    assert kept("import time; time.sleep(600)")
    assert not kept("while True: pass")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not idle([ended.pid], 0.0)
    assert idle([], 0.0)
