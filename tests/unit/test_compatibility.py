"""docs/compatibility.md names tests that exist, numbers its rows, and leaves no row without one."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "compatibility.md").read_text()
NAMED = re.findall(r"`(\w+/\w+\.py)::(\w+)`", TEXT)


def test_every_named_test_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (TESTS / path).is_file() or not re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
    assert len(NAMED) > 150


def test_every_row_has_its_number_and_a_test() -> None:
    for table in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        rows = [line for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
        assert [int(line.split("|")[1]) for line in rows] == list(range(1, len(rows) + 1)), table.splitlines()[0]
        assert [line for line in rows if not re.search(r"`\w+/\w+\.py::\w+`", line) or line.count(" | ") != 3] == []
