"""What the command lines of the benches share: the machine first, one clear line for bad input, the JSON document at the end.

    with BenchRun("serializer", json) as run:
        rows = measure(run.console)
        run.write(rows)

Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

import enum
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, NoReturn, Self

import typer

from microbench import console as display
from microbench import document
from microbench.harness import Result


class Rivals(enum.StrEnum):
    """Whom a bench of graphs measures beside raycomm."""

    RAY = "ray"
    NONE = "none"


RowPattern = Annotated[str | None, typer.Option(help="Only rows this regular expression is found in.", metavar="REGEX")]
RivalsOption = Annotated[Rivals, typer.Option(help="What to compare with.")]
RoundCount = Annotated[int, typer.Option(min=1, help="Rounds; fewer than 3 are not worth comparing.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", metavar="PATH")]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write its rows to this file.", metavar="PATH")]


def refuse(text: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(text, file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def refusing(option: str, hint: str = "") -> Iterator[None]:
    """What is wrong with an option, said by a `ValueError`: one line that names it, and exit code 2.

    Args:
        hint: what else may be the reason.
    """
    try:
        yield
    except ValueError as error:
        refuse(f"{option}: {error}" + (f"; {hint}" if hint else ""))


def read_or_refuse(path: Path) -> dict[str, Any]:
    """The document in a file, rows and all; else one line that says why there is none, and exit code 2."""
    try:
        found = document.read(path)
    except document.SchemaError as error:
        refuse(f"{path}: {error}")
    if not found["rows"]:
        refuse(f"{path}: no rows")
    return found


class BenchRun:
    """One run of a bench. Use as a context manager; SIGINT and SIGTERM leave it with exit code 130, and nothing is written.

    Args:
        bench: its name, for the document.
        json, csv: where to write the result and its rows, if anywhere.
        facts: what else the figures depend on, told of the machine.

    Raises:
        typer.Exit: one of the files cannot be written.
    """

    def __init__(self, bench: str, json: Path | None, facts: Mapping[str, Any] | None = None, *, csv: Path | None = None) -> None:
        self.bench = bench
        self.console = display.make_console()
        self.machine = document.describe_machine() | dict(facts or {})
        self._json = json
        self._csv = csv
        for option, path in (("--json", json), ("--csv", csv)):
            try:
                if path is not None:
                    document.check_writable(path)
            except OSError as error:
                refuse(f"{option}: cannot write {path}: {error.strerror}")

    def write(self, rows: Sequence[Result]) -> None:
        """Write the document and the rows, where that was asked for."""
        if self._json is not None:
            document.write_json(self._json, self.bench, self.machine, rows)
            self.console.print(f"written: {self._json}", markup=False)
        if self._csv is not None:
            document.write_csv(self._csv, rows)
            self.console.print(f"written: {self._csv}", markup=False)

    def __enter__(self) -> Self:
        # A plain SIGTERM would end this process and skip the clean-up of its children.
        signal.signal(signal.SIGTERM, _terminate)
        self.console.print(document.machine_line(self.machine), markup=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            print("interrupted: nothing was written", file=sys.stderr)
            raise typer.Exit(130) from None


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
