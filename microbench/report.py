"""`python -m microbench.report RESULT.json... [--out DIR]`: result documents as a page, report.html, and figures as PNG files.

The page holds its figures as well, so that it can be sent on alone. In a notebook:

    from microbench.report import plots
    plots("bench.json")

Exit code 0: written. 2: bad input.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microbench import document as documents
from microbench.command import read_or_refuse, refuse
from microbench.console import number
from microbench.harness import Result

if TYPE_CHECKING:
    from microbench.plots import Plots

PAGE = "report.html"
TEMPLATE = "report.html.j2"
_NAMES = ("row", "system")
_OF_THE_LINE = ("cpu", "cores", "kernel", "arch", "date", *documents.VERSIONS)


def plots(document: Mapping[str, Any] | Path | str) -> Plots:
    """The figures of a result document: a list of matplotlib Figures, which a notebook displays. Empty for benches without any.

    Args:
        document: what a bench's --json wrote, or the path of the file.

    Raises:
        SchemaError: not a result document.
    """
    from microbench.plots import draw  # matplotlib takes a second to import, and writing tables needs none

    return draw(document if isinstance(document, Mapping) else documents.read(Path(document)))


@dataclass(frozen=True)
class Picture:
    """One figure of the page, and the file beside it."""

    title: str
    file: str
    png: bytes

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Cell:
    """A figure of the table, with the rounds' lowest and highest."""

    text: str
    band: str = ""


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    cells: list[Cell]
    why: str
    css: str


@dataclass(frozen=True)
class Section:
    """One document on the page."""

    anchor: str
    bench: str
    source: str
    machine: str
    facts: list[str]
    pictures: list[Picture]
    columns: list[str]
    rows: list[Line]

    @property
    def troubled(self) -> int:
        """Rows that failed or were left out."""
        return sum(bool(row.why) for row in self.rows)


def make_section(document: Mapping[str, Any], stem: str, source: str) -> Section:
    """A document as the page shows it.

    Args:
        document: a result document.
        stem: what the names of its picture files begin with.
        source: where it comes from, for the reader.

    Raises:
        SchemaError: not a result document.
    """
    rows, machine = documents.validate(document), document["machine"]
    columns = _columns(rows)
    return Section(
        anchor=re.sub(r"\W+", "-", stem),
        bench=str(document.get("bench", "unnamed")),
        source=source,
        machine=documents.machine_line(machine),
        facts=[f"{key}: {_text(value)}" for key, value in machine.items() if key not in _OF_THE_LINE],
        pictures=[Picture(plot.title, f"{stem}-{plot.name}.png", plot.png()) for plot in plots(document)],
        columns=columns,
        rows=[_line(row, columns) for row in rows],
    )


def _columns(rows: Sequence[Result]) -> list[str]:
    """What the rows say, in the order in which they do; bands go with their figures, and reasons have a place of their own."""
    keys = dict.fromkeys((*_NAMES, *(key for row in rows for key in row)))
    bands = {f"{key}{end}" for key in keys for end in ("_low", "_high")}
    return [key for key in keys if key not in bands and key not in ("error", "left_out")]


def _line(row: Result, columns: Sequence[str]) -> Line:
    css = "failed" if "error" in row else "left-out" if "left_out" in row else ""
    return Line([_cell(row, key) for key in columns], documents.trouble(row), css)


def _cell(row: Result, key: str) -> Cell:
    if key not in row:
        return Cell("")
    low, high = (documents.figure(row, f"{key}{end}") for end in ("_low", "_high"))
    return Cell(_text(row[key]), "" if low is None or high is None else f"{number(low)} to {number(high)}")


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def render(sections: Sequence[Section]) -> str:
    """The page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(sections=sections)


def _stems(results: Sequence[Path]) -> list[str]:
    """A name for each file's pictures, no two alike."""
    stems: list[str] = []
    for path in results:
        stem, count = path.stem, 2
        while stem in stems:
            stem, count = f"{path.stem}-{count}", count + 1
        stems.append(stem)
    return stems


def main(
    results: Annotated[list[Path], typer.Argument(help="Files written by a bench's --json.", metavar="RESULT.json")],
    out: Annotated[Path, typer.Option(help="Where to write; made if it is not there.", metavar="DIR")] = Path("bench-report"),
) -> None:
    """Draws result documents: one page with all of them, and a PNG file per figure."""
    found = [read_or_refuse(path) for path in results]
    page = out / PAGE
    try:
        out.mkdir(parents=True, exist_ok=True)
        documents.check_writable(page)
    except OSError as error:
        refuse(f"--out: cannot write in {out}: {error.strerror}")
    stems = _stems(results)
    sections = [make_section(each, stem, path.name) for each, stem, path in zip(found, stems, results, strict=True)]
    pictures = [picture for section in sections for picture in section.pictures]
    try:
        for picture in pictures:
            (out / picture.file).write_bytes(picture.png)
        page.write_text(render(sections), encoding="utf-8")
    except OSError as error:
        refuse(f"--out: cannot write in {out}: {error.strerror}")
    print(f"written: {page} and {len(pictures)} figures beside it")


if __name__ == "__main__":
    typer.run(main)
