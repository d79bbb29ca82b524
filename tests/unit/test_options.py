"""Options: defaults, the environment, Ray's spellings, and values that make no sense."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from raycomm import CompileError, errors
from raycomm.options import RAY_SPELLINGS, Options, check_limit

DEFAULTS = {
    "max_inflight": 10,
    "max_buffered_results": 1000,
    "submit_timeout": None,
    "get_timeout": None,
    "compile_timeout": None,
    "teardown_timeout": 30.0,
    "inline_bytes": 1024,
    "shm_limit_bytes": None,
    "share_tensors": False,
    "allow_pickle": True,
    "loop_thread": "own",
    "device": "auto",
    "stream_policy": "link",
    "max_links": 6,
    "overlap": True,
    "spin_us": 2.0,
    "yield_us": 100.0,
    "name": None,
}


def load(environ: dict[str, str] | None = None, **given: Any) -> Options:
    return Options.load(given, environ or {})


def test_defaults() -> None:
    assert Options().to_dict() == DEFAULTS
    assert load() == Options()


def test_options_are_frozen_and_pickle() -> None:
    options = load(max_inflight=3, name="g")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_inflight = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options
    assert Options(**options.to_dict()) == options


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("RAYCOMM_MAX_INFLIGHT", "3", "max_inflight", 3),
        ("RAYCOMM_MAX_BUFFERED_RESULTS", "7", "max_buffered_results", 7),
        ("RAYCOMM_SUBMIT_TIMEOUT", "1.5", "submit_timeout", 1.5),
        ("RAYCOMM_GET_TIMEOUT", "none", "get_timeout", None),
        ("RAYCOMM_GET_TIMEOUT", "", "get_timeout", None),
        ("RAYCOMM_GET_TIMEOUT", "-1", "get_timeout", -1.0),
        ("RAYCOMM_COMPILE_TIMEOUT", "0", "compile_timeout", 0.0),
        ("RAYCOMM_TEARDOWN_TIMEOUT", "0.5", "teardown_timeout", 0.5),
        ("RAYCOMM_INLINE_BYTES", "64", "inline_bytes", 64),
        ("RAYCOMM_SHM_LIMIT_BYTES", str(1 << 20), "shm_limit_bytes", 1 << 20),
        ("RAYCOMM_SPIN_US", "0", "spin_us", 0.0),
        ("RAYCOMM_YIELD_US", "12.5", "yield_us", 12.5),
        ("RAYCOMM_SHARE_TENSORS", "1", "share_tensors", True),
        ("RAYCOMM_ALLOW_PICKLE", "no", "allow_pickle", False),
        ("RAYCOMM_LOOP_THREAD", "actor", "loop_thread", "actor"),
        ("RAYCOMM_DEVICE", "simulated", "device", "simulated"),
        ("RAYCOMM_STREAM_POLICY", "shared", "stream_policy", "shared"),
        ("RAYCOMM_MAX_LINKS", "14", "max_links", 14),
        ("RAYCOMM_OVERLAP", "no", "overlap", False),
        ("RAYCOMM_NAME", "g", "name", "g"),
    ],
)
def test_environment(variable: str, text: str, name: str, value: Any) -> None:
    options = load({variable: text, "UNRELATED": "x"})
    assert getattr(options, name) == value
    assert {**options.to_dict(), name: DEFAULTS[name]} == DEFAULTS


def test_every_option_has_a_variable() -> None:
    bad = {f"RAYCOMM_{name.upper()}" for name in DEFAULTS if name != "name"}
    for variable in bad:
        with pytest.raises(CompileError, match=f"environment variable {variable}='x'") as caught:
            load({variable: "x"})
        assert caught.value.argument == variable
        assert "unset" in str(caught.value.remedy)


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"RAYCOMM_MAX_INFLIGHT": "3"}, max_inflight=4).max_inflight == 4
    assert load({"RAYCOMM_GET_TIMEOUT": "3"}, get_timeout=None).get_timeout is None
    monkeypatch.setenv("RAYCOMM_MAX_INFLIGHT", "5")
    assert Options.load({}).max_inflight == 5  # by default, this process's


def test_values_from_the_environment_are_checked_too() -> None:
    for variable, bad, wanted in (
        ("RAYCOMM_MAX_INFLIGHT", ("0", "4097", "many", "1.5", ""), "an integer from 1 to 4096"),
        ("RAYCOMM_MAX_BUFFERED_RESULTS", ("0", "x"), "an integer from 1 to 1073741824"),
        ("RAYCOMM_INLINE_BYTES", ("63", "x"), "an integer from 64 to 1048576"),
        ("RAYCOMM_SHM_LIMIT_BYTES", ("1", "1GB"), "an integer from 1048576 to "),
        ("RAYCOMM_GET_TIMEOUT", ("-3", "nan", "soon"), "seconds of at least 0, 0 to try once, or -1 or None"),
        ("RAYCOMM_SUBMIT_TIMEOUT", ("-3", "10s"), "seconds of at least 0, 0 to try once, or -1 or None"),
        ("RAYCOMM_COMPILE_TIMEOUT", ("-3", "x"), "seconds of at least 0, 0 to try once, or -1 or None"),
        ("RAYCOMM_TEARDOWN_TIMEOUT", ("-1", "inf", "none"), "a finite number of at least 0"),
        ("RAYCOMM_SPIN_US", ("-1", "x"), "a finite number of at least 0"),
        ("RAYCOMM_YIELD_US", ("nan", ""), "a finite number of at least 0"),
        ("RAYCOMM_SHARE_TENSORS", ("2", "on"), "1, true, yes, 0, false or no"),
        ("RAYCOMM_ALLOW_PICKLE", ("", "never"), "1, true, yes, 0, false or no"),
        ("RAYCOMM_LOOP_THREAD", ("mine", ""), "'own' or 'actor'"),
        ("RAYCOMM_NAME", ("",), "a non-empty string"),
    ):
        for text in bad:
            with pytest.raises(CompileError) as caught:
                load({variable: text})
            assert f"environment variable {variable}={text!r} is not a valid value for option " in str(caught.value)
            assert f"give {wanted}" in str(caught.value)
            assert caught.value.argument == variable


def test_misspelled_variables_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"RAYCOMM_MAX_INFLIHGT sets no option of raycomm; did you mean RAYCOMM_MAX_INFLIGHT\?"):
        assert load({"RAYCOMM_MAX_INFLIHGT": "4"}) == Options()
    with pytest.warns(UserWarning, match="RAYCOMM_ZZZ sets no option of raycomm; those that do are: RAYCOMM_MAX_INFLIGHT, "):
        load({"RAYCOMM_ZZZ": "4"})
    # Other programs' variables, and those of the tests and benches (warnings are errors here).
    load({"RAYCOMM": "1", "RAYCOMM_TEST_SEED": "3", "RAYCOMM_BENCH_PROCESS": "3", "RAY_MAX_INFLIHGT": "1", "raycomm_name": "x"})


def test_a_misspelled_variable_is_warned_of_once(tmp_path: Path) -> None:
    script = tmp_path / "compiles.py"
    attempt = "    try:\n        raycomm.compile(1)\n    except raycomm.CompileError:\n        pass\n"
    script.write_text(f"import raycomm\nfor _ in range(3):\n{attempt}")
    environ = {**os.environ, "RAYCOMM_MAX_INFLIHGT": "4"}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("RAYCOMM_MAX_INFLIHGT") == 1, done.stderr


def test_rays_spellings() -> None:
    options = load(_submit_timeout=3, _max_inflight_executions=4, _max_buffered_results=5, _buffer_size_bytes=100)
    assert (options.submit_timeout, options.max_inflight, options.max_buffered_results, options.inline_bytes) == (3, 4, 5, 100)
    assert set(RAY_SPELLINGS.values()) <= set(DEFAULTS)
    # A buffer of Ray's is a whole channel's, and may be large; here it only bounds what stays inline.
    assert load(_buffer_size_bytes=1 << 30).inline_bytes == 1 << 20


@pytest.mark.parametrize(("rays", "plain"), RAY_SPELLINGS.items())
def test_an_option_in_both_spellings(rays: str, plain: str) -> None:
    with pytest.raises(CompileError, match=f"'{plain}' was given twice, also as '{rays}'"):
        load(**{rays: 100, plain: 100})


def test_unknown_options() -> None:
    with pytest.raises(CompileError, match="unknown option 'max_in_flight'") as caught:
        load(max_in_flight=3)
    assert "max_inflight" in str(caught.value)
    assert caught.value.argument == "max_in_flight"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_inflight", [0, -1, 4097, 1.0, "3", True, None]),
        ("max_buffered_results", [0, -1, (1 << 30) + 1, 2.5, None]),
        ("inline_bytes", [0, 63, (1 << 20) + 1, "1k", None]),
        ("shm_limit_bytes", [0, -1, (1 << 20) - 1, (1 << 46) + 1, 2.0e9, True]),
        ("submit_timeout", [-2, -0.1, float("nan"), "1", True]),
        ("get_timeout", [-2, -0.1, float("nan"), "1", True]),
        ("compile_timeout", [-2, -0.1, float("nan"), "1", True]),
        ("teardown_timeout", [-1, float("inf"), float("nan"), None, "1", True]),
        ("spin_us", [-1, float("inf"), float("nan"), None, "1"]),
        ("yield_us", [-1, float("inf"), float("nan"), None, "1"]),
        ("loop_thread", ["mine", "", None, 1]),
        ("device", ["cuda", "gpu", None, True]),
        ("stream_policy", ["links", None, 0]),
        ("max_links", [1, 0, 1025, 2.0, True, None]),
        ("overlap", [0, 1, "yes", None]),
        ("name", ["", 3, b"g"]),
    ],
)
def test_bad_values(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(CompileError) as caught:
            load(**{name: value})
        assert name in str(caught.value)
        assert repr(value) in str(caught.value)
        assert caught.value.argument == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_inflight", [1, 4096]),
        ("max_buffered_results", [1, 1 << 30]),
        ("inline_bytes", [64, 1 << 20]),
        ("shm_limit_bytes", [1 << 20, 1 << 46, None]),
        ("submit_timeout", [0, -1, None, 1e9, float("inf")]),
        ("teardown_timeout", [0, 0.0, 1e9]),
        ("spin_us", [0, 1e6]),
        ("name", ["g", "a name with \N{SNOWMAN}"]),
    ],
)
def test_values_at_the_edge(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(load(**{name: value}), name) == value


@pytest.mark.parametrize("value", [0, -1, 0.0, 2, 1e12, float("inf")])
def test_limits(value: Any) -> None:
    assert check_limit("timeout", value) == float(value)


@pytest.mark.parametrize("value", [-2, -0.5, -float("inf"), float("nan"), None, "1", True, False, [], 1j])
def test_no_limits(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout=.* is not a time limit: .* -1 or None for no limit"):
        check_limit("timeout", value)


def test_the_guide_has_every_option_and_every_error() -> None:
    """With the default that it has; and each error with the plain Python type it is too."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in guide.splitlines() if line.startswith("| `")]
    defaults = {row[0].strip("`"): row[2] for row in rows if len(row) == 5}
    assert defaults == {field.name: str(getattr(Options(), field.name)) for field in fields(Options)}
    told = {row[0].strip("`"): row[2] for row in rows if len(row) == 3 and row[0].strip("`").endswith("Error")}
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert set(told) == set(kinds) - {"RaycommError", "ChannelError"}
    for name, also in told.items():
        plain = [base.__name__ for base in kinds[name].__bases__ if base.__module__ == "builtins" and base is not Exception]
        assert plain == re.findall(r"`(\w+Error)`", also.split("Ray's")[0]), name
