"""A collective in an actor's loop: publish the own tensors, read the others', combine them.

Each rank has a channel to all others, and where there are enough of them a second one (`raycomm.plan.placement`). On every
channel goes exactly one message per execution, whatever happens: the tensors, a `Failure`, or on the second channel, where it is
not needed, None. So a failed execution leaves the next one in step. What a message leads to follows from the messages of all
ranks, which all ranks see, so they succeed together or fail together, with the failure of the lowest rank that has one.

    small, or few ranks         every rank reads all tensors and combines them itself: one trip
    large allreduce, many ranks every rank combines one part of all tensors, publishes it, gathers the others' parts: two trips

Tensors of others are read where they lie in shared memory, and let go before the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from raycomm import _core
from raycomm.channel import ShmArena, ShmReader, ShmWriter
from raycomm.codec import Failure
from raycomm.errors import CollectiveError, SerializationError
from raycomm.graph.model import CollectiveKind
from raycomm.plan.actions import Collective, Plan
from raycomm.runtime import reduction
from raycomm.runtime.reduction import Mismatch, Raw, Spec

# Bytes of a rank's tensors from which combining them in parts pays, where there is a second channel.
SHARE_FROM_BYTES = 256 * 1024

_T = TypeVar("_T")


class Exchange:
    """One actor's part in a collective, called once per execution.

    Args:
        action: from the plan.
        plan: names ranks and channels.
        process: this actor's index in it.
        arena: its memory in the graph.
        send_failure: publishes a failure with a writer.
        unsent: what a failed write on some channels means for an execution.
        place: of the action in its actor's list; shown to others while tensors are combined.
    """

    def __init__(
        self,
        action: Collective,
        plan: Plan,
        process: int,
        arena: ShmArena,
        send_failure: Callable[[ShmWriter, Failure], None],
        unsent: Callable[[Exception, tuple[int, ...]], Failure],
        place: int,
    ) -> None:
        self._action = action
        self._send_failure = send_failure
        self._unsent = unsent
        self._label = f"{plan.processes[process].label}.{action.kind}"
        self._graph = plan.name
        self._mark, self._place = arena.core.mark, place
        writers = [plan.channels[channel].writer for channel in action.parts] or [process]
        self._names = [plan.processes[writer].label for writer in writers]
        writing_ends = [arena.writer((channel,)) for channel in action.written]
        self._part = writing_ends[0] if action.parts else None
        self._slice = writing_ends[1] if action.slices else None

        def reader(channel: int) -> ShmReader:
            ends = plan.channels[channel]
            return arena.reader(ends.writer, channel, ends.readers.index(process), drain=False)

        others = [rank for rank in range(len(action.parts)) if rank != action.rank]
        self._parts = {rank: reader(action.parts[rank]) for rank in others}
        self._slices = {rank: reader(action.slices[rank]) for rank in others} if action.slices else {}

    def run(self, given: Sequence[Any], execution: int) -> tuple[Any, ...]:
        """The results, one per tensor given; the same `Failure` for each where the execution fails.

        Raises:
            raycomm._core.Closed: the graph was closed.
        """
        own = self._publish(given, execution)
        parts = [own if rank == self._action.rank else None for rank in range(len(self._names))]
        for rank, channel in self._parts.items():
            parts[rank] = self._take(channel, rank, execution)
        self._mark(self._place)
        result = self._result(parts, execution)
        return (result,) * len(given) if isinstance(result, Failure) else result

    def _publish(self, given: Sequence[Any], execution: int) -> Any:
        """Send the own tensors, or a failure, to all others; what they see of it."""
        own: Any = next((value for value in given if type(value) is Failure), None)
        if own is None:
            own = self._guarded(lambda: self._message(given), [], execution)
        return own if self._part is None else self._send(self._part, own, self._action.parts)

    def _message(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Specs and bytes. A broadcast looks at one rank's tensor only: the others send that they are there."""
        if self._action.root not in (None, self._action.rank):
            return ((),)
        specs = [reduction.describe(value) for value in given]
        raws = [reduction.raw_of(value) for value, spec in zip(given, specs, strict=True) if spec.kind != reduction.OTHER]
        return (tuple((spec.kind, spec.dtype, spec.shape) for spec in specs), *raws)

    def _send(self, writer: ShmWriter, message: Any, channels: tuple[int, ...]) -> Any:
        """Publish a message, or why it cannot be: whichever it is, it counts as this rank's."""
        if type(message) is not Failure:
            try:
                writer.write(message)
                return message
            except (_core.Closed, _core.Misuse):
                raise
            except Exception as error:  # nothing was published
                message = self._unsent(error, (channels[self._action.rank],))
        self._send_failure(writer, message)
        return message

    def _take(self, channel: ShmReader, rank: int, execution: int) -> Any:
        try:
            return channel.read()
        except SerializationError as error:  # the message was consumed
            return Failure.capture(error, f"{self._label} reading from rank {rank} ({self._names[rank]})", execution)

    def _result(self, parts: list[Any], execution: int) -> Any:
        """What this rank gets, from the messages of all; and its second message, where it has a channel for one."""
        action = self._action
        result: Any = next((part for part in parts if type(part) is Failure), None)
        if result is None:
            ranks = [[Spec(*spec) for spec in part[0]] for part in parts]
            raws = [part[1:] for part in parts]
            result = self._guarded(lambda: self._check(ranks), ranks, execution)
            if result is None and self._shares_work(ranks[0]):
                return self._in_parts(ranks, raws, execution)
            if result is None:
                result = self._combined(ranks, raws, execution)
        if self._slice is not None:
            self._send(self._slice, result if type(result) is Failure else None, action.slices)
            for channel in self._slices.values():
                channel.skip()
        return result

    def _check(self, ranks: list[list[Spec]]) -> None:
        """Raise `Mismatch` if the tensors of the ranks cannot be combined."""
        reduction.check(self._action.kind, self._action.op, self._action.root, ranks)

    def _combined(self, ranks: list[list[Spec]], raws: list[Sequence[Raw]], execution: int) -> Any:
        """The results of tensors that can be combined, or the failure of this execution."""
        return self._guarded(lambda: self._alone(ranks[self._action.root or 0], raws), ranks, execution)

    def _shares_work(self, specs: list[Spec]) -> bool:
        return self._slice is not None and sum(spec.size for spec in specs) >= SHARE_FROM_BYTES

    def _alone(self, specs: list[Spec], raws: list[Sequence[Raw]]) -> tuple[Any, ...]:
        """The results, all made here."""
        action, world = self._action, len(raws)
        results = []
        for place, spec in enumerate(specs):
            numbers, size = reduction.arithmetic(spec), spec.size
            first, inner = spec.shape[:1], spec.shape[1:]
            if action.kind is CollectiveKind.ALLGATHER:
                tensor, raw = numbers.new((first[0] * world, *inner), spec.elements * world)
                for rank, theirs in enumerate(raws):
                    raw[rank * size : (rank + 1) * size] = theirs[place]
            elif action.root is not None:
                tensor, raw = numbers.new(spec.shape, spec.elements)
                raw[:] = raws[action.root][place]
            else:
                assert action.op is not None
                sources = [theirs[place] for theirs in raws]
                if action.kind is CollectiveKind.REDUCESCATTER:
                    tensor, raw = numbers.new((first[0] // world, *inner), spec.elements // world)
                    share = _share(spec, action.rank, world)
                    sources = [source[share] for source in sources]
                else:
                    tensor, raw = numbers.new(spec.shape, spec.elements)
                reduction.combine(spec, action.op, sources, raw)
            results.append(tensor)
        return tuple(results)

    def _in_parts(self, ranks: list[list[Spec]], raws: list[Sequence[Raw]], execution: int) -> Any:
        """The results of an allreduce: this rank's share is combined here and published, the others' are gathered."""
        specs, world = ranks[0], len(raws)
        made: list[tuple[Any, Raw]] = []
        message = self._guarded(lambda: self._own_share(specs, raws, made), ranks, execution)
        assert self._slice is not None
        shares: list[Any] = [message] * world
        shares[self._action.rank] = self._send(self._slice, message, self._action.slices)
        for rank, channel in self._slices.items():
            shares[rank] = self._take(channel, rank, execution)
        failure = next((share for share in shares if type(share) is Failure), None)
        if failure is not None:
            return failure
        for rank in self._slices:
            for spec, (_, raw), share in zip(specs, made, shares[rank], strict=True):
                raw[_share(spec, rank, world)] = share
        return tuple(tensor for tensor, _ in made)

    def _own_share(self, specs: list[Spec], raws: list[Sequence[Raw]], made: list[tuple[Any, Raw]]) -> list[Raw]:
        """Make the results with this rank's share filled in; the bytes of that."""
        action, world = self._action, len(raws)
        assert action.op is not None
        message = []
        for place, spec in enumerate(specs):
            made.append(reduction.arithmetic(spec).new(spec.shape, spec.elements))
            share = _share(spec, action.rank, world)
            mine = made[-1][1][share]
            reduction.combine(spec, action.op, [theirs[place][share] for theirs in raws], mine)
            message.append(mine)
        return message

    def _guarded(self, compute: Callable[[], _T], ranks: list[list[Spec]], execution: int) -> _T | Failure:
        """What `compute` gives, or the failure of this execution: no message is left out because of what it raises."""
        try:
            return compute()
        except Mismatch as problem:
            return Failure.capture(self._refusal(problem, ranks, execution), self._label, execution)
        except Exception as error:
            return Failure.capture(error, self._label, execution)

    def _refusal(self, problem: Mismatch, ranks: list[list[Spec]], execution: int) -> CollectiveError:
        shown = []
        for rank, (name, specs) in enumerate(zip(self._names, ranks, strict=True)):
            shown.append(f"rank {rank} ({name}): {' and '.join(map(str, specs)) or 'not looked at'}")
        operation = f" ({self._action.op.name})" if self._action.op is not None else ""
        name = f"{self._label}#{self._action.node}{operation}"
        return CollectiveError(
            f"{name} of graph {self._graph!r}, execution {execution}: {problem}. The tensors were: {'; '.join(shown)}",
            graph=self._graph,
            collective=name,
            execution=execution,
            tensors=tuple(shown),
        )


def _share(spec: Spec, rank: int, world: int) -> slice:
    """The bytes of a tensor that fall to a rank; equal parts where the world divides its elements."""
    itemsize = spec.size // max(1, spec.elements)
    return slice(spec.elements * rank // world * itemsize, spec.elements * (rank + 1) // world * itemsize)
