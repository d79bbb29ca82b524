"""Communicators of users that do not keep to the interface: no wrong value comes of it, no wait without an end, and the reason is
told."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.dag import InputNode as RayInputNode
from ray.experimental import collective

import raycomm
from raycomm import (
    ActorDiedError,
    ChannelClosedError,
    ChannelTimeoutError,
    CollectiveError,
    CompileError,
    InputNode,
    MultiOutputNode,
    bind,
)
from tests.ray import rude_communicators as rude
from tests.ray.collective_actors import Rank
from tests.ray.own_communicators import RaysGroup, SocketLink
from tests.ray.tensor_actors import Tensors
from tests.ray.workers import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("cluster")

_PROMPTLY_S = 20.0  # a hang guard


@pytest.fixture
def two(cluster: None) -> list[Any]:
    two = [Tensors.remote() for _ in range(2)]
    ray.get([actor.pid.remote() for actor in two])
    return two


def chain(actors: list[Any], communicator: Any) -> Any:
    with InputNode() as x:
        return bind(actors[1].sum, bind(actors[0].make, x).with_tensor_transport(communicator))


def given(kind: Any, actors: list[Any]) -> Any:
    return kind(actors) if issubclass(kind, RaysGroup) else kind


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (rude.FailsInSilence, "the cable is out"),
        (rude.FailsToSend, "FailsToSend.send failed with OSError: the cable is out"),
        (rude.FailsToAbort, "FailsToAbort.send failed with OSError: the cable is out"),
        (rude.HangsInAbort, "HangsInAbort.send failed with OSError: the cable is out"),
        (rude.ExitsInSend, "SystemExit: leaving"),
        (rude.ExitsInRaysSend, "send to rank 1 at rank 0 of link 0 .* failed in ExitsInRaysSend: SystemExit: leaving"),
        (rude.PollFails, "rank [01] of link 0 of graph 'rude' .*: PollFails.(poll|send|recv) failed with OSError: poll broke"),
        (rude.EventFails, "receiving TensorsBody.*make#0 from TensorsBody.* failed: OSError: event broke"),
        (rude.ReceivesLess, r"ReceivesLess was to receive int64 \[1000\] and gives int64 \[10\]"),
        (rude.ReceivesElsewhere, "ReceivesElsewhere gives a tensor of meta, which is not on its device"),
    ],
)
def test_what_goes_wrong_ends_the_graph_with_its_reason(two: list[Any], kind: Any, message: str) -> None:
    begin = time.monotonic()
    with raycomm.compile(chain(two, given(kind, two)), name="rude") as graph:
        right = 0
        with pytest.raises(ActorDiedError, match=message):
            while time.monotonic() - begin < _PROMPTLY_S:
                refs = [graph.execute(min(right + number, rude.WRONG)) for number in range(8)]
                for number, ref in enumerate(refs):
                    assert ref.get(PATIENCE_S) == 1000 * min(right + number, rude.WRONG)
                right += len(refs)
        assert right in (0, *range(8, 1000, 8))
    assert time.monotonic() - begin < 2 * _PROMPTLY_S
    assert ray.get([actor.pid.remote() for actor in two])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (rude.ExitsWhenMade, r"ExitsWhenMade\(\.\.\.\) for link 0 of graph 'rude' .* failed: SystemExit: leaving"),
        (rude.ExitsInInitialize, r"communicator 0 \(ExitsInInitialize\) of graph 'rude': initialize\(.\) failed with SystemExit"),
    ],
)
def test_who_exits_in_set_up_is_named(two: list[Any], kind: Any, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        raycomm.compile(chain(two, given(kind, two)), name="rude")
    assert ray.get([actor.pid.remote() for actor in two])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (rude.HangsWhenMade, r"TensorsBody#.* is in HangsWhenMade\(\.\.\.\) for link 0 of graph 'rude' from"),
        (rude.HangsInWarmUp, "TensorsBody#.* is in warm_up of link 0 of graph 'rude' from"),
        (rude.HangsInInitialize, r"TensorsBody#.* is in initialize\(.\) of communicator 0 \(HangsInInitialize\) of graph 'rude'"),
    ],
)
def test_what_set_up_waits_for_is_said(two: list[Any], kind: Any, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ChannelTimeoutError, match=message):
        raycomm.compile(chain(two, given(kind, two)), name="rude", compile_timeout=4.0)
    assert time.monotonic() - begin < _PROMPTLY_S
    with raycomm.compile(chain(two, SocketLink)) as graph:
        assert graph.execute(2).get(PATIENCE_S) == 2000


@pytest.mark.parametrize("kind", ["class", "object"])
def test_what_comes_too_late_is_ended(two: list[Any], tmp_path: Path, kind: str) -> None:
    marks = str(tmp_path)
    late = functools.partial(rude.MadeLate, marks=marks) if kind == "class" else rude.InitializedLate(two, marks)
    with pytest.raises(ChannelTimeoutError, match="MadeLate|InitializedLate"):
        raycomm.compile(chain(two, late), compile_timeout=3.0)
    (tmp_path / "go").touch()
    for what in ("made", "ended"):
        until(lambda what=what: len(list(tmp_path.glob(f"{what} *"))) == 2, f"both are {what}")  # type: ignore[misc]
    until(lambda: not any(ray.get([actor.threads.remote() for actor in two])), "no thread is left")


def test_what_an_object_keeps_per_thread_is_there(two: list[Any]) -> None:
    with raycomm.compile(chain(two, rude.KeepsThingsPerThread(two))) as graph:
        for number in range(5):
            assert graph.execute(number).get(PATIENCE_S) == 1000 * number
            time.sleep(0.01)  # so that each transfer finds nothing under way


def test_an_object_that_is_false_is_used(cluster: None) -> None:
    ranks = [Rank.remote(rank) for rank in range(2)]
    x = RayInputNode()
    sums = collective.allreduce.bind([rank.tensor.bind(x) for rank in ranks], transport=rude.Falsy(ranks))
    with raycomm.compile(ranks[0].total.bind(sums[0])) as graph:
        assert 'over own 0 "Falsy"' in str(graph.plan)
        assert graph.execute(1.0).get(PATIENCE_S) == 24.0


def test_what_a_communicator_does_not_take_is_not_taken_elsewhere(cluster: None) -> None:
    """Arrays go through shared memory where nobody named anything else."""
    ranks = [Rank.remote(rank) for rank in range(2)]
    with InputNode() as x:
        node = MultiOutputNode(raycomm.allreduce([bind(rank.array, x) for rank in ranks], communicator=SocketLink))
    with (
        raycomm.compile(node) as graph,
        pytest.raises(CollectiveError, match="must be tensors of host memory .*, as communicator SocketLink asks for; move them"),
    ):
        graph.execute(1)[0].get(PATIENCE_S)


def test_a_graph_ends_while_a_call_of_the_users_hangs_for_good(two: list[Any]) -> None:
    graph = raycomm.compile(chain(two, rude.HangsInReceive(two)))
    refs = [graph.execute(number) for number in range(5)]
    assert [ref.get(PATIENCE_S) for ref in refs[: rude.WRONG]] == [1000 * number for number in range(rude.WRONG)]
    with pytest.raises(ChannelTimeoutError, match="waits for the tensors of TensorsBody.*make#0 of execution 3, which come from"):
        refs[rude.WRONG].get(0.5)
    begin = time.monotonic()
    graph.teardown()
    assert time.monotonic() - begin < _PROMPTLY_S
    with pytest.raises(ChannelClosedError):
        refs[rude.WRONG].get()
    with raycomm.compile(chain(two, SocketLink)) as again:
        assert again.execute(2).get(PATIENCE_S) == 2000
