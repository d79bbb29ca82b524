"""Communicators of users in graphs and plans: what is taken for one, what stands in the text, their order, and rules for them."""

from __future__ import annotations

from typing import Any

import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.graph.own_communicator import NoCommunicatorError, OwnCommunicator, read_communicator
from raycomm.graph.tensor_transport import TensorTransport
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Collective, Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Place
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import OwnBackend, Recv, Send
from raycomm.plan.verify import verify
from raycomm.ray_dag.gloo import Gloo
from raycomm.testing.simulated import simulate
from tests.unit.stub_actors import actor


def nothing(*args: Any, **kwargs: Any) -> None: ...


class Whole:
    """Has the methods of raycomm's interface."""

    warm_up = send = recv = allreduce = allgather = reducescatter = broadcast = poll = abort = nothing


class LikeRays:
    """Has those of Ray's."""

    initialize = send = recv = nothing

    def __init__(self, *handles: Any, transport: str = "accelerator") -> None:
        self._handles = handles
        self._transport = transport

    def get_actor_handles(self) -> list[Any]:
        return list(self._handles)

    def get_rank(self, handle: Any) -> int:
        return [other._actor_id.hex() for other in self._handles].index(handle._actor_id.hex())

    def get_transport_name(self) -> str:
        return self._transport

    def __eq__(self, other: object) -> bool:
        raise AssertionError("told apart by identity")

    __hash__ = None  # type: ignore[assignment]


class Raises(LikeRays):
    def get_rank(self, handle: Any) -> int:
        raise KeyError(handle._actor_id.hex())


def test_what_is_taken_for_a_communicator() -> None:
    a, b = actor("A"), actor("B")
    keys = (b._actor_id.hex(), a._actor_id.hex())
    group = LikeRays(b, a)
    assert read_communicator(Whole) == OwnCommunicator("Whole", Whole)
    assert read_communicator(group) == OwnCommunicator("LikeRays", group, keys)
    assert read_communicator(group) != read_communicator(LikeRays(b, a))
    assert read_communicator(Gloo()) is TensorTransport.GLOO
    for other in (3, "own", object, object(), a, bind):
        assert read_communicator(other) is None
    for wrong, message in (
        (type("Part", (), {"send": nothing, "abort": nothing}), "class Part has no warm_up, recv, allreduce"),
        (Whole(), "it is one end of a communicator, a Whole"),
        (LikeRays, "LikeRays is a class of Ray's"),
        (LikeRays(a, a), "gives its 2 actors the ranks"),
        (LikeRays(3, a), "LikeRays is of something that is no actor"),
        (Raises(a, b), "get_rank of Raises failed with KeyError"),
    ):
        with pytest.raises(NoCommunicatorError, match=message) as caught:
            read_communicator(wrong)
        assert caught.value.remedy


def mixed(edges: Any, other: Any, group: Any, world: int = 3) -> Graph:
    """Edges in both directions over two communicators, a value with several readers, and collectives over a third."""
    workers = [actor(f"W{index}") for index in range(world)]
    with InputNode() as x:
        made = [bind(worker.forward, x).with_tensor_transport(edges) for worker in workers]
        crossed = [
            bind(worker.join, made[place - 1], made[place - 2]).with_tensor_transport(other)
            for place, worker in enumerate(workers)
        ]
        summed = allreduce(crossed, communicator=group)
        turned = allreduce([bind(worker.forward, x) for worker in workers[::-1]], communicator=group)
        summed[0].with_tensor_transport(edges)
        last = bind(workers[1].join, summed[0], turned[1])
    return build(MultiOutputNode([last, *summed, *turned]))


def own_of(world: int, kind: str) -> Any:
    return Whole if kind == "class" else LikeRays(*[actor(f"W{index}") for index in range(world)])


@pytest.mark.parametrize("policy", list(StreamPolicy))
@pytest.mark.parametrize("kinds", [("class", "object"), ("object", "class"), ("object", "object"), ("same", "same")])
@pytest.mark.parametrize("world", [3, 5])
def test_plans(policy: StreamPolicy, kinds: tuple[str, str], world: int) -> None:
    first = own_of(world, kinds[0])
    second = first if kinds[1] == "same" else own_of(world, kinds[1])
    graph = mixed(first, "gloo" if kinds[0] == "class" else second, second, world)
    places = {process: Place.cpu() for process in range(1, world + 1)}
    for max_links in (2, 100):
        plan = on_devices(lower(graph, "own"), graph, places, policy=policy, max_links=max_links)
        verify(plan)
        assert parse_plan(plan.to_text()) == plan
        simulate(plan)  # one stream for what is one communicator deadlocks nothing
        for over, streams in streams_of(plan).items():
            assert len(streams) == 1, over
    over = {part.over for part in (*plan.links, *plan.groups)}
    assert {own.name for own in over if isinstance(own, OwnBackend)} <= {"Whole", "LikeRays"}
    assert all(len(link.readers) == 1 for link in plan.links if isinstance(link.over, OwnBackend) and link.over.ranks)


def streams_of(plan: Plan) -> dict[tuple[OwnBackend, int], set[int | None]]:
    """By communicator that is one for all its links, and actor, the streams of its operations."""
    found: dict[tuple[OwnBackend, int], set[int | None]] = {}
    for entry in plan.actors:
        for action in entry.actions:
            over: Any = None
            if isinstance(action, (Send, Recv)):
                over = plan.links[action.link].over
            elif isinstance(action, Collective) and action.group is not None:
                over = plan.groups[action.group].over
            if isinstance(over, OwnBackend) and over.ranks:
                assert isinstance(action, (Send, Recv, Collective))
                found.setdefault((over, entry.process.index), set()).add(action.stream)
    return found


def test_members_and_numbers() -> None:
    w = [actor(f"W{index}") for index in range(3)]
    group, other = LikeRays(w[1], w[0]), LikeRays(w[0], w[1], w[2])
    with InputNode() as x:
        made = bind(w[0].forward, x).with_tensor_transport(other)
        back = bind(w[1].forward, made).with_tensor_transport(group)
        node = bind(w[2].join, bind(w[0].forward, back).with_tensor_transport(other), x)
    graph = build(node)
    assert graph.communicators == (read_communicator(other), read_communicator(group))
    plan = on_devices(lower(graph, "numbers"), graph, {})
    assert [str(link) for link in plan.links] == [
        'link 0 1 -> 2 over own 0 "LikeRays" ranks 1, 2, 3',
        'link 1 1 -> 3 over own 0 "LikeRays" ranks 1, 2, 3',
        'link 2 2 -> 1 over own 1 "LikeRays" ranks 2, 1',
    ]


def test_one_that_says_cpu_is_for_collectives() -> None:
    """As in Ray, whose edges go through shared memory beside it."""
    a, b = actor("A"), actor("B")
    group = LikeRays(a, b, transport="cpu")
    with InputNode() as x:
        made = [bind(worker.forward, x) for worker in (a, b)]
        node = MultiOutputNode([bind(b.forward, made[0].with_tensor_transport(group)), *allreduce(made, communicator=group)])
    graph = build(node)
    assert graph.hints[0][1].transport is TensorTransport.SHM
    plan = on_devices(lower(graph, "cpu"), graph, {})
    assert plan.links == ()
    assert str(plan.groups[0].over) == 'own 0 "LikeRays" ranks 1, 2'


TOGETHER = """\
plan "together"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
process 3 "C"
channel 0 "input" 0 -> 1, 2
channel 1 "A.f#0" 1 -> 2 transport device
channel 2 "B.f#1" 2 -> 1 transport device
channel 3 "A.f#2" 1 -> 0
channel 4 "B.f#3" 2 -> 0
link 0 1 -> 2 over own 0 "G" ranks 2, 1
link 1 2 -> 1 over own 0 "G" ranks 2, 1
input whole -> channel 0
output channel 3
output channel 4
returns list
actor 1 registers 3
  r0 = read 0
  r1 = 0:f(r0)
  send 1 from r1 on link 0 stream 1
  r2 = recv 2 on link 1 stream 1
  release r0, r1
  r0 = 2:f(r2)
  write 3 from r0
  release r0, r2
actor 2 registers 3
  r0 = read 0
  r1 = recv 1 on link 0 stream 1
  r2 = 1:f(r0)
  send 2 from r2 on link 1 stream 1
  release r0, r2
  r0 = 3:f(r1)
  write 4 from r0
  release r0, r1
actor 3 registers 0
"""


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        ("recv 2 on link 1 stream 1", "recv 2 on link 1 stream 2", "on another stream than what went before it over own 0"),
        (
            'link 1 2 -> 1 over own 0 "G" ranks 2, 1',
            'link 1 2 -> 1 over own 0 "G" ranks 1, 2',
            "communicator 0 is another one elsewhere",
        ),
        ('over own 0 "G" ranks 2, 1', 'over own 0 "G" ranks 2, 3', "not all its actors have a rank"),
        ('over own 0 "G" ranks 2, 1', 'over own 0 "G" ranks 2, 1, 2', "does not join two or more actors, each once"),
    ],
)
def test_verify_refuses_what_does_not_fit(text: str, instead: str, message: str) -> None:
    verify(parse_plan(TOGETHER))
    assert parse_plan(TOGETHER).to_text() == TOGETHER
    assert text in TOGETHER
    with pytest.raises(CompileError, match=message):
        verify(parse_plan(TOGETHER.replace(text, instead)))


def test_who_sends_on_what_a_collective_gives_waits_on_the_host_where_devices_differ() -> None:
    """A sends on over another communicator than the collective's. B's part in that is behind a send to C on B's stream, which C
    does not take before it has something that A gives only afterwards."""
    text = """\
plan "apart"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
process 3 "C"
channel 0 "input" 0 -> 1, 2, 3
channel 1 "B.f#0" 2 -> 3 transport device
channel 2 "A.allreduce#2" 1 -> 3 transport device sender_keeps yes
channel 3 "A.f#4" 1 -> 3
channel 4 "C.f#5" 3 -> 0
channel 5 "A.allreduce#2" 1 -> 2
channel 6 "B.allreduce#3" 2 -> 1
link 0 2 -> 3 over gloo
link 1 1 -> 3 over OVER
group 0 1, 2 over gloo
input whole -> channel 0
output channel 4
returns one
actor 1 registers 3
  r0 = read 0
  r1 = 1:f(r0)
  r2 = collective 2 allreduce sum rank 0 from r1 parts 5, 6 on group 0 stream 1
  send 2 from r2 on link 1 stream 2 beside
  release r1, r2
  r1 = 4:f(r0)
  write 3 from r1
  release r0, r1
actor 2 registers 3
  r0 = read 0
  r1 = 0:f(r0)
  send 1 from r1 on link 0 stream 1
  r2 = collective 3 allreduce sum rank 1 from r1 parts 5, 6 on group 0 stream 1
  release r0, r1, r2
actor 3 registers 4
  r0 = read 0
  r1 = read 3
  r2 = recv 1 on link 0 stream 1
  r3 = recv 2 on link 1 stream 2
  release r1
  r1 = 5:f(r0, r2, r3)
  write 4 from r1
  release r0, r1, r2, r3
"""
    verify(parse_plan(text.replace("OVER", "gloo")))
    for over in ("nccl", 'own 0 "Whole"', 'own 0 "G" ranks 1, 3'):
        with pytest.raises(DeadlockError, match="A: send 2 from r2 on link 1"):
            verify(parse_plan(text.replace("OVER", over)))
