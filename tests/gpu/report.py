"""The table and the JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.setting import Figures, Setting
from tests.gpu.suite import Record, State

_NAME = 24
_WIDTH = 100
_SAID = 400  # of what a step says; the JSON has all of it


def line_of(record: Record) -> str:
    """One step in the table."""
    said = " ".join((record.reason or record.figures.get("summary", "")).split())
    return f"{record.name:{_NAME}} {record.state:8} {record.seconds:7.1f} s  {said:.{_SAID}}"


HEAD = f"{'step':{_NAME}} {'state':8} {'time':>9}  what\n{'-' * _WIDTH}"


def foot(records: Sequence[Record]) -> str:
    """What follows the steps: rows of figures, and the verdict."""
    lines = ["-" * _WIDTH, *(line for record in records for line in _rows(record.figures))]
    counts = {state: sum(record.state is state for record in records) for state in State}
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return "\n".join(lines)


def _rows(figures: Figures) -> list[str]:
    """Figures that are a list of rows with the same columns."""
    rows: list[dict[str, Any]] = figures.get("rows", [])
    if not rows:
        return []
    columns = list(rows[0])
    widths = [max(len(column), *(len(str(row[column])) for row in rows)) for column in columns]
    texts = [columns, *([str(row[column]) for column in columns] for row in rows)]
    return ["", *("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in texts), ""]


def write_json(path: Path, setting: Setting, records: Sequence[Record], seconds: float) -> None:
    """All that is known, for machines."""
    environment = next((record.figures for record in records if record.name == "environment"), {})
    content = {
        "card": environment.get("card", "not measured"),
        "stand_in": setting.stand_in,
        "gpus": setting.gpus,
        "ranks": setting.sharing,
        "seconds": round(seconds, 1),
        "passed": passed(records),
        "steps": [asdict(record) for record in records],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def passed(records: Sequence[Record]) -> bool:
    """Whether no step has failed."""
    return all(record.state is not State.FAILED for record in records)
