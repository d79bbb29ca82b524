"""`python -m microbench.serializer`: encoding and decoding of what travels in a graph, by raycomm's codec and by others.

    python -m microbench.serializer --quick --values '^list' --codecs 'raycomm|msgpack' --json serializer.json

What is measured, in microseconds per call; `microbench.codecs` has an adapter for each:

* `raycomm`: `raycomm._core.encode`, value to (payload, buffers), and `raycomm._core.decode`, back. The encoder and decoder are
  those that a channel runs on its slots; what they do not know themselves (here: dataclasses) they hand to the codec in Python,
  as on a channel. Two things differ from a channel, and both cost: payload and buffers become `bytes` objects, and the decoder
  always copies the buffers.
* `raycomm_channel`: the hot path itself, `Writer.write` and `Reader.read` of a shared-memory channel whose two ends are in this
  process, so that nobody waits. One native call encodes into the slot or block, publishes, wakes, counts and records; one finds
  the message and decodes it. An array of at least `raycomm._core.BLOCK_THRESHOLD` bytes is copied by the write, and stands on
  the block after the read.
* `raycomm_python`: `raycomm.codec.encode` and `decode`, to the same bytes. Encoding includes the copy of the buffers; decoded
  arrays stand on that copy.
* `msgpack`, `msgspec` (its msgpack), `pickle5`, `cloudpickle`: one string of bytes, everything in it. Encoders that can be reused
  are; msgspec is told the type of the value ahead.

"bytes" are those of payload and buffers. Tensor metadata is measured as the record of a channel between devices
("tensor_metadata"), and as the whole message of a tensor without elements ("tensor_empty").

Each codec first encodes and decodes each value, and what comes back is compared with it, down to the types of its parts. A value
that a codec cannot take, or does not give back, is left out for it, with the reason; one that only comes back with lists for
tuples is measured, with a note. Rounds alternate between codecs, value by value; every figure is the median of the rounds.
Short calls are timed in batches: see `microbench.serializer_session`. Garbage collection is off while calls are timed, and
letting go of messages and values is not timed.

Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from microbench import console as display
from microbench.codecs import CODECS, Codec
from microbench.command import BenchRun, CsvPath, JsonPath, RoundCount, refusing
from microbench.harness import FULL, QUICK, Measurement, Result, Rounds, Turn
from microbench.process import BenchProcess, ProcessLost, RequestFailed
from microbench.rows import select
from microbench.serialized import SEED, VALUES, Value

FULL_EFFORT = replace(FULL, warmup_s=0.01, measure_s=0.15, turn_limit_s=30.0)
QUICK_EFFORT = replace(QUICK, warmup_s=0.002, measure_s=0.03, turn_limit_s=30.0)
EXAMINE_LIMIT_S = 30.0  # the first tensor imports torch
FIGURES = (("encode us", "encode_p50_us"), ("decode us", "decode_p50_us"))
SERVES = "microbench.serializer_session:Session"


class ValueProgress(display.Steps):
    """A step is one value in one round, by all codecs. See `microbench.harness.Progress`."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, total)
        self._step: tuple[int, str] | None = None
        self._came: list[str] = []

    def turn(self, number: int, rounds: int, turn: Turn) -> None:
        if self._step != (number, turn.topology):
            self.finish()
            self._step = (number, turn.topology)
            self.begin(f"round {number + 1}/{rounds}  {turn.topology}")

    def measured(self, row: str, system: str, measurement: Measurement) -> None:
        self._came.append(f"{system} " + "/".join(display.number(measurement[key]) for _, key in FIGURES))

    def failed(self, row: str, system: str, error: str) -> None:
        self._console.print(f"{row}  {system}  failed: {error}", markup=False, soft_wrap=True)

    def finish(self) -> None:
        """The value that was being measured is done; nothing if there is none."""
        if self._step is not None:
            self.end(", ".join(self._came))
        self._step, self._came = None, []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        super().__exit__(kind, error, trace)


def examine(process: BenchProcess, values: Sequence[Value], codecs: Sequence[Codec]) -> list[Result]:
    """A row for each value and codec, with what was found: "bytes", "note", "left_out", or an "error"."""
    rows: list[Result] = []
    for value in values:
        for codec in codecs:
            try:
                found = process.ask("examine", codec.name, value.name, limit_s=EXAMINE_LIMIT_S)
            except (RequestFailed, ProcessLost) as error:
                found = {"error": str(error)}
            rows.append({"row": value.name, "system": codec.name, **found})
    return rows


def plan_turns(examined: Sequence[Result]) -> list[Turn]:
    """A turn for each value and codec that go together, codecs alternating."""
    return [Turn(row["system"], row["row"], (row["row"],)) for row in examined if "bytes" in row]


def merge(examined: Sequence[Result], measured: Sequence[Result]) -> list[Result]:
    """What was found, with the figures where there are any."""
    figures = {(row["row"], row["system"]): row for row in measured}
    return [row | figures.get((row["row"], row["system"]), {}) for row in examined]


def table_of(rows: Sequence[Result]) -> Table:
    """Three lines for each value: encoding, decoding, bytes; a column for each codec."""
    codecs = list(dict.fromkeys(row["system"] for row in rows))
    table = Table(title="medians over the rounds of the p50 of a call")
    table.add_column("value", no_wrap=True)
    table.add_column("", no_wrap=True)
    for codec in codecs:
        table.add_column(codec.replace("_", "\n", 1), justify="right")
    for value in dict.fromkeys(row["row"] for row in rows):
        here = {row["system"]: row for row in rows if row["row"] == value}
        for label, key in (*FIGURES, ("bytes", "bytes")):
            table.add_row(value, label, *(_cell(here[codec], key) for codec in codecs))
            value = ""
        table.add_section()
    return table


def _cell(row: Result, key: str) -> str:
    if key not in row:
        return "failed" if "error" in row else "-"
    return f"{row[key]:,}" if key == "bytes" else display.number(row[key])


def remarks(rows: Sequence[Result]) -> list[str]:
    """Why figures are missing and what they do not say: a line for each codec and reason, with the values it holds for."""
    values: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for key, what in (("left_out", "left out, "), ("error", "failed, "), ("note", "")):
            if key in row:
                values.setdefault((row["system"], what + row[key]), []).append(row["row"])
    return [f"{codec}: {', '.join(names)}: {text}" for (codec, text), names in values.items()]


def facts_of(codecs: Sequence[Codec]) -> dict[str, Any]:
    """What the figures depend on, besides the machine."""
    return {"seed": SEED, "codecs": {codec.name: {"version": _version(codec), "calls": codec.what} for codec in codecs}}


def _version(codec: Codec) -> str | None:
    try:
        return None if codec.package is None else importlib.metadata.version(codec.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: under 30 s.")] = False,
    values: Annotated[str | None, typer.Option(help="Only values this regular expression is found in.", metavar="REGEX")] = None,
    codecs: Annotated[str | None, typer.Option(help="Only codecs this regular expression is found in.", metavar="REGEX")] = None,
    json: JsonPath = None,
    csv: CsvPath = None,
    rounds: RoundCount = 3,
) -> None:
    """Measures encoding and decoding: raycomm's codec beside msgpack, msgspec, pickle and cloudpickle."""
    with refusing("--values"):
        chosen_values = select(values, VALUES, "value")
    with refusing("--codecs"):
        chosen_codecs = select(codecs, CODECS, "codec")
    effort = QUICK_EFFORT if quick else FULL_EFFORT
    with BenchRun("serializer", json, facts_of(chosen_codecs), csv=csv) as run:
        with BenchProcess(SERVES) as process, ValueProgress(run.console, rounds * len(chosen_values)) as progress:
            progress.begin("each codec on each value, once")
            examined = examine(process, chosen_values, chosen_codecs)
            measured = Rounds(process, effort, progress).run(plan_turns(examined), rounds)
        rows = merge(examined, measured)
        display.show(run.console, table_of(rows))
        for remark in remarks(rows):
            run.console.print(remark, markup=False, soft_wrap=True)
        run.write(rows)


if __name__ == "__main__":
    typer.run(main)
