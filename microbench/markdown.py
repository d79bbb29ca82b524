"""The tables of README.md and docs/performance.md, drawn from result documents. See `microbench.tables`.

A table has a line per row of the bench and a column per system, whoever is ahead; the best figure of a line is bold. Below it
stands when it was measured, and which figures are missing for what reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microbench.console import number, size_of_bytes
from microbench.document import figure, troubles, with_facts
from microbench.harness import Result
from microbench.rows import IN_FLIGHT, NATIVE, RAY_CALL, RAY_GRAPH, RAYCOMM, ROWS, Kind
from microbench.targets import IDLE_ROW, RATIOS, judge

FLOORS = frozenset({"copy", NATIVE})  # what the machine can do at best: no competitor
FLOOR_ROWS = {"floor_pingpong": NATIVE, "floor_chain5": NATIVE, "channel_pingpong_8B": RAYCOMM, "plain_actor_call": RAY_CALL}
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

# Rows of README's table, as it names them.
PLAIN_NAMES = {
    "echo_int": "1 actor, int",
    "echo_list1024": "1 actor, list of 1024 ints",
    "echo_tensor_1x1": "1 actor, tensor (1,1) float32",
    "echo_tensor_192KiB": "1 actor, tensor 192 KiB",
    "chain4_int": "chain of 4, int",
    "chain4_tensor_1x1": "chain of 4, tensor (1,1)",
    "chain4_tensor_192KiB": "chain of 4, tensor 192 KiB",
    "chain4_tensor_16MiB": "chain of 4, tensor 16 MiB",
    "broadcast4_int": "broadcast to 4, int",
    "broadcast4_tensor_192KiB": "broadcast to 4, tensor 192 KiB",
    "throughput_chain4_int": f"chain of 4, int, {IN_FLIGHT} in flight, per second",
    "throughput_chain4_tensor_1x1": f"chain of 4, tensor (1,1), {IN_FLIGHT} in flight, per second",
}

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """What stands between two markers.

    Attributes:
        bench: whose document it is drawn from.
        draw: its text, the last line end included.
    """

    bench: str
    draw: Callable[[Document], str]


def plain(text: Any) -> str:
    """Text that no table cell and no marker takes for its own."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its cells being Markdown already."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines) + "\n"


def cell(row: Result | None, key: str) -> str:
    """A row's figure, or a word for why there is none."""
    if row is None:
        return "not measured"
    value = figure(row, key)
    if "error" in row:
        return "failed" if value is None else f"{number(value)} (failed)"
    if value is None:
        return "left out" if "left_out" in row else ""
    return f"{value:,.0f}" if key.endswith("bytes") else number(value)


def _by_name(rows: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(row["row"], row["system"]): row for row in rows}


def when(document: Document) -> str:
    """The date and the number of rounds."""
    date = str(document["machine"].get("date", "no date")).partition("T")[0]
    rounds = max((int(figure(row, "rounds") or 0) for row in document["rows"]), default=0)
    if not rounds:
        return f"{plain(date)}."
    count = COUNTS[rounds] if rounds < len(COUNTS) else f"{rounds}"
    return f"{plain(date)}, {count} {'round' if rounds == 1 else 'rounds'}."


def _missing(rows: Sequence[Result]) -> str:
    """A line on what failed or was left out; nothing where nothing was."""
    lines = [plain(line) for line in troubles(rows)]
    return f"\nNot measured: {'; '.join(lines)}.\n" if lines else ""


# raycomm beside Ray Compiled Graphs


def _ratios(rows: Sequence[Result]) -> dict[str, float]:
    return {verdict.row: verdict.ratio for verdict in judge(rows) if verdict.ratio is not None}


def _main_key(name: str) -> str:
    return "per_s" if ROWS[name].kind is Kind.THROUGHPUT else "p50_us"


def _pair(found: Mapping[tuple[str, str], Result], name: str, *keys: str) -> list[str]:
    return [cell(found.get((name, system)), key) for system in (RAYCOMM, RAY_GRAPH) for key in keys]


def measured(document: Document) -> str:
    """README's table: each row with a target, by its plain name."""
    found, ratios = _by_name(document["rows"]), _ratios(document["rows"])
    rows = [
        [PLAIN_NAMES[name], *_pair(found, name, _main_key(name)), f"{ratios[name]:.0f}x" if name in ratios else ""]
        for name in RATIOS
    ]
    return grid(["round trip, us (p50)", "raycomm", "Ray Compiled Graphs", "ratio"], rows) + _missing(_of_both(document["rows"]))


def _of_both(rows: Sequence[Result]) -> list[Result]:
    return [row for row in rows if row["row"] in RATIOS and row["system"] in (RAYCOMM, RAY_GRAPH)]


def bench(document: Document) -> str:
    """The page's tables of latency and throughput, and the floor's figures."""
    found, ratios = _by_name(document["rows"]), _ratios(document["rows"])
    times = {name: f"{ratio:.1f}x" for name, ratio in ratios.items()}
    latencies, rates = ([name for name in RATIOS if _main_key(name) == key] for key in ("p50_us", "per_s"))
    first = [[f"`{name}`", *_pair(found, name, "p50_us", "p99_us"), times.get(name, "")] for name in latencies]
    second = [
        [f"`{name}`, executions per second, {IN_FLIGHT} in flight", *_pair(found, name, "per_s"), times.get(name, "")]
        for name in rates
    ]
    idle_actor = cell(found.get((IDLE_ROW, RAY_CALL)), "cpu_percent")
    idle = f"`{IDLE_ROW}`, busiest process (a plain idle actor: {idle_actor})"
    second.append([idle, *_pair(found, IDLE_ROW, "cpu_percent"), ""])
    floor = [f"`{name}` {_with_unit(cell(found.get((name, system)), 'p50_us'))}" for name, system in FLOOR_ROWS.items()]
    return "\n".join(
        (
            grid(["row", "raycomm p50", "p99", "Ray p50", "p99", "ratio of p50"], first),
            grid(["row", "raycomm", "Ray", "ratio"], second),
            f"{', '.join(floor)}. {when(document)}\n{_missing(_of_both(document['rows']))}",
        )
    )


def _with_unit(figure_or_word: str) -> str:
    return f"{figure_or_word} us" if figure_or_word[:1].isdigit() else figure_or_word


def target(document: Document) -> str:
    """The page's table of requirements."""
    rows = []
    for verdict in judge(document["rows"]):
        mark = "aim" if verdict.aim_met else "met" if verdict.must_met else "short"
        rows.append([f"`{plain(verdict.row)}`", plain(verdict.requirement), plain(verdict.measured), mark])
    return grid(["row", "requirement", "measured", ""], rows)


# a column per system


def by_system(head: str, rows: Sequence[Result], key: str, label: Callable[[str], str]) -> str:
    """One figure of all systems, a line per row.

    Args:
        head: of the first column: what the lines are, and what the figure is.
        rows: in the order of the lines.
        key: the figure's; per_s is best high, all others low.
        label: the text of the first column, from a row's name.
    """
    found = _by_name(rows)
    systems = [
        system
        for system in dict.fromkeys(row["system"] for row in rows)
        # A system that is left out everywhere needs no column: it is named below the table.
        if any(row["system"] == system and (figure(row, key) is not None or "error" in row) for row in rows)
    ]
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        figures = {system: figure(found.get((name, system), {}), key) for system in systems if system not in FLOORS}
        known = [value for value in figures.values() if value is not None]
        # Of one figure, or of equal ones, none is best.
        best = (max if key.endswith("per_s") else min)(known) if len(set(known)) > 1 else None
        cells = []
        for system in systems:
            text = cell(found.get((name, system)), key)
            cells.append(f"**{text}**" if best is not None and figures.get(system) == best else text)
        lines.append([label(name), *cells])
    return grid([head, *(plain(system) for system in systems)], lines)


def _code(name: str) -> str:
    return f"`{plain(name)}`"


def broadcast(kind: str, what: str, document: Document) -> str:
    """Latency and throughput of a broadcast of one kind of messages, by size."""
    rows = with_facts(document["rows"], ("kind", "size"))
    rows = [row for row in rows if row.get("kind", row["row"].split("_")[0]) == kind]
    if not rows:
        return _none_of(document)
    rows.sort(key=lambda row: figure(row, "size") or 0.0)
    sizes = {row["row"]: int(figure(row, "size") or 0) for row in rows}
    tables = [
        by_system(f"{what}, {figures}", rows, key, lambda name: _size(kind, name, sizes[name]))
        for key, figures in (
            ("mean_us", "us to the last reader (mean)"),
            ("irregular_mean_us", "the same at irregular intervals"),
            ("unpaced_us", "us a message, unpaced"),
        )
        if any(key in row for row in rows)
    ]
    return "\n".join((*tables, f"{when(document)}\n{_missing(rows)}"))


def _size(kind: str, name: str, size: int) -> str:
    if not size:
        return plain(name)
    return f"{size:,}" if kind == "list" else size_of_bytes(size)


def by_figure(document: Document) -> str:
    """A table for each figure that rows of a bench have, each with the rows that have it."""
    return _by_figure(document, document["rows"])


def lifecycle(document: Document) -> str:
    """The same; what each graph left behind is of one row, and gets a table of its own with a line for each figure."""
    rows = document["rows"]
    left = [key for key in dict.fromkeys(key for row in rows for key in row) if key.endswith(LEFT)]
    lines = [
        {"row": key.removesuffix(LEFT), "system": row["system"], LEFT: row[key]} for key in left for row in rows if key in row
    ]
    return _by_figure(document, [*rows, *lines])


def instructions(document: Document) -> str:
    """A line per value, a column per operation."""
    rows = document["rows"]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key.endswith(INSTRUCTIONS)]
    lines = [[_code(row["row"]), *(number(figure(row, key)) for key in keys)] for row in rows]
    head = ["instructions", *(key.removesuffix(INSTRUCTIONS) for key in keys)]
    return f"{grid(head, lines)}\n{when(document)}\n{_missing(rows)}"


def _by_figure(document: Document, rows: Sequence[Result]) -> str:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if head_of(key)]
    tables = []
    for key in keys:
        names = {row["row"] for row in rows if figure(row, key) is not None}
        if names:
            here = [row for row in rows if row["row"] in names]
            tables.append(by_system(f"row, {head_of(key)}", here, key, _code))
    return "\n".join((*tables, f"{when(document)}\n{_missing(rows)}")) if tables else _none_of(document)


LEFT = "_per_graph"
INSTRUCTIONS = "_instructions"
HEADS = {
    "p50_us": "us (p50)",
    "p50_ms": "ms (p50)",
    "per_s": "per second",
    "cpu_percent": "% of a core",
    "bytes": "bytes",
    LEFT: "left behind by each graph",
}


def head_of(key: str) -> str:
    """What a figure is called in a table: "us (p50)"; empty for those that tables do without, as means beside medians."""
    for end, text in HEADS.items():
        if key == end:
            return text
        if key.endswith(f"_{end}") and not key.startswith("ideal_"):
            return f"{key.removesuffix(f'_{end}').replace('_', ' ')}, {text}"
    return ""


def _none_of(document: Document) -> str:
    return f"No such rows were measured. {when(document)}\n{_missing(document['rows'])}"


TABLES: dict[str, Table] = {
    "measured": Table("accelerated_dag", measured),
    "bench": Table("accelerated_dag", bench),
    "target": Table("accelerated_dag", target),
    "broadcast-lists": Table("broadcast", lambda document: broadcast("list", "ints", document)),
    "broadcast-tensors": Table("broadcast", lambda document: broadcast("tensor", "float32 tensor", document)),
    "serializer": Table("serializer", by_figure),
    "pipeline": Table("pipeline", by_figure),
    "lifecycle": Table("lifecycle", lifecycle),
    "instructions": Table("instructions", instructions),
}
