"""A collective on a group in an actor's loop: publish what the own tensors are, read what the others' are, then launch.

As on any other collective exactly one message goes on every channel per execution, and what follows from the messages is the same
at all ranks. So either all launch, the same operations in the same order, or none does. Nobody waits for the results: they are
`Arriving`.

Where a group was not asked for, but found to be possible, a method may still give tensors in host memory. If all ranks do in an
execution, they are combined there, as without a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from raycomm.channel.device import ANY_SIZE, Arriving, broken, in_one_piece
from raycomm.codec import Failure
from raycomm.codec.tensor import is_exact
from raycomm.device import Communicator, Received, Stream
from raycomm.device.combining import combine
from raycomm.graph.model import CollectiveKind
from raycomm.plan.transfer import Backend, Carrier, OwnBackend
from raycomm.runtime.collectives import Exchange
from raycomm.runtime.reduction import OTHER, Mismatch, Spec

_ON_DEVICE = "device"

_T = TypeVar("_T")


class DeviceExchange(Exchange):
    """One actor's part in a collective on a group.

    Args:
        link: this actor's end of the group.
        stream: to launch on.
        over: what carries the group.
        asked_for: whether the user named it; then tensors in host memory are refused where it is not for those.
        *rest: what `Exchange` takes.
    """

    def __init__(self, link: Communicator, stream: Stream, over: Carrier | None, asked_for: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self._link = link
        self._stream = stream
        self._refuses_host = asked_for and (over is Backend.NCCL or isinstance(over, OwnBackend))
        self._over = over.name if isinstance(over, OwnBackend) else repr(str(over))
        self._given: Sequence[Any] = ()
        self._combines: set[str] = set()  # dtypes that the operation is for

    def run(self, given: Sequence[Any], execution: int) -> tuple[Any, ...]:
        """See `Exchange`. What it returns may still arrive."""
        self._given = given
        try:
            return super().run(given, execution)
        finally:
            self._given = ()

    def _message(self, given: Sequence[Any]) -> tuple[Any, ...]:
        looked_at = self._action.root in (None, self._action.rank)
        if looked_at and all(map(self._moves, given)):
            return (tuple((_ON_DEVICE, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for value in given),)
        return super()._message(given)

    def _moves(self, value: Any) -> bool:
        return is_exact(value) and self._link.device.holds(value) and not (value.is_quantized or value.is_nested)

    def _guarded(self, compute: Callable[[], _T], ranks: list[list[Spec]], execution: int) -> _T | Failure:
        """After the exchange only what all ranks find alike fails the execution: if one alone did, it would launch less."""
        if not ranks:
            return super()._guarded(compute, ranks, execution)
        try:
            return compute()
        except Mismatch as problem:
            return Failure.capture(self._refusal(problem, ranks, execution), self._label, execution)
        except Exception as error:
            raise broken(self._link, f"taking part in {self._label}", error) from None

    def _check(self, ranks: list[list[Spec]]) -> None:
        looked_at = ranks if self._action.root is None else [ranks[self._action.root]]
        kinds = {spec.kind for specs in looked_at for spec in specs}
        places = {kind == _ON_DEVICE for kind in kinds}
        if len(places) > 1 and OTHER not in kinds:
            raise Mismatch(f"all of them must lie on devices that {self._link.name} joins, or all in host memory")
        if self._refuses_host and places == {False}:
            device = self._link.device.name
            raise Mismatch(f"they must be tensors of {device}, as communicator {self._over} asks for; move them there first")
        spec, op = looked_at[0][0], self._action.op
        if spec.kind == _ON_DEVICE and not hasattr(torch, spec.dtype):
            raise RuntimeError(f"torch {torch.__version__} has no {spec.dtype} here; use one version in all actors")
        super()._check(ranks)
        if op is not None and spec.kind == _ON_DEVICE and spec.dtype not in self._combines:
            try:
                probe = torch.zeros(len(ranks), dtype=getattr(torch, spec.dtype), device="cpu")
                combine(str(self._action.kind), str(op), None, 0, [probe] * len(ranks))
            except (ValueError, RuntimeError, TypeError) as error:
                raise Mismatch(f"{op.name} is not for {spec.dtype} tensors ({error}); convert them first") from None
            self._combines.add(spec.dtype)

    def _combined(self, ranks: list[list[Spec]], raws: list[Sequence[Any]], execution: int) -> Any:
        specs = ranks[self._action.root or 0]
        if specs[0].kind != _ON_DEVICE:
            return super()._combined(ranks, raws, execution)
        self._link.poll()
        try:
            return tuple([self._launch(value, spec) for value, spec in zip(self._given, specs, strict=True)])
        except BaseException as error:  # the others have launched it, or will: what comes next would meet the wrong one
            raise broken(self._link, f"launching {self._label}", error) from None

    def _launch(self, value: Any, spec: Spec) -> Arriving:
        link, action, stream = self._link, self._action, self._stream
        if action.root in (None, action.rank):
            # A copy: the method that made it may write to it again, and its next call waits for nothing of this.
            tensor, order = in_one_piece(value, ANY_SIZE)
            if order is not None:
                tensor = value.detach().contiguous()
        else:  # says shape and dtype only
            tensor = link.device.allocate(spec.shape, getattr(torch, spec.dtype), stream)
        computing = link.device.current_stream()
        if computing is not None:
            stream.wait(computing.record())
        op = "" if action.op is None else str(action.op)
        came: Received
        match action.kind:
            case CollectiveKind.ALLREDUCE:
                came = link.allreduce(tensor, op, stream=stream)
            case CollectiveKind.ALLGATHER:
                came = link.allgather(tensor, stream=stream)
            case CollectiveKind.REDUCESCATTER:
                came = link.reducescatter(tensor, op, stream=stream)
            case CollectiveKind.BROADCAST:
                assert action.root is not None
                came = link.broadcast(tensor, action.root, stream=stream)
        return Arriving(lambda: came.tensor, [came], link.device)
