"""Memory of a simulated device. What is in it is one opaque value: a term made of what it was computed from, or a real tensor.

A block holds `Poison` in place of a value while nothing has been written to it, while something is being written to it, and from
the moment that its memory may be used for something else. Whoever reads then, gets the poison, and so does all that is computed
from it; the first reader also leaves a `MemoryFault` in the world, which says what happened. A value that changed between
the begin and the end of whoever reads it is torn: also poison, also a fault. So is a use that does not wait for an earlier one,
even where the delays of this run keep the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raycomm.errors import RaycommError
from raycomm.testing.simulated_order import Moment


class Hazard(StrEnum):
    """What can be wrong with memory that is read or written."""

    EARLY_READ = "early read"
    """Read before what writes it has ended."""
    EARLY_FREE = "early free"
    """Used after it was given back, or while it already was something else's."""
    OVERWRITE = "overwrite"
    """Written while somebody else read or wrote it."""
    DERIVED = "derived"
    """Computed from poison; the fault was reported where the poison was read."""


@dataclass(frozen=True, slots=True)
class Poison:
    """In place of a value. `why` says what is wrong with the memory."""

    hazard: Hazard
    why: str


@dataclass(frozen=True, slots=True)
class MemoryFault:
    """Somebody used memory that was not his at that time.

    Attributes:
        hazard: in which way.
        operation: who used it, on which stream.
        memory: what.
        why: what was going on with it.
        time: virtual seconds.
    """

    hazard: Hazard
    operation: str
    memory: str
    why: str
    time: float

    def __str__(self) -> str:
        return f"{self.hazard} at {self.time:.3f} s: {self.operation} used {self.memory}: {self.why}"


class SimulatedMemoryError(RaycommError):
    """A program used memory of a simulated device at a wrong time. Attributes: `faults` (tuple of `MemoryFault`)."""

    faults: tuple[MemoryFault, ...] = ()

    @classmethod
    def of(cls, faults: list[MemoryFault]) -> SimulatedMemoryError:
        return cls("\n".join(["memory was used at a wrong time:", *(f"  {fault}" for fault in faults)]), faults=tuple(faults))


class Block:
    """A piece of a device's memory, used by one tensor after the other.

    Attributes:
        granted: which tensor the pool has given it to, counted from 0.
        life: which tensor's it is as far as the device has come.
        version: counts changes of `content`.
        writer: who writes to it at the moment.
        uses: who wrote to it last, and who has read it since; by name, and when.
    """

    __slots__ = ("content", "device", "granted", "index", "life", "uses", "version", "writer")

    def __init__(self, device: str, index: int) -> None:
        self.device = device
        self.index = index
        self.granted = 0
        self.life = 0
        self.version = 0
        self.content: Any = Poison(Hazard.EARLY_READ, "nothing was ever written to it")
        self.writer: str | None = None
        self.uses: list[tuple[str, Moment, bool]] = []

    def put(self, content: Any) -> int:
        """Change what is in it; the version that is now in it."""
        self.content = content
        self.version += 1
        return self.version

    def unordered(self, moment: Moment, *, writes: bool) -> tuple[str, bool] | None:
        """Who uses it in a way that excludes this use, and is not sure to have ended by `moment`; and whether he writes."""
        for who, earlier, wrote in self.uses:
            if (writes or wrote) and not moment.comes_after(earlier):
                return who, wrote
        return None

    def used(self, who: str, moment: Moment, *, writes: bool) -> None:
        """Remember a use."""
        if writes:
            self.uses.clear()
        self.uses.append((who, moment, writes))

    def __str__(self) -> str:
        return f"block {self.index} of {self.device}"


@dataclass(frozen=True, slots=True)
class Piece:
    """What an operation knows of a tensor: its memory, and which of the tensors there it is."""

    block: Block
    life: int
    shape: tuple[int, ...]
    dtype: Any


class Access:
    """One operation's use of blocks: what it reads and writes, from its begin to its end."""

    __slots__ = ("_faults", "_reads", "_who", "_writes")

    def __init__(self, who: str, faults: list[MemoryFault]) -> None:
        self._who = who
        self._faults = faults
        self._reads: list[tuple[Piece, int, Any]] = []
        self._writes: list[tuple[Piece, int]] = []

    def begin(self, reads: tuple[Piece, ...], writes: tuple[Piece, ...], now: float, moment: Moment) -> None:
        """From here to `end`, nobody else may write this memory, or use that in `writes` at all.

        Everybody else's use has to be over by `moment` or begin after it, in every run and not only in this.
        """
        contents = [self._look(piece, now, moment) for piece in reads]
        for piece in writes:
            block = piece.block
            if block.life != piece.life:
                self._fault(Hazard.EARLY_FREE, block, _other_life(piece), now)
            elif block.writer is not None:
                self._fault(Hazard.OVERWRITE, block, f"{block.writer} was writing to it", now)
            elif other := block.unordered(moment, writes=True):
                self._fault(Hazard.OVERWRITE, block, f"it does not wait for {other[0]}, which uses the memory", now)
            block.used(self._who, moment, writes=True)
            self._writes.append((piece, block.put(Poison(Hazard.EARLY_READ, f"{self._who} was writing to it"))))
            block.writer = self._who
        self._reads = [(piece, piece.block.version, content) for piece, content in zip(reads, contents, strict=True)]

    def taken(self, now: float) -> list[Any]:
        """What was read, at the end of the operation: poison where it has changed meanwhile."""
        return [
            content if piece.block.version == version else self._torn(piece, content, now)
            for piece, version, content in self._reads
        ]

    def end(self, contents: list[Any], now: float) -> None:
        """Put `contents` into what is written."""
        for (piece, version), content in zip(self._writes, contents, strict=True):
            block = piece.block
            if block.writer == self._who:
                block.writer = None
            if block.version == version:
                block.put(content)
            elif block.life != piece.life:
                self._fault(Hazard.EARLY_FREE, block, _other_life(piece), now)
            else:
                self._fault(Hazard.OVERWRITE, block, "it was written to by somebody else meanwhile", now)
                block.put(Poison(Hazard.OVERWRITE, f"{self._who} and somebody else wrote to it at a time"))

    def _look(self, piece: Piece, now: float, moment: Moment) -> Any:
        block, content = piece.block, piece.block.content
        if block.life != piece.life:
            self._fault(Hazard.EARLY_FREE, block, _other_life(piece), now)
            return Poison(Hazard.DERIVED, f"{block}: {_other_life(piece)}")
        if isinstance(content, Poison) and content.hazard is not Hazard.DERIVED:
            self._fault(content.hazard, block, content.why, now)
            return Poison(Hazard.DERIVED, f"{block}: {content.why}")
        if other := block.unordered(moment, writes=False):
            self._fault(Hazard.EARLY_READ, block, f"it does not wait for {other[0]}, which writes to the memory", now)
            return Poison(Hazard.DERIVED, f"{block}: read without waiting for {other[0]}")
        block.used(self._who, moment, writes=False)
        return content

    def _torn(self, piece: Piece, content: Any, now: float) -> Poison:
        block = piece.block
        freed = block.life != piece.life
        why = _other_life(piece) if freed else "it was written to meanwhile"
        if not (isinstance(content, Poison) and content.hazard is Hazard.DERIVED):
            self._fault(Hazard.EARLY_FREE if freed else Hazard.OVERWRITE, block, why, now)
        return Poison(Hazard.DERIVED, f"{block}: {why}")

    def _fault(self, hazard: Hazard, block: Block, why: str, now: float) -> None:
        self._faults.append(MemoryFault(hazard, self._who, str(block), why, now))


def _other_life(piece: Piece) -> str:
    if piece.block.life > piece.life:
        return "it was freed before, and its memory given to another tensor"
    return "what used this memory before had not ended; use it in the order of the stream that it was allocated on"


def computed(content: Any, inputs: list[Any]) -> Any:
    """`content`, or poison if any of `inputs` was."""
    for given in inputs:
        if isinstance(given, Poison):
            return Poison(Hazard.DERIVED, given.why)
    return content
