"""The serializer bench: its values, what each codec makes of them, how calls are batched, the command line and the document."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from microbench import console as display
from microbench import serializer, serializer_session
from microbench.codecs import CODECS, Calls, Codec
from microbench.codecs.base import each, each_of
from microbench.document import validate
from microbench.harness import QUICK, Turn
from microbench.process import ProcessLost, RequestFailed
from microbench.serialized import TUPLES_AS_LISTS, VALUES, same, tuples_as_lists
from microbench.serializer_session import BATCH_LIMIT, Session, batch_for
from raycomm.channel.device import DeviceWriter

ROOT = Path(__file__).parents[2]
BRIEF = replace(QUICK, warmup_s=0.0, measure_s=0.0, min_calls=3)
RAYCOMM = [name for name in CODECS if name.startswith("raycomm")]
TENSORS = {"tensor_empty", "tensor_1x1"}
ARRAYS = {"array_4KiB", "array_1MiB"}
DATACLASSES = {"dataclass", "dataclass_nested"}
LEFT_OUT = {"msgpack": TENSORS | ARRAYS | DATACLASSES, "msgspec": TENSORS | ARRAYS}


class Stand:
    """In the place of a codec."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def calls_for(self, value: Any) -> Calls:
        return self.calls


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Callable[[Calls], str]:
    """Makes a codec of calls, and gives its name."""

    def make(calls: Calls) -> str:
        monkeypatch.setitem(CODECS, "stand", Stand(calls))
        return "stand"

    return make


# values


def test_a_value_is_the_same_each_time() -> None:
    made = {name: value.made() for name, value in reversed(VALUES.items())}
    assert [name for name, value in VALUES.items() if not same(value.made(), made[name])] == []


def test_values_are_what_their_names_say() -> None:
    values = {name: value.made() for name, value in VALUES.items()}
    for count in (101, 1024, 16_384):
        assert [type(item) for item in values[f"list_int_{count}"]] == [int] * count
    assert [type(item) for item in values["list_float_1024"]] == [float] * 1024
    assert (values["array_4KiB"].nbytes, values["array_1MiB"].nbytes) == (4 << 10, 1 << 20)
    assert (values["tensor_1x1"].shape, values["tensor_empty"].numel()) == ((1, 1), 0)
    assert (len(values["str_16"]), len(values["bytes_64"])) == (16, 64)


def test_the_record_is_what_a_channel_between_devices_writes() -> None:
    link, records = MagicMock(), MagicMock()
    link.device.holds = torch.is_tensor
    link.device.current_stream.return_value = None
    hidden = torch.ones(4, 24_576, dtype=torch.float16)
    residual = torch.ones(4, 128, 64).permute(0, 2, 1).requires_grad_()
    DeviceWriter(records, link, 1, MagicMock(), name="W1.forward#0").write({"hidden": hidden, "residual": residual})
    record, _ = records.write.call_args.args
    assert same(record, VALUES["tensor_metadata"].made())


def test_what_changed_is_noticed() -> None:
    sampling = VALUES["dataclass"].made()
    array = np.arange(4)
    changed = array.copy()
    changed[3] = 0
    for got, wanted in [
        (True, 1),
        (1.0, 1),
        ((1, 2), [1, 2]),
        ([1, [2]], [1, (2,)]),
        ([1], [1, 2]),
        ({"b": 1}, {"a": 1}),
        ({"b": 1, "a": 1}, {"a": 1, "b": 1}),
        ({"a": True}, {"a": 1}),
        (replace(sampling, top_k=51), sampling),
        (replace(sampling, stop=("</s>", "\n\n")), sampling),
        (vars(sampling), sampling),
        (changed, array),
        (array.astype("i4"), array),
        (array.reshape(2, 2), array),
        (torch.ones(2, 1), torch.ones(2, 2)),  # they would broadcast
        (torch.zeros(2), torch.ones(2)),
        (torch.ones(2).half(), torch.ones(2)),
        (array, torch.from_numpy(array)),
    ]:
        assert not same(got, wanted), (got, wanted)
        assert same(copy.deepcopy(wanted), wanted)


def test_tuples_as_lists() -> None:
    assert same(tuples_as_lists(({"a": (1, b"x")}, [(2,)])), [{"a": [1, b"x"]}, [[2]]])


# codecs


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_gives_back(codec: str) -> None:
    session = Session()
    found = {value: session.examine(codec, value) for value in VALUES}
    assert {value for value, result in found.items() if "left_out" in result} == LEFT_OUT.get(codec, set())
    assert all(result["left_out"].startswith("cannot encode: TypeError: ") for result in found.values() if "left_out" in result)
    assert all(result["bytes"] > 0 for result in found.values() if "left_out" not in result)
    notes = {value: result["note"] for value, result in found.items() if "note" in result}
    assert notes == ({"tensor_metadata": TUPLES_AS_LISTS} if codec == "msgpack" else {})


def test_raycomms_three_ways_write_as_many_bytes() -> None:
    session = Session()
    sizes = [{value: session.examine(codec, value)["bytes"] for value in VALUES} for codec in RAYCOMM]
    assert len(sizes) == 3
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0]["array_1MiB"] > 1 << 20
    assert sizes[0]["bytes_64"] == 1 + 2 + 64


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_is_so_many_values(codec: str) -> None:
    value = VALUES["list_int_101"].made()
    calls = CODECS[codec].calls_for(VALUES["list_int_101"])
    size = Session().examine(codec, "list_int_101")["bytes"]
    for _ in range(3):  # a channel's ring goes round
        messages = calls.encode(value, BATCH_LIMIT)
        assert [calls.size(message) for message in messages] == [size] * BATCH_LIMIT
        values = calls.decode(messages)
        assert values == [value] * BATCH_LIMIT


def test_a_codec_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "microbench.codecs.msgspec_msgpack", raising=False)
    assert Session().examine("msgspec", "int") == {"left_out": "not installed: pip install msgspec"}


def test_an_adapter_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        Codec("x", "nowhere", None, "").calls_for(VALUES["int"])


def test_a_codec_that_gives_back_something_else(stand: Callable[[Calls], str]) -> None:
    name = stand(Calls(each(str), each_of(str)))
    text = Session().examine(name, "list_int_101")["left_out"]
    assert text.startswith("gives back another value, a str: ")
    assert len(text) < 120
    assert "left_out" not in Session().examine(name, "str_16")


def test_a_codec_that_cannot_decode(stand: Callable[[Calls], str]) -> None:
    name = stand(Calls(each(str), each_of(int)))
    text = Session().examine(name, "request_flat")["left_out"]
    assert text.startswith("cannot decode: ValueError: invalid literal")
    assert "\n" not in text


# timing


@pytest.mark.parametrize(
    ("encode_ns", "decode_ns", "wanted"),
    [
        (1000, 3000, 32),  # the faster one takes 20 us
        (3000, 1000, 32),
        (10, 10, BATCH_LIMIT),
        (30_000, 20_000, 1),
        (1000, 60_000, 4),  # the slower one has taken 200 us
    ],
)
def test_batch_sizes(monkeypatch: pytest.MonkeyPatch, encode_ns: int, decode_ns: int, wanted: int) -> None:
    looks = iter(range(1_000_000))

    def timed(calls: Any, value: Any, batch: int) -> tuple[int, int]:
        late = 10_000_000 if next(looks) % 5 == 3 else 0  # an interruption does not decide
        return encode_ns * batch + late, decode_ns * batch + late

    monkeypatch.setattr(serializer_session, "time_batch", timed)
    assert batch_for(Calls(each(str), each_of(str)), 1) == wanted


def test_every_message_is_decoded_once(stand: Callable[[Calls], str], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    decoded: list[int] = []

    def encode(value: str) -> int:
        encoded.append(len(encoded))
        return encoded[-1]

    monkeypatch.setattr(serializer_session, "batch_for", lambda calls, value: 7)
    session = Session()
    session.open(stand(Calls(each(encode), each_of(decoded.append), lambda message: 1)), "str_16")
    measurement = session.measure("str_16", BRIEF)
    assert decoded == encoded
    assert (measurement["batch"], measurement["count"]) == (7, 21)
    assert len(encoded) == 1 + 7 + 21  # two warm-ups


def test_figures_are_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serializer_session, "batch_for", lambda calls, value: 4)
    monkeypatch.setattr(serializer_session, "time_batch", lambda calls, value, batch: (4000, 8000))
    session = Session()
    session.open("pickle5", "int")
    names = ("p50_us", "p99_us", "mean_us", "std_us")
    assert session.measure("int", BRIEF) == {
        **{f"encode_{name}": figure for name, figure in zip(names, (1, 1, 1, 0), strict=True)},
        **{f"decode_{name}": figure for name, figure in zip(names, (2, 2, 2, 0), strict=True)},
        "batch": 4,
        "count": 12,
    }


def test_garbage_is_collected_again_after_a_failure(stand: Callable[[Calls], str], monkeypatch: pytest.MonkeyPatch) -> None:
    off: list[bool] = []

    def decode(message: str) -> str:
        if not gc.isenabled():
            off.append(True)
            raise ValueError("while it is timed")
        return message

    monkeypatch.setattr(serializer_session, "batch_for", lambda calls, value: 1)
    session = Session()
    session.open(stand(Calls(each(str), each_of(decode))), "int")
    with pytest.raises(ValueError, match="while it is timed"):
        session.measure("int", BRIEF)
    assert off == [True]
    assert gc.isenabled()


# the run


class Process:
    """Stands for the bench process."""

    def __init__(self, answers: dict[tuple[str, str], Any]) -> None:
        self.answers = answers

    def ask(self, method: str, codec: str, value: str, *, limit_s: float) -> Any:
        assert method == "examine"
        answer = self.answers[codec, value]
        if isinstance(answer, Exception):
            raise answer
        return answer


EXAMINED = [
    {"row": "int", "system": "raycomm", "bytes": 4},
    {"row": "int", "system": "msgpack", "error": "the bench process died in 'examine'"},
    {"row": "int", "system": "msgspec", "left_out": "not installed: pip install msgspec"},
    {"row": "str_16", "system": "raycomm", "bytes": 18},
    {"row": "str_16", "system": "msgpack", "bytes": 17, "note": TUPLES_AS_LISTS},
    {"row": "str_16", "system": "msgspec", "left_out": "not installed: pip install msgspec"},
]


def test_a_codec_that_dies_or_fails_costs_its_row_only() -> None:
    answers = {
        ("raycomm", "int"): {"bytes": 4},
        ("msgpack", "int"): ProcessLost("the bench process died in 'examine'"),
        ("raycomm", "str_16"): RequestFailed("ValueError: no"),
        ("msgpack", "str_16"): {"bytes": 17},
    }
    chosen = [CODECS["raycomm"], CODECS["msgpack"]]
    rows = serializer.examine(Process(answers), [VALUES["int"], VALUES["str_16"]], chosen)  # type: ignore[arg-type]
    assert rows == [
        *EXAMINED[:2],
        {"row": "str_16", "system": "raycomm", "error": "ValueError: no"},
        {"row": "str_16", "system": "msgpack", "bytes": 17},
    ]


def test_turns_alternate_between_codecs() -> None:
    assert serializer.plan_turns(EXAMINED) == [
        Turn("raycomm", "int", ("int",)),
        Turn("raycomm", "str_16", ("str_16",)),
        Turn("msgpack", "str_16", ("str_16",)),
    ]


def measured() -> list[dict[str, Any]]:
    """All rows; the last one failed while it was measured."""
    figures = {"encode_p50_us": 0.25, "decode_p50_us": 1234.0, "rounds": 3}
    lost = {"row": "str_16", "system": "msgpack", "error": "no answer"}
    return serializer.merge(EXAMINED, [{**EXAMINED[0], **figures}, {**EXAMINED[3], **figures}, lost])


def test_figures_and_findings_become_one_row() -> None:
    rows = measured()
    assert [(row["row"], row["system"]) for row in rows] == [(row["row"], row["system"]) for row in EXAMINED]
    assert rows[0] == {"row": "int", "system": "raycomm", "bytes": 4, "encode_p50_us": 0.25, "decode_p50_us": 1234.0, "rounds": 3}
    assert rows[1:3] == EXAMINED[1:3]
    assert rows[4] == {**EXAMINED[4], "error": "no answer"}


def test_the_table_has_every_value_and_codec() -> None:
    terminal = Console(width=80)
    with terminal.capture() as capture:
        display.show(terminal, serializer.table_of(measured()))
    lines = [line for line in capture.get().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == [
        ["int", "encode us", "0.25", "failed", "-"],
        ["", "decode us", "1,234", "failed", "-"],
        ["", "bytes", "4", "failed", "-"],
        ["str_16", "encode us", "0.25", "failed", "-"],
        ["", "decode us", "1,234", "failed", "-"],
        ["", "bytes", "18", "17", "-"],
    ]


def test_remarks_say_why_once() -> None:
    assert serializer.remarks(measured()) == [
        "msgpack: int: failed, the bench process died in 'examine'",
        "msgspec: int, str_16: left out, not installed: pip install msgspec",
        "msgpack: str_16: failed, no answer",
        f"msgpack: str_16: {TUPLES_AS_LISTS}",
    ]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--values", "nothing"], "--values: no value matches 'nothing'; values: tensor_metadata, "),
        (["--codecs", "nothing"], "--codecs: no codec matches 'nothing'; codecs: raycomm, "),
        (["--values", "["], "--values: not a regular expression: '['"),
        (["--codecs", "["], "--codecs: not a regular expression: '['"),
        (["--json", "/nowhere/result.json"], "--json: cannot write /nowhere/result.json: No such file or directory"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(args: list[str], wanted: str) -> None:
    app = Typer()
    app.command()(serializer.main)
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(wanted)


def test_a_run_writes_its_document(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    chosen = ["--values", "^(int|tensor_metadata)$", "--codecs", "^(raycomm|msgpack)$"]
    command = [sys.executable, "-m", "microbench.serializer", "--quick", "--rounds", "1", "--json", str(path), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(path.read_text())
    assert document["bench"] == "serializer"
    assert document["machine"]["seed"] == serializer.SEED
    assert set(document["machine"]["codecs"]) == {"raycomm", "msgpack"}
    rows = validate(document)
    assert [(row["row"], row["system"]) for row in rows] == [
        ("tensor_metadata", "raycomm"),
        ("tensor_metadata", "msgpack"),
        ("int", "raycomm"),
        ("int", "msgpack"),
    ]
    timed = {f"{what}_{name}" for what in ("encode", "decode") for name in ("p50_us", "p99_us", "mean_us", "std_us")}
    for row in rows:
        assert timed | {"batch", "count", "rounds", "bytes"} <= set(row)
        assert row["count"] >= row["batch"] >= 1
        assert row["encode_p50_us"] > 0
    assert [row.get("note") for row in rows] == [None, TUPLES_AS_LISTS, None, None]
    assert "medians over the rounds" in done.stdout
    assert "msgpack: tensor_metadata: tuples come back as lists" in done.stdout


def test_importing_the_command_loads_no_codec() -> None:
    heavy = {"torch", "numpy", "msgspec", "cloudpickle", "msgpack", "ray"}
    code = f"import sys, microbench.serializer; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr
