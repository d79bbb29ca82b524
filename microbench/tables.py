"""`python -m microbench.tables [--check]`: draws the tables of README.md and docs/performance.md from docs/results/*.json.

What stands between `<!-- bench -->` and `<!-- end -->`, and so on for each name in `microbench.markdown.TABLES`, is replaced; the
rest of the pages is not touched. A bench whose file is missing leaves its tables as they are.

Exit code 0: the tables are what the results give, after drawing them or, with --check, as they were. 1 (--check): one is not.
2: bad input; nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from microbench import document as documents
from microbench.command import read_or_refuse, refuse
from microbench.markdown import TABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md")
RESULTS = "docs/results"
END = "<!-- end -->"
_MARKER = re.compile(rf"^<!-- ({'|'.join(TABLES)}) -->$")


class MarkerError(ValueError):
    """A table whose end is not marked; the text says which."""


def redraw(page: str, draw: Callable[[str], str | None]) -> tuple[str, list[str]]:
    """A page with its tables drawn anew, and the names of those that are not as they were.

    Args:
        page: Markdown with markers, each on a line of its own.
        draw: what stands between the markers of a name; None leaves it.

    Raises:
        MarkerError: a table has no end.
    """
    drawn: list[str] = []
    changed: list[str] = []
    lines = iter(page.splitlines(keepends=True))
    for line in lines:
        drawn.append(line)
        marker = _MARKER.match(line.rstrip())
        if marker is None:
            continue
        name, old = marker[1], []
        for inner in lines:
            if inner.rstrip() == END:
                break
            if _MARKER.match(inner.rstrip()):
                raise MarkerError(f"<!-- {name} --> has no {END} before {inner.strip()}")
            old.append(inner)
        else:
            raise MarkerError(f"<!-- {name} --> has no {END}")
        was = "".join(old)
        now = draw(name)
        if now is not None and now != was:
            changed.append(name)
        drawn += [was if now is None else now, inner]
    return "".join(drawn), changed


def load(results: Path) -> dict[str, dict[str, Any]]:
    """The documents that are there, by bench. A line and exit code 2 for one that cannot be read or is of another bench."""
    found = {}
    for bench in dict.fromkeys(table.bench for table in TABLES.values()):
        path = results / f"{bench}.json"
        if path.exists():
            document = read_or_refuse(path)
            if document.get("bench") != bench:
                refuse(f"{path}: bench {document.get('bench')!r}, not {bench!r}")
            found[bench] = document
    return found


def _drawer(found: Mapping[str, Mapping[str, Any]]) -> Callable[[str], str | None]:
    def draw(name: str) -> str | None:
        table = TABLES[name]
        return table.draw(found[table.bench]) if table.bench in found else None

    return draw


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a table is not what the results give.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The checkout with the pages and docs/results.", metavar="DIR")] = ROOT,
) -> None:
    """Draws the tables of the pages from the results."""
    found = load(root / RESULTS)
    pages: dict[Path, str] = {}
    stale: dict[Path, list[str]] = {}
    marked: set[str] = set()
    for name in PAGES:
        path = root / name
        try:
            text = path.read_text(encoding="utf-8")
            pages[path], stale[path] = redraw(text, _drawer(found))
        except OSError as error:
            refuse(f"{path}: {error.strerror}")
        except ValueError as error:  # markers, or not UTF-8
            refuse(f"{path}: {error}")
        marked |= {marker[1] for line in text.splitlines() if (marker := _MARKER.match(line))}
    for bench in dict.fromkeys(table.bench for table in TABLES.values()):
        names = ", ".join(name for name, table in TABLES.items() if table.bench == bench and name in marked)
        if bench not in found:
            print(f"no {RESULTS}/{bench}.json: " + (f"left as they are: {names}" if names else "no page has its tables"))
        elif not names:
            print(f"{RESULTS}/{bench}.json: no page has its tables")
    if not check:
        _write({path: text for path, text in pages.items() if stale[path]})
    for path, names_of_page in stale.items():
        for table in names_of_page:
            print(f"{path.relative_to(root)}: {table}: " + ("not what the results give" if check else "drawn"))
    if found and not any(stale.values()):
        print("the tables are what the results give")
    raise typer.Exit(1 if check and any(stale.values()) else 0)


def _write(pages: Mapping[Path, str]) -> None:
    for path in pages:
        try:
            documents.check_writable(path)
        except OSError as error:
            refuse(f"{path}: cannot write: {error.strerror}")
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
