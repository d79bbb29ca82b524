"""Graphs whose plans several tests look at."""

from __future__ import annotations

from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
from raycomm.graph.model import Graph, ReduceOp
from raycomm.graph.nodes import InputNode, MultiOutputNode
from tests.unit.stub_actors import actor


def chain() -> Graph:
    w1, w2 = actor("W1"), actor("W2")
    return build(bind(w2.forward, bind(w1.forward, InputNode())))


def diamond() -> Graph:
    w1, w2, w3 = actor("W1"), actor("W2"), actor("W3")
    inp = InputNode()
    a = bind(w1.forward, inp[0])
    b = bind(w2.scale, a, 3)
    c = bind(w3.scale, a, offset=inp.b)
    return build(bind(w1.join, b, c, local=a))


def fan_out() -> Graph:
    workers = [actor("W1"), actor("W2"), actor("W3")]
    inp = InputNode()
    outs = [bind(w.forward, inp) for w in (*workers, workers[1])]
    return build(MultiOutputNode([*outs, outs[0], inp]))


def two_returns() -> Graph:
    w1, w2 = actor("W1"), actor("W2")
    first, second = bind(w1.split, InputNode()["odd key"])
    third, _ = bind(w1.split, second)
    return build(MultiOutputNode([bind(w2.join, second, first), first, third]))


def collectives() -> Graph:
    """Several tensors per actor, slices among many actors, results used in part, a collective of one actor, channel options."""
    workers = [actor(f"W{index}") for index in range(1, 5)]
    inp = InputNode().with_channel_options(slots=64)
    pairs = [bind(w.split, inp) for w in workers]
    means = allreduce([[first for first, _ in pairs], [second for _, second in pairs]], ReduceOp.AVG)
    gathered = allgather([mean[0] for mean in means])
    alone = reducescatter(gathered[:1])[0].with_channel_options(inline_bytes=4096, slots=2, share_tensors=True)
    roots = broadcast([gathered[1], means[3][1]], root=1)
    roots[1].with_channel_options(allow_pickle=False)
    return build(MultiOutputNode([bind(workers[0].join, *means[0]), alone, *roots]))
