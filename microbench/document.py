"""The JSON document that every bench writes, and what it says of the machine.

    {"schema": 1, "bench": "broadcast", "machine": {...}, "rows": [{"row": ..., "system": ..., figures}, ...]}

A row that failed has an "error" in place of figures, one that cannot run here a "left_out", which says what it needs. Figures are
those of `microbench.harness`, units in their names.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from microbench.harness import Result

SCHEMA = 1
VERSIONS = ("python", "ray", "torch", "raycomm")


class SchemaError(ValueError):
    """Not a result document of this schema; the text says why."""


def describe_machine() -> dict[str, Any]:
    """What the figures depend on; without it two results cannot be compared."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "ray": _version("ray"),
        "torch": _version("torch"),
        "raycomm": _version("raycomm"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    # arm64 kernels have no "model name" line.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # A checkout on the path is importable without being installed.
    try:
        return str(getattr(importlib.import_module(package), "__version__", "not installed"))
    except ImportError:
        return "not installed"


def check_writable(path: Path) -> None:
    """Raises `OSError` when the file cannot be written; leaves it as it was. A run of minutes should not end there."""
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()


def write_json(path: Path, bench: str, machine: Mapping[str, Any], rows: Sequence[Result]) -> None:
    """Writes the result document of a bench."""
    document = {"schema": SCHEMA, "bench": bench, "machine": dict(machine), "rows": list(rows)}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Result]) -> None:
    """Writes the rows, a column for each key that any of them has; empty where a row has none."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> dict[str, Any]:
    """The document in a file, validated. Raises `SchemaError` with one line when it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SchemaError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise SchemaError(f"not JSON: {error}") from error
    validate(document)
    assert isinstance(document, dict)
    return document


def validate(document: Any) -> list[dict[str, Any]]:
    """The rows of a result document. Raises `SchemaError` when it is not one of schema 1."""
    if not isinstance(document, dict):
        raise SchemaError("the top level is not an object")
    if document.get("schema") != SCHEMA or isinstance(document.get("schema"), bool):
        raise SchemaError(f"schema {document.get('schema')!r}; this version reads schema {SCHEMA}")
    if not isinstance(document.get("machine"), dict):
        raise SchemaError("'machine' is not an object")
    rows = document.get("rows")
    if not isinstance(rows, list):
        raise SchemaError("'rows' is not a list")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("row", "system")):
            raise SchemaError(f"rows[{index}] has no 'row' and 'system' names")
    return rows


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line; what a document does not say of it is a question mark."""
    known = {name: str(machine.get(name, "?")) for name in ("cpu", "cores", "kernel", "date", *VERSIONS)}
    versions = ", ".join(f"{name} {known[name]}" for name in VERSIONS)
    return f"{known['cpu']}, {known['cores']} cores, Linux {known['kernel']}; {versions}; {known['date']}"


def figure(row: Mapping[str, Any], key: str) -> float | None:
    """A row's figure, or None where it has none that can be reckoned with: documents are also written by hand."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def trouble(row: Mapping[str, Any]) -> str:
    """Why a row failed or was left out, in a line; empty when it was measured."""
    for key, word in (("error", "failed"), ("left_out", "left out")):
        if key in row:
            return f"{word}: {' '.join(str(row[key]).split())}"
    return ""


def troubles(rows: Sequence[Result]) -> list[str]:
    """Which systems failed or were left out, and why: a line for each system and reason, however many rows it holds for."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if reason := trouble(row):
            names.setdefault((row["system"], reason), []).append(row["row"])
    return [f"{system}: {of[0] if len(of) == 1 else f'{len(of)} rows'} {why}" for (system, why), of in names.items()]


def with_facts(rows: Sequence[Result], keys: Sequence[str]) -> list[Result]:
    """The rows, each with what another system's row of the same name says of it: a failed one may have no more than its name."""
    facts: dict[str, Result] = {}
    for row in rows:
        facts.setdefault(row["row"], {}).update({key: row[key] for key in keys if key in row})
    return [facts[row["row"]] | row for row in rows]
