"""What runs in the process of the serializer bench: a look at what a codec makes of a value, and the timing of it."""

from __future__ import annotations

import gc
import time
from array import array
from typing import Any

from microbench.codecs import CODECS, Calls
from microbench.codecs.base import NotInstalled
from microbench.harness import Effort, Measurement, latency, warm_up
from microbench.serialized import TUPLES_AS_LISTS, VALUES, same, tuples_as_lists

# A sample is a batch of calls that takes about this long, so that reading the clock (50 to 100 ns) is half a percent of it.
SAMPLE_NS = 20_000
# Not for more calls than this, nor where the longer of encoding and decoding is this long: what a batch makes is kept to its end.
BATCH_LIMIT = 512
SAMPLE_LIMIT_NS = 200_000
_LOOKS = 5  # the shortest of so many decides: one that was interrupted does not


class Session:
    """Codecs and values by name. Values and batch sizes are kept, so that they are the same in each round."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._batches: dict[tuple[str, str], int] = {}
        self._codec = ""

    def examine(self, codec: str, value: str) -> dict[str, Any]:
        """What a codec makes of a value: "bytes" of the message and perhaps a "note", or why it is "left_out"."""
        wanted = self._value(value)
        try:
            calls = CODECS[codec].calls_for(VALUES[value])
        except NotInstalled as error:
            return {"left_out": str(error)}
        try:
            messages = calls.encode(wanted, 1)
        except Exception as error:
            return {"left_out": f"cannot encode: {_brief(error)}"}
        size = calls.size(messages[0])
        try:
            got = calls.decode(messages)[0]
        except Exception as error:
            return {"left_out": f"cannot decode: {_brief(error)}"}
        if same(got, wanted):
            return {"bytes": size}
        if same(got, tuples_as_lists(wanted)):
            return {"bytes": size, "note": TUPLES_AS_LISTS}
        return {"left_out": f"gives back another value, a {type(got).__name__}: {repr(got)[:60]}"}

    def open(self, system: str, topology: str) -> None:
        """The codec whose turn it is. There is no topology."""
        self._codec = system

    def measure(self, row: str, effort: Effort) -> Measurement:
        """Figures of encoding and of decoding. `measure_s` is for both together.

        "batch" is the number of calls in a sample. Percentiles are of the samples' means, and say less of single slow calls.
        """
        value, codec = self._value(row), self._codec
        calls = CODECS[codec].calls_for(VALUES[row])
        warm_up(lambda each: calls.decode(calls.encode(each, 1)), value, effort)
        if (codec, row) not in self._batches:
            self._batches[codec, row] = batch_for(calls, value)
        batch = self._batches[codec, row]
        warm_up(lambda each: calls.decode(calls.encode(each, batch)), value, effort)
        # As `timeit` does: when a collection strikes depends on what else this process holds.
        gc.disable()
        try:
            encode_ns, decode_ns = time_batches(calls, value, batch, effort)
        finally:
            gc.enable()
        return {
            **_per_call("encode", encode_ns, batch),
            **_per_call("decode", decode_ns, batch),
            "batch": batch,
            "count": len(encode_ns) * batch,
        }

    def close(self, discard: bool) -> None:
        """Nothing is open between turns."""

    def shutdown(self) -> None:
        """Nothing to end."""

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = VALUES[name].made()
        return self._values[name]


def time_batch(calls: Calls, value: Any, batch: int) -> tuple[int, int]:
    """Nanoseconds of a batch's encoding and decoding. Letting go of messages and values is not in them."""
    clock = time.perf_counter_ns
    start = clock()
    messages = calls.encode(value, batch)
    middle = clock()
    values = calls.decode(messages)
    stop = clock()
    del messages, values
    return middle - start, stop - middle


def batch_for(calls: Calls, value: Any) -> int:
    """A power of two: the fewest calls that take `SAMPLE_NS`, in encoding and in decoding, within the limits."""
    batch = 1
    while batch < BATCH_LIMIT:
        encode_ns, decode_ns = map(min, zip(*(time_batch(calls, value, batch) for _ in range(_LOOKS)), strict=True))
        if min(encode_ns, decode_ns) >= SAMPLE_NS or max(encode_ns, decode_ns) >= SAMPLE_LIMIT_NS:
            break
        batch *= 2
    return batch


def time_batches(calls: Calls, value: Any, batch: int, effort: Effort) -> tuple[array[int], array[int]]:
    """Nanoseconds of each batch's encoding and decoding, in turn."""
    encode_ns, decode_ns = array("q"), array("q")
    end = time.perf_counter_ns() + int(effort.measure_s * 1e9)
    while len(encode_ns) < effort.max_calls and (len(encode_ns) < effort.min_calls or time.perf_counter_ns() < end):
        encoding, decoding = time_batch(calls, value, batch)
        encode_ns.append(encoding)
        decode_ns.append(decoding)
    return encode_ns, decode_ns


def _per_call(what: str, batches_ns: array[int], batch: int) -> Measurement:
    figures = latency(batches_ns)
    return {f"{what}_{name}": figure / batch for name, figure in figures.items() if name != "count"}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
