"""What to pass to `with_tensor_transport` of Ray's own nodes for gloo: they take no such word, but an object of their own kind.

from raycomm.ray_dag.gloo import Gloo

node = worker.forward.bind(inp).with_tensor_transport(transport=Gloo())
sums = collective.allreduce.bind(nodes, transport=Gloo(workers))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from ray.experimental.channel.communicator import Communicator

from raycomm.graph.tensor_transport import TensorTransport


class Gloo(Communicator):
    """Stands for transport "gloo" in graphs that raycomm compiles. It moves nothing itself, so Ray cannot use it.

    Args:
        actors: handles of those of a collective, which Ray compares with those of its nodes. Edges need none.
    """

    stands_for: ClassVar[TensorTransport] = TensorTransport.GLOO

    def __init__(self, actors: Sequence[Any] = ()) -> None:
        self._actors = list(actors)

    def get_actor_handles(self) -> list[Any]:
        """Those given."""
        return self._actors

    def get_rank(self, actor: Any) -> int:
        """The place of an actor among them."""
        return self._actors.index(actor)

    def get_self_rank(self) -> None:
        """None: it has none of its own."""

    def get_world_size(self) -> int:
        """How many actors were given."""
        return len(self._actors)

    def get_transport_name(self) -> str:
        """A word that Ray's nodes take."""
        return "accelerator"

    @classmethod
    def generate_communicator_id(cls) -> str:
        """Of no use."""
        return "gloo"

    def destroy(self) -> None:
        """Nothing was made."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("raycomm.ray_dag.gloo.Gloo is for graphs that raycomm compiles: raycomm.compile(node)")

    initialize = send = recv = allgather = allreduce = reducescatter = _refuse
    recv_stream = send_stream = property(_refuse)
