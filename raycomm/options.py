"""Settings of a compiled graph: one frozen dataclass, and the only reader of ``RAYCOMM_*`` environment variables.

| option | unit | default | meaning |
|---|---|---|---|
| `max_inflight` | executions | 10 | submitted and not yet finished; a further `execute` waits for room |
| `max_buffered_results` | executions | 1000 | finished results kept at the driver; above it `CapacityExceededError` |
| `submit_timeout` | seconds | None | limit of `execute`; None or -1: no limit, 0: try once |
| `get_timeout` | seconds | None | limit of `get`; None or -1: no limit, 0: try once |
| `compile_timeout` | seconds | None | limit of `compile`; None or -1: no limit |
| `teardown_timeout` | seconds | 30 | limit of `teardown` |
| `inline_bytes` | bytes | 1024 | a message up to this size travels in its ring slot, a larger one in a block |
| `shm_limit_bytes` | bytes | see below | budget of shared memory for all processes of the graph on this machine together |
| `share_tensors` | | False | several processes see one copy of a large tensor; promises that none of them writes to it |
| `allow_pickle` | | True | False: a value that would have to be pickled is refused instead, with its path and type |
| `loop_thread` | | "own" | "own": loop and plain calls of an actor run side by side; "actor": calls wait until teardown |
| `device` | | "auto" | where tensors of values with a hint lie. "auto": as the actors have it; "simulated": see `DeviceKind` |
| `stream_policy` | | "link" | which transfers of an actor share a stream, see `StreamPolicy` |
| `max_links` | links | 6 | of one actor's device; one that has more shares streams, see `raycomm.plan.streams` |
| `overlap` | | True | receives are launched as early as that is safe, beside calls; False: where their values are used |
| `spin_us` | microseconds | 2 | pause-spin before anything else |
| `yield_us` | microseconds | 100 | upper bound of the adaptive `sched_yield` spin before a waiter parks; see `due` in wait.hpp |
| `name` | text | made up | the graph's name in messages |

`shm_limit_bytes` defaults to the smaller of a quarter of the machine's memory and half of what the cgroup leaves.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from raycomm.errors import ArgumentError, CompileError


def _limit(text: str) -> float | None:
    return None if text.strip().lower() in ("", "none") else float(text)


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.strip().lower() not in words:
        raise ValueError(text)
    return words[text.strip().lower()]


class LoopThread(StrEnum):
    """Where an actor's loop runs."""

    OWN = "own"
    ACTOR = "actor"


class DeviceKind(StrEnum):
    """Where tensors of values with a hint lie.

    AUTO: as the actors have it. SIMULATED: every actor gets a device that is none, to run a graph for GPUs without one: its
    tensors lie in host memory, and move between actors over links with streams as on GPUs, by gloo.
    """

    AUTO = "auto"
    SIMULATED = "simulated"


class StreamPolicy(StrEnum):
    """Which operations of a device share a stream.

    LINK: those of one link. DIRECTION: all sends, and all receives. SHARED: all of them.
    """

    LINK = "link"
    DIRECTION = "direction"
    SHARED = "shared"


# Options that are one of several words.
_CHOICES: dict[str, type[StrEnum]] = {"loop_thread": LoopThread, "device": DeviceKind, "stream_policy": StreamPolicy}

_PARSERS: dict[str, Callable[[str], Any]] = {
    "max_inflight": int,
    "max_buffered_results": int,
    "submit_timeout": _limit,
    "get_timeout": _limit,
    "compile_timeout": _limit,
    "teardown_timeout": float,
    "inline_bytes": int,
    "shm_limit_bytes": int,
    "share_tensors": _flag,
    "allow_pickle": _flag,
    **_CHOICES,
    "max_links": int,
    "overlap": _flag,
    "spin_us": float,
    "yield_us": float,
    "name": str,
}

# Ray's spellings of the same settings (`experimental_compile`), accepted by `raycomm.compile`.
RAY_SPELLINGS: Mapping[str, str] = {
    "_submit_timeout": "submit_timeout",
    "_max_inflight_executions": "max_inflight",
    "_max_buffered_results": "max_buffered_results",
    "_buffer_size_bytes": "inline_bytes",
}

# Ray's options that need no setting here, with the values that ask for nothing more than there is.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "enable_asyncio": (True, False),  # every graph has `execute` and `execute_async`
    "_overlap_gpu_communication": (True, False),
    "_default_communicator": (None, "create"),
}

_MAX_INLINE = 1 << 20

# Lowest and highest value of what is a whole number.
_RANGES: Mapping[str, tuple[int, int]] = {
    "max_inflight": (1, 4096),
    "max_buffered_results": (1, 1 << 30),
    "inline_bytes": (64, _MAX_INLINE),
    "shm_limit_bytes": (1 << 20, 1 << 46),
    "max_links": (2, 1024),
}
_LIMIT_TEXT = "seconds of at least 0, 0 to try once, or -1 or None for no limit"
_WANTED: Mapping[str, str] = {
    **{name: f"an integer from {low} to {high}" for name, (low, high) in _RANGES.items()},
    **dict.fromkeys(("submit_timeout", "get_timeout", "compile_timeout"), _LIMIT_TEXT),
    **dict.fromkeys(("teardown_timeout", "spin_us", "yield_us"), "a finite number of at least 0"),
    **dict.fromkeys(("share_tensors", "allow_pickle", "overlap"), "1, true, yes, 0, false or no"),
    **{name: " or ".join(repr(str(word)) for word in choice) for name, choice in _CHOICES.items()},
    "name": "a non-empty string",
}

# Variables that are not options: of the tests and of the benches.
_OTHERS = ("RAYCOMM_TEST_", "RAYCOMM_BENCH_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one graph; see the module's table. Immutable; `Options.load` fills in the environment."""

    max_inflight: int = 10
    max_buffered_results: int = 1000
    submit_timeout: float | None = None
    get_timeout: float | None = None
    compile_timeout: float | None = None
    teardown_timeout: float = 30.0
    inline_bytes: int = 1024
    shm_limit_bytes: int | None = None
    share_tensors: bool = False
    allow_pickle: bool = True
    loop_thread: LoopThread = LoopThread.OWN
    device: DeviceKind = DeviceKind.AUTO
    stream_policy: StreamPolicy = StreamPolicy.LINK
    max_links: int = 6
    overlap: bool = True
    spin_us: float = 2.0
    yield_us: float = 100.0
    name: str | None = None

    @classmethod
    def load(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Options:
        """The options of one graph: `given` wins over ``RAYCOMM_*`` in `environ` (default: this process's), which wins over
        defaults.

        Raises:
            CompileError: an unknown option, or a value outside its range; the message names it and its source.

        A variable ``RAYCOMM_*`` that is no option's is warned of.
        """
        environ = os.environ if environ is None else environ
        _warn_of_unknown(environ)
        values: dict[str, Any] = {}
        for name, parse in _PARSERS.items():
            variable = f"RAYCOMM_{name.upper()}"
            if variable in environ:
                try:
                    values[name] = parse(environ[variable])
                    replace(cls(), **{name: values[name]})  # checks it while it is known where it is from
                except ValueError:
                    raise CompileError(
                        f"environment variable {variable}={environ[variable]!r} is not a valid value for option {name!r}: give "
                        f"{_WANTED[name]}, or unset it",
                        argument=variable,
                        remedy=f"give {_WANTED[name]}, or unset the variable",
                    ) from None
        for name, value in given.items():
            if name in _WITHOUT_EFFECT and any(value is allowed or value == allowed for allowed in _WITHOUT_EFFECT[name]):
                continue
            plain = RAY_SPELLINGS.get(name, name)
            if plain not in _PARSERS:
                known = ", ".join(sorted(_PARSERS))
                raise CompileError(
                    f"unknown option {name!r}; known options are: {known}", argument=name, remedy=f"use one of: {known}"
                )
            if plain in given and plain != name:
                raise CompileError(
                    f"option {plain!r} was given twice, also as {name!r}; keep one", argument=name, remedy="keep one"
                )
            # Ray's buffer size is a whole channel's; here only what stays inline is bounded by it.
            values[plain] = min(value, _MAX_INLINE) if name == "_buffer_size_bytes" and isinstance(value, int) else value
        return replace(cls(), **values)

    def __post_init__(self) -> None:
        for name in _RANGES:
            if name != "shm_limit_bytes" or self.shm_limit_bytes is not None:
                _check_int(name, getattr(self, name))
        for name in ("submit_timeout", "get_timeout", "compile_timeout"):
            value = getattr(self, name)
            if value is not None:
                try:
                    check_limit(name, value)
                except ArgumentError as error:
                    raise CompileError(f"option {error}", argument=name) from None
        for name in ("teardown_timeout", "spin_us", "yield_us"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise CompileError(f"option {name}={value!r} must be a finite number of at least 0", argument=name)
        for name in ("share_tensors", "allow_pickle", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise CompileError(f"option {name}={getattr(self, name)!r} must be True or False", argument=name)
        for name, choice in _CHOICES.items():
            try:
                object.__setattr__(self, name, choice(getattr(self, name)))
            except ValueError:
                text = f"option {name}={getattr(self, name)!r} must be {_WANTED[name]}"
                raise CompileError(text, argument=name, remedy="use one of them") from None
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise CompileError(f"option name={self.name!r} must be a non-empty string", argument="name")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the set-up message, so that actors use the driver's settings and not their own environment."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def check_limit(name: str, value: Any, call: str | None = None) -> float:
    """`value` as a time limit in seconds: -1 is no limit, 0 is "try once".

    Args:
        name: of the argument.
        value: what was given for it.
        call: to which it was given, for the message.

    Raises:
        ArgumentError: another negative number, NaN, or no number at all.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or (value < 0 and value != -1):
        where = "" if call is None else f"{call}: "
        raise ArgumentError(
            f"{where}{name}={value!r} is not a time limit: give {_LIMIT_TEXT}",
            expected=_LIMIT_TEXT,
            given=f"{name}={value!r}",
        )
    return float(value)


def _check_int(name: str, value: Any) -> None:
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CompileError(f"option {name}={value!r} must be {_WANTED[name]}", argument=name, remedy="correct it")


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """A misspelled variable does nothing, which looks like an option that does not work. Python shows each such text once."""
    known = [f"RAYCOMM_{name.upper()}" for name in _PARSERS]
    for variable in sorted(environ):
        if variable.startswith("RAYCOMM_") and variable not in known and not variable.startswith(_OTHERS):
            close = difflib.get_close_matches(variable.removeprefix("RAYCOMM_"), [name.upper() for name in _PARSERS], n=1)
            meant = f"did you mean RAYCOMM_{close[0]}?" if close else f"those that do are: {', '.join(known)}"
            warnings.warn(f"environment variable {variable} sets no option of raycomm; {meant}", stacklevel=4)
