"""The drawing of the arena against the code, and the ordering tags of the native sources against each other."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from raycomm import _core

SOURCES = Path(__file__).parents[2] / "raycomm" / "_core"
DRAWING = (SOURCES / "layout.hpp").read_text().split("#pragma once")[0]
_FIELD = re.compile(r"//     (\d+)\s+([a-z_.]+)\s+(u32|u64|(\d+) bytes)\b")
_STRUCT = re.compile(r"(ArenaHeader|SlotHeader), (\d+) bytes")
_BYTES = {"u32": 4, "u64": 8}


def drawn_fields() -> dict[str, tuple[int, int]]:
    """Offset and size of every field drawn, by `Struct.field`."""
    fields: dict[str, tuple[int, int]] = {}
    struct = ""
    for line in DRAWING.splitlines():
        if found := _STRUCT.search(line):
            struct = found[1]
        elif field := _FIELD.match(line):
            fields[f"{struct}.{field[2]}"] = int(field[1]), _BYTES.get(field[3]) or int(field[4])
    return fields


def test_the_drawing_is_understood() -> None:
    fields = drawn_fields()
    assert {"ArenaHeader.magic", "ArenaHeader.nonce", "ArenaHeader.loop_state", "SlotHeader.sequence"} <= fields.keys()
    assert fields["ArenaHeader.nonce"] == (16, 16)


def test_every_field_is_drawn_where_it_is() -> None:
    code = {name: at for name, at in _core.layout().items() if name.startswith(("ArenaHeader.", "SlotHeader."))}
    assert {name: at for name, (at, _) in drawn_fields().items()} == code


def test_drawn_fields_do_not_overlap() -> None:
    for struct in ("ArenaHeader", "SlotHeader"):
        spans = sorted(span for name, span in drawn_fields().items() if name.startswith(struct))
        for (at, size), (following, _) in zip(spans, spans[1:], strict=False):
            assert at + size <= following, f"{struct}: a field of {size} bytes at {at} runs into the one at {following}"
        at, size = spans[-1]
        assert at + size <= _core.layout()[struct]


def test_drawn_sizes() -> None:
    layout = _core.layout()
    assert {name: int(size) for name, size in _STRUCT.findall(DRAWING)} == {
        name: layout[name] for name in ("ArenaHeader", "SlotHeader")
    }
    assert f"BlockHeader[block_capacity], {layout['BlockHeader']} bytes each" in DRAWING
    assert f"BoardRow[board_count], {layout['BoardRow']} bytes each" in DRAWING
    assert f"Record[record_capacity], {layout['Record']} bytes each" in DRAWING
    assert f"NodeCounters[node_count], {layout['NodeCounters']} bytes each" in DRAWING
    assert f"BufferEntry[buffer_count] ({layout['BufferEntry']} bytes each)" in DRAWING
    assert f"{layout['RingHeader']}      taken[reader]" in re.sub(r" +taken", "      taken", DRAWING)
    assert f"messages taken so far; {layout['Cursor']} bytes each" in DRAWING
    assert f"{layout['RingHeader']} + {layout['Cursor']} * reader_count" in DRAWING
    assert re.search(rf"^//   {layout['SlotHeader']}\s+inline frame$", DRAWING, re.MULTILINE)
    assert layout["SlotHeader"] == _core.SLOT_HEADER_BYTES
    assert layout["version"] == _core.LAYOUT_VERSION


def test_words_that_different_processes_write_lie_on_different_lines() -> None:
    at = _core.layout()
    words = ["closed", "doorbell.counter", "free_stack", "record_count", "budget_used", "loop_state"]
    lines = [at[f"ArenaHeader.{word}"] // 64 for word in words]
    assert len(set(lines)) == len(lines)
    assert at["Cursor"] == 64


def order_tags() -> dict[str, list[str]]:
    """Where each `ORDER tag` is mentioned."""
    tags = defaultdict(list)
    for source in sorted(SOURCES.glob("*.?pp")):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            for tag in re.findall(r"ORDER ([a-z][a-z-]*)", line):
                tags[tag].append(f"{source.name}:{number}")
    return tags


def test_the_tags_are_found() -> None:
    assert {"publish", "parking", "free-stack", "let-go", "slot-release", "finalize"} <= order_tags().keys()


def code_words() -> set[str]:
    """Every name of the native code outside its comments."""
    return {
        word
        for source in SOURCES.glob("*.?pp")
        for line in source.read_text().splitlines()
        for word in re.findall(r"\w+", line.split("//")[0])
    }


@pytest.mark.parametrize("tag", sorted(order_tags()))
def test_every_ordering_names_its_partner(tag: str) -> None:
    comments = []
    for place in order_tags()[tag]:
        name, number = place.split(":")
        lines = (SOURCES / name).read_text().splitlines()[int(number) - 1 : int(number) + 4]
        comments.append(" ".join(line.split("//", 1)[1] for line in lines if "//" in line))
    named = {
        word for comment in comments for word in re.findall(r"[A-Za-z_]{4,}", comment.split("ORDER " + tag, 1)[-1])
    } & code_words()
    assert named, f"no mention of ORDER {tag} names what it pairs with"


@pytest.mark.parametrize("tag", sorted(order_tags()))
def test_every_ordering_names_both_sides(tag: str) -> None:
    places = order_tags()[tag]
    assert len(places) >= 2, f"ORDER {tag} is mentioned at {places} only: its other side is not marked"
