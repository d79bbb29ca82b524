"""Settings of one edge: those of the channel that carries a node's value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from raycomm.errors import CompileError

# Attributes of another family's node: its options, and what it runs after.
FOREIGN_OPTIONS = "_raycomm_channel_options"
FOREIGN_AFTER = "_raycomm_after"

MIN_INLINE = 64
MAX_INLINE = 1 << 20
MAX_SLOTS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """What `with_channel_options` recorded; None leaves a setting to the graph. See `raycomm.with_channel_options`."""

    inline_bytes: int | None = None
    slots: int | None = None
    share_tensors: bool | None = None
    allow_pickle: bool | None = None
    sender_keeps: bool | None = None
    streams: tuple[int, int] | None = None

    @classmethod
    def checked(cls, node: str, **given: Any) -> Self:
        """The options as given for `node`.

        Raises:
            CompileError: an unknown option, or a value outside its range; names the node and the option.
        """
        known = [field.name for field in fields(cls)]
        for name in (name for name in given if name not in known):
            remedy = f"known options are: {', '.join(known)}"
            text = f"unknown channel option {name!r} of node {node}; {remedy}"
            raise CompileError(text, node=node, argument=name, remedy=remedy)
        for name, value in given.items():
            wanted = _wanted(name, value)
            if value is not None and wanted is not None:
                raise CompileError(
                    f"channel option {name}={value!r:.80} of node {node}: {wanted}", node=node, argument=name, remedy=wanted
                )
        return cls(**given)

    def over(self, other: ChannelOptions | None) -> ChannelOptions:
        """These options, and those of `other` where these say nothing."""
        if other is None:
            return self
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return ChannelOptions(**{name: theirs if mine is None else mine for name, mine, theirs in pairs})


def _wanted(name: str, value: object) -> str | None:
    """What to give instead of a bad value; None where it is good."""
    if name in ("share_tensors", "allow_pickle", "sender_keeps"):
        return None if isinstance(value, bool) else "give True or False"
    if name == "streams":
        pair = value if isinstance(value, tuple) and len(value) == 2 else (-1, -1)
        return None if min(map(_number, pair)) >= 0 else "give a tuple of two streams of at least 0: the sender's, the reader's"
    number = _number(value)
    if name == "inline_bytes":
        return None if MIN_INLINE <= number <= MAX_INLINE else f"give an integer from {MIN_INLINE} to {MAX_INLINE}"
    return None if 1 <= number <= MAX_SLOTS and number.bit_count() == 1 else f"give a power of two from 1 to {MAX_SLOTS}"


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
