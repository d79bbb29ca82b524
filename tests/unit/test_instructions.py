"""Instruction counts: what is made of callgrind's output, and the comparison with a baseline. Valgrind itself only in `slow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from microbench import callgrind, counted, document, instructions
from microbench.callgrind import CountingFailed, per_call
from microbench.counted import VALUES, Group, Operation, sections
from microbench.instructions import compare, differing, key

FACTS = {"python": "3.11.7 (main)", "torch": "2.13.0"}
EVERY_VALUE = [value for values in VALUES.values() for value in values]


def row(name: str, **changed: float) -> dict[str, Any]:
    return {"row": name, "system": "raycomm"} | {key(op): changed.get(op.value, 1000.0) for op in Operation}


def invoke(*args: str) -> tuple[int, str, str]:
    app = Typer()
    app.command()(instructions.main)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.stdout, result.stderr


def counts_of(group: Group, **instead: float) -> callgrind.Counts:
    return {value: {op: instead.get(value, 1000.0) for op in Operation} for value in VALUES[group]}


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """1000 instructions for everything, counted here."""
    path = tmp_path / "baseline.json"
    machine = document.describe_machine() | {instructions.FACTS: FACTS}
    document.write_json(path, "instructions", machine, [row(value) for value in EVERY_VALUE])
    monkeypatch.setattr(instructions, "BASELINE", path)
    monkeypatch.setattr(instructions, "find_valgrind", lambda: "valgrind")
    monkeypatch.setattr(instructions, "facts", lambda valgrind: FACTS)
    monkeypatch.setattr(instructions, "count", lambda valgrind, group, *layouts: counts_of(group))
    return path


# what is counted


@pytest.mark.parametrize("group", Group)
def test_every_section_is_between_two_marks_and_all_begin_after_the_warm_up(group: Group) -> None:
    happened: list[str] = []
    counted.count(group, 1, lambda: happened.append("begin"), lambda: happened.append("mark"))
    assert happened == ["begin", *["mark"] * (2 * len([*sections(group)]))]


def test_a_call_is_the_difference_between_so_many_and_twice_as_many() -> None:
    marks, between = 700, 300
    dumps = []
    for number, (_, _, calls) in enumerate(sections(Group.BUILTINS)):
        dumps += [between, marks + calls * (100 + number % len(Operation))]
    expected = {op: 100.0 + number for number, op in enumerate(Operation)}
    assert per_call(Group.BUILTINS, dumps) == dict.fromkeys(VALUES[Group.BUILTINS], expected)


def test_a_mark_too_many_is_noticed() -> None:
    with pytest.raises(CountingFailed, match=r"17 counts in place of 16"):
        per_call(Group.ARRAYS, [1] * 17)


def test_the_least_of_several_layouts_counts() -> None:
    low, high = dict.fromkeys(Operation, 90.0), dict.fromkeys(Operation, 100.0)
    assert callgrind.least([{"int": high, "str": low}, {"int": low, "str": high}]) == {"int": low, "str": low}


def test_dumps_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(1, 13):
        (tmp_path / f"counts.{number}").write_text(f"version: 1\nsummary: 5\n\nfn=(1)\n0 5\n\ntotals: {number}\n")
    (tmp_path / "counts").write_text("totals: 99\n")  # what came after the last mark
    assert callgrind.totals(tmp_path) == [*range(1, 13)]
    (tmp_path / "counts.13").write_text("")
    with pytest.raises(CountingFailed, match=r"counts\.13"):
        callgrind.totals(tmp_path)


def test_compilers_are_found_in_a_stripped_library() -> None:
    assert callgrind._compilers(b"\x7fELF\0GCC: (Debian 12.2.0-14) 12.2.0\0x\0GCC: (Debian 12.2.0-14) 12.2.0\0") == (
        "GCC: (Debian 12.2.0-14) 12.2.0"
    )
    assert callgrind._compilers(b"\x7fELF") == "unknown"


def test_the_environment_of_the_child_has_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def length() -> int:
        return sum(len(name) + len(value) for name, value in callgrind._environment().items())

    before = length()
    monkeypatch.setenv("HOME", "/somewhere/else/and/far/away")
    monkeypatch.setenv("RAYCOMM_SPIN_US", "7")
    assert length() == before
    assert "RAYCOMM_SPIN_US" not in callgrind._environment()


# the comparison


def test_three_percent_more_is_told_and_one_is_not() -> None:
    found = compare([row("int", write=1030.0, read=1010.0)], [row("int")])
    assert [str(change) for change in found.more] == ["write int: 1,000 -> 1,030 instructions (+3.0 %)"]
    assert {change.operation for change in found.within} == {Operation.READ, Operation.ENCODE, Operation.DECODE}
    assert found.fewer == found.failed == found.unknown == []


def test_fewer_is_told_apart_from_more() -> None:
    found = compare([row("int", decode=900.0)], [row("int")])
    assert [(change.operation, round(change.percent)) for change in found.fewer] == [(Operation.DECODE, -10)]
    assert found.more == []


def test_a_failed_row_a_new_row_and_one_left_out() -> None:
    rows = [
        {"row": "int", "system": "raycomm", "error": "died"},
        {"row": "str", "system": "raycomm", "left_out": "not in a quick run"},
        row("new"),
    ]
    found = compare(rows, [row("int"), row("str")])
    assert (found.failed, found.unknown) == (["int: died"], ["new"])
    assert found.more == found.fewer == found.within == []


def test_facts_that_differ_are_named() -> None:
    assert differing(FACTS, dict(FACTS)) == []
    assert differing(FACTS, FACTS | {"torch": "2.14.0"}) == ["torch: 2.13.0 here, 2.14.0 there"]
    assert differing(FACTS, {"python": FACTS["python"], "arch": "x"}) == [
        "torch: 2.13.0 here, unknown there",
        "arch: unknown here, x there",
    ]


# the command


@pytest.mark.usefixtures("baseline")
def test_check_passes_the_same_counts() -> None:
    code, out, _ = invoke("--check")
    assert code == 0
    assert out.splitlines()[-1] == "36 operations within 2 % of the baseline, 0 with more instructions, 0 with fewer"


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(("now", "code"), [(1030.0, 1), (1010.0, 0), (970.0, 0)])
def test_check_fails_on_more(monkeypatch: pytest.MonkeyPatch, now: float, code: int) -> None:
    monkeypatch.setattr(instructions, "count", lambda valgrind, group, *layouts: counts_of(group, list101=now))
    done, out, _ = invoke("--check")
    assert done == code
    assert out.count("more: ") == (4 if code else 0)
    assert ("more: write list101: 1,000 -> 1,030 instructions (+3.0 %)" in out) == bool(code)


@pytest.mark.usefixtures("baseline")
def test_what_other_layouts_do_not_show_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Group] = []

    def count(valgrind: str, group: Group, *layouts: object) -> callgrind.Counts:
        if layouts:
            again.append(group)
            return counts_of(group, int=1010.0, list101=1030.0)
        return counts_of(group, int=1030.0, list101=1040.0)

    monkeypatch.setattr(instructions, "count", count)
    code, out, _ = invoke("--check")
    assert (code, again) == (1, [Group.BUILTINS])
    assert "list101: 1,000 -> 1,030" in out
    assert "int: 1,000" not in out


@pytest.mark.usefixtures("baseline")
def test_check_fails_when_a_group_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(valgrind: str, group: Group, *layouts: object) -> callgrind.Counts:
        if group is Group.TENSORS:
            raise CountingFailed("unhandled instruction")
        return counts_of(group)

    monkeypatch.setattr(instructions, "count", count)
    code, out, _ = invoke("--check")
    assert code == 1
    assert "not counted: tensor_1x1: unhandled instruction" in out
    assert "28 operations within 2 %" in out
    assert invoke()[0] == 0  # without --check the run went through


@pytest.mark.usefixtures("baseline")
def test_nothing_is_counted_where_facts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "facts", lambda valgrind: FACTS | {"torch": "2.14.0"})
    monkeypatch.setattr(instructions, "count", lambda valgrind, group, *layouts: pytest.fail("counted for nothing"))
    code, out, _ = invoke("--check")
    assert (code, out.count("\n")) == (0, 1)
    assert "nothing was compared: torch: 2.14.0 here, 2.13.0 there" in out


@pytest.mark.usefixtures("baseline")
def test_without_valgrind_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "find_valgrind", lambda: None)
    code, out, err = invoke()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "apt-get install valgrind" in err
    code, out, err = invoke("--check")
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert out.startswith("skipped: ")
    assert invoke("--move-baseline")[0] == 2


def test_the_baseline_moves(baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "count", lambda valgrind, group, *layouts: counts_of(group, list1024=1500.0))
    assert invoke("--check")[0] == 1
    assert invoke("--move-baseline", "--json", str(tmp_path / "run.json"))[0] == 0
    assert invoke("--check")[0] == 0
    rows = json.loads(baseline.read_text())["rows"]
    assert [found["row"] for found in rows] == EVERY_VALUE
    assert json.loads((tmp_path / "run.json").read_text())["rows"] == rows


def test_the_baseline_stays_where_something_failed(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(valgrind: str, group: Group, *layouts: object) -> callgrind.Counts:
        raise CountingFailed("died")

    before = baseline.read_text()
    monkeypatch.setattr(instructions, "count", count)
    code, out, _ = invoke("--move-baseline")
    assert code == 1
    assert "the baseline was not moved" in out
    assert baseline.read_text() == before


@pytest.mark.usefixtures("baseline")
def test_a_quick_run_leaves_out_arrays_and_tensors(tmp_path: Path) -> None:
    code, out, _ = invoke("--quick", "--check", "--json", str(tmp_path / "run.json"))
    assert (code, out.splitlines()[-1][:24]) == (0, "24 operations within 2 %")
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [found["row"] for found in rows if "left_out" in found] == [*VALUES[Group.ARRAYS], *VALUES[Group.TENSORS]]


@pytest.mark.parametrize("args", [["--move-baseline", "--check"], ["--move-baseline", "--quick"]])
def test_options_that_exclude_each_other(baseline: Path, args: list[str]) -> None:
    code, _, err = invoke(*args)
    assert (code, err.count("\n")) == (2, 1)
    assert baseline.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1, "machine": {}, "rows": []}'])
def test_a_baseline_that_is_none(baseline: Path, text: str) -> None:
    baseline.write_text(text)
    code, _, err = invoke("--check")
    assert (code, err.count("\n")) == (2, 1)
    assert "--move-baseline" in err


def test_the_stored_baseline_can_be_read() -> None:
    known, rows = instructions.read_baseline(instructions.BASELINE)
    assert {"arch", "libc", "python", "valgrind", "numpy", "torch"} <= set(known)
    assert [found["row"] for found in rows] == EVERY_VALUE


# valgrind


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_counts_agree() -> None:
    valgrind = callgrind.find_valgrind()
    if valgrind is None:
        pytest.skip(callgrind.REMEDY)
    first, second = (callgrind.count(valgrind, Group.BUILTINS) for _ in range(2))
    assert [*first] == [*VALUES[Group.BUILTINS]]
    rows = [instructions.to_rows(counts) for counts in (first, second)]
    again = instructions.count_again(valgrind, rows[1], rows[0])  # as the check does where one layout costs more
    assert [str(change) for change in compare(again, rows[0]).more] == []
    assert first["list1024"][Operation.WRITE] > 1024
    assert first["list101"][Operation.READ] > first["int"][Operation.READ] > 100


@pytest.mark.slow
def test_a_child_that_dies_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    valgrind = callgrind.find_valgrind()
    if valgrind is None:
        pytest.skip(callgrind.REMEDY)
    monkeypatch.setattr(callgrind.sys, "executable", "/bin/false")
    with pytest.raises(CountingFailed, match=r"^builtins under valgrind ended with 1: [^\n]*$"):
        callgrind.count(valgrind, Group.BUILTINS)
