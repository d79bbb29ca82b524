"""The figures that a result document is drawn as: curves for broadcast and pipeline, bars for the ratios to Ray Compiled Graphs.

Made with matplotlib's objects on an Agg canvas. pyplot is not imported, so that nothing of a program or a notebook that has
figures of its own changes. Colours are those of Okabe and Ito, which colour-blind readers tell apart; line style and marker
differ as well.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import blended_transform_factory

from microbench.console import size_of_bytes
from microbench.document import figure, machine_line, troubles, validate, with_facts
from microbench.harness import Result
from microbench.targets import RATIOS, Verdict, judge

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
COLOURS = {
    "raycomm": BLUE,
    "ray": VERMILLION,
    "vllm": PURPLE,
    "iceoryx2": SKY,
    "zmq": GREEN,
    "gloo": ORANGE,
    "copy": BLACK,
    "native": BLACK,
}
OTHER_COLOUR = GREY
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*X<>ph8dH"
SIZE = (9.0, 5.6)  # inches
DPI = 120
CAPTION_WIDTH = 150  # characters
MOST_TICKS = 16
CAPTION_NOTES = 4  # lines; the page has them all


class Plot(Figure):
    """A figure that notebooks display without pyplot.

    Attributes:
        name: for a file.
        title: what it shows.
    """

    name: str = ""
    title: str = ""

    def png(self) -> bytes:
        """The picture."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


class Plots(list[Plot]):
    """The figures of a document. As a cell's value in a notebook each of them is displayed."""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for plot in self:
            display(plot)  # type: ignore[no-untyped-call]
        if not self:
            print("no figures are drawn of this bench")


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        key: of the rows' figure.
        label: with the unit.
        tick: how a value is written.
    """

    key: str
    label: str
    tick: Callable[[float], str] = "{:,g}".format


MEAN = Axis("mean_us", "from the writer's call to the last reader, mean (us)")
UNPACED = Axis("unpaced_us", "as fast as it goes, per message (us)")
P50 = Axis("p50_us", "one execution, p50 (us)")
PER_S = Axis("per_s", "executions per second")


def draw(document: Mapping[str, Any]) -> Plots:
    """The figures of a result document; none of a bench that is shown as tables only.

    Raises:
        SchemaError: not a document of this schema.
    """
    rows = validate(document)
    drawn = _DRAWN.get(str(document.get("bench")))
    return Plots(drawn(rows, machine_line(document["machine"])) if drawn else ())


def _broadcast(rows: Sequence[Result], caption: str) -> Iterator[Plot]:
    rows = with_facts(rows, ("kind", "size"))
    elements, nbytes = Axis("size", "elements of the list"), Axis("size", "size of the tensor", size_of_bytes)
    for kind, x, what in (("list", elements, "a list of ints"), ("tensor", nbytes, "a CPU tensor")):
        here = [row for row in rows if row.get("kind", row["row"].split("_")[0]) == kind]
        for y, name, how in ((MEAN, "latency", "latency"), (UNPACED, "unpaced", "time per message, unpaced")):
            yield from _curves(f"{name}-{kind}", f"Broadcast of {what}: {how}", here, x, y, caption)


def _pipeline(rows: Sequence[Result], caption: str) -> Iterator[Plot]:
    in_flight, compute = Axis("in_flight", "executions in flight"), Axis("compute_ms", "work per stage (ms)")
    hops, fan_out = Axis("hops", "actors in the chain"), Axis("fan_out", "actors side by side")
    rows = with_facts(rows, [axis.key for axis in (compute, hops, fan_out, in_flight)])
    # One graph for each value that is sent: inflight_8 and inflight_8_tensor.
    values = dict.fromkeys(value_of(row["row"]) for row in rows if "in_flight" in row and "compute_ms" not in row)
    for value in values:
        here = [row for row in rows if "in_flight" in row and "compute_ms" not in row and value_of(row["row"]) == value]
        name, title = f"in-flight{value and '-'}{value}", f"Executions in flight{value and ', '}{value}"
        yield from _curves(name, title, here, in_flight, PER_S, caption)
    for axis, y, name, title in (
        (hops, P50, "chain", "Length of a chain"),
        (fan_out, P50, "fan-out", "Width of a fan-out"),
        (compute, PER_S, "compute", "Work per stage: throughput"),
        (compute, P50, "compute-latency", "Work per stage: latency"),
    ):
        yield from _curves(name, title, [row for row in rows if axis.key in row] + _ideal(rows, axis, y), axis, y, caption)


def _ideal(rows: Sequence[Result], x: Axis, y: Axis) -> list[Result]:
    """What a stage's time alone allows, where rows say it, as a line of its own."""
    found = {row[x.key]: row[f"ideal_{y.key}"] for row in rows if x.key in row and f"ideal_{y.key}" in row}
    return [{"row": "ideal", "system": "ideal", x.key: across, y.key: up} for across, up in found.items()]


def value_of(row: str) -> str:
    """What follows the number in the name of a row such as inflight_8_tensor."""
    found = re.search(r"\d+_(.+)$", row)
    return found[1] if found else ""


def _curves(name: str, title: str, rows: Sequence[Result], x: Axis, y: Axis, caption: str) -> Iterator[Plot]:
    """One line per system, with the rounds' band; nothing where no row has both figures. The caption names those that failed."""
    points: dict[str, list[tuple[float, float, Result]]] = {}
    for row in rows:
        across, up = figure(row, x.key), figure(row, y.key)
        if across is not None and up is not None and up > 0:  # a logarithmic axis has no place for others
            points.setdefault(row["system"], []).append((across, up, row))
    if not points:
        return
    plot, axes = _plot(name, title)
    for place, (system, line) in enumerate(points.items()):
        line.sort(key=lambda point: point[:2])
        colour, dashes = _style(system, list(points))
        marker = MARKERS[place % len(MARKERS)]
        xs, ys = [point[0] for point in line], [point[1] for point in line]
        axes.plot(xs, ys, color=colour, linestyle=dashes, marker=marker, markersize=4.5, linewidth=1.6, label=_literal(system))
        lows, highs = ([figure(row, f"{y.key}{end}") or 0.0 for *_, row in line] for end in ("_low", "_high"))
        if all(lows) and all(highs):
            axes.fill_between(xs, lows, highs, color=colour, alpha=0.15)
    places = sorted({point[0] for line in points.values() for point in line})
    _scale(axes, x, y, places)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _caption(plot, caption, troubles(rows))
    yield plot


def _style(system: str, systems: Sequence[str]) -> tuple[str, str]:
    """Colour and dashes of a line: a colour for each family of systems, dashes for the members of one."""
    of = family(system)
    members = [each for each in systems if family(each) == of]
    return COLOURS.get(of, OTHER_COLOUR), DASHES[members.index(system) % len(DASHES)]


def family(system: str) -> str:
    """What the systems of one origin have in common: "zmq" of "zmq:pubsub:tcp", "ray" of "ray_compiled_graph"."""
    return re.split(r"[:_]", system)[0]


def _scale(axes: Axes, x: Axis, y: Axis, places: Sequence[float]) -> None:
    if places[0] > 0:
        axes.set_xscale("log", base=2)
    elif places[-1] > 0:  # a logarithm, except from zero to the least value above it
        axes.set_xscale("symlog", linthresh=next(place for place in places if place > 0))
    axes.xaxis.set_major_locator(FixedLocator(_apart(places, axes.xaxis.get_transform().transform)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: x.tick(value)))
    axes.tick_params(axis="x", rotation=45 if len(places) > 8 else 0)
    axes.set_yscale("log")
    _plain_log_ticks(axes)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    axes.grid(True, which="major", alpha=0.3)


def _apart(places: Sequence[float], scale: Callable[[Any], Any]) -> list[float]:
    """Those of the ascending values that have room for a tick, from the last, which is always one of them."""
    scaled = [float(value) for value in scale(list(places))]
    room = (scaled[-1] - scaled[0]) / MOST_TICKS
    kept = [len(places) - 1]
    for index in reversed(range(len(places) - 1)):
        if scaled[kept[-1]] - scaled[index] >= room:
            kept.append(index)
    return [places[index] for index in reversed(kept)]


def _plain_log_ticks(axes: Axes) -> None:
    # 1, 2, 5, 10, ...: a narrow range may hold no power of ten at all.
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _ratios(rows: Sequence[Result], caption: str) -> Iterator[Plot]:
    """A bar per row that has a target, with marks at what is required and what is aimed at."""
    names = {row["row"] for row in rows}
    # `judge` begins with the ratios, in the order of RATIOS.
    verdicts = [verdict for verdict in judge(rows)[: len(RATIOS)] if verdict.row in names]
    if not any(verdict.ratio for verdict in verdicts):
        return
    plot, axes = _plot("ratios", "raycomm against Ray Compiled Graphs, in one run")
    for place, verdict in enumerate(verdicts):
        _bar(axes, place, verdict)
    axes.plot([], [], color=BLACK, marker="|", markersize=12, markeredgewidth=2, linestyle="", label="required")
    axes.plot([], [], color=BLACK, marker="D", markersize=5, markerfacecolor="none", linestyle="", label="aim")
    axes.set_xscale("log")
    axes.set_xlim(left=min(1.0, *(verdict.ratio / 1.5 for verdict in verdicts if verdict.ratio)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}x"))
    axes.set_yticks(range(len(verdicts)), [_literal(verdict.row) for verdict in verdicts], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times shorter p50, or times the executions per second")
    axes.grid(True, axis="x", alpha=0.3)
    _legend_once(axes)
    _caption(plot, caption, [f"{verdict.row}: {verdict.measured}" for verdict in verdicts if verdict.ratio is None])
    yield plot


LOOKS = {"aim reached": (BLUE, ""), "met": (SKY, ""), "short": (VERMILLION, "//")}


def _bar(axes: Axes, place: int, verdict: Verdict) -> None:
    target = RATIOS[verdict.row]
    if verdict.ratio:
        mark = "aim reached" if verdict.aim_met else "met" if verdict.must_met else "short"
        colour, hatch = LOOKS[mark]
        axes.barh(place, verdict.ratio - 1, left=1, color=colour, hatch=hatch, edgecolor="white", label=mark)
        text, weight = verdict.measured, "bold"
    else:
        text, weight = "no ratio", "normal"
    axes.plot([target.must], [place], color=BLACK, marker="|", markersize=12, markeredgewidth=2)
    axes.plot([target.aim], [place], color=BLACK, marker="D", markersize=5, markerfacecolor="none")
    # Past the end of the axes, where no bar and no mark is in the way.
    to_the_right = blended_transform_factory(axes.transAxes, axes.transData)
    axes.text(1.01, place, text, transform=to_the_right, va="center", fontsize=8, fontweight=weight)


def _legend_once(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=8, frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0.0, 1.0))


def _plot(name: str, title: str) -> tuple[Plot, Axes]:
    plot = Plot(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(plot)
    plot.name, plot.title = name, title
    plot.suptitle(_literal(title), fontsize=12)
    axes = plot.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return plot, axes


def _literal(text: str) -> str:
    # A dollar sign would begin a formula.
    return text.replace("$", r"\$")


def _caption(plot: Plot, machine: str, notes: Sequence[str]) -> None:
    """Machine and date below the figure, and what is missing from it."""
    lines = [machine, *(textwrap.shorten(note, CAPTION_WIDTH, placeholder="...") for note in notes[:CAPTION_NOTES])]
    if len(notes) > CAPTION_NOTES:
        lines.append(f"and {len(notes) - CAPTION_NOTES} more such lines: see the table")
    text = "\n".join(wrapped for line in lines for wrapped in textwrap.wrap(line, CAPTION_WIDTH))
    plot.supxlabel(_literal(text), fontsize=6.5, color="#444444", x=0.01, ha="left")


_DRAWN: dict[str, Callable[[Sequence[Result], str], Iterator[Plot]]] = {
    "broadcast": _broadcast,
    "accelerated_dag": _ratios,
    "pipeline": _pipeline,
}
