"""``python -m raycomm plan FILE:GRAPH``, on graphs of stand-ins for actors, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycomm.cli import DEADLOCK, NO_PLAN, main
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify

FILE = """
from raycomm import CompileError, InputNode, MultiOutputNode, bind
from raycomm.testing import stand_in
from nearby import Worker

a, b, c = stand_in(Worker, "A"), stand_in(Worker, "B"), stand_in(Worker)
with InputNode() as x:
    first = bind(a.forward, x).with_tensor_transport("auto")
    plain = b.forward.bind(first)

def hinted():
    value = a.forward.bind(InputNode()).with_tensor_transport("nccl", _static_shape=True)
    return b.forward.bind(value, scale=2)

def several():
    return MultiOutputNode(list(c.split.bind(InputNode())))

def star():
    first = bind(a.forward, InputNode()).with_tensor_transport("nccl")
    leaves = [bind(stand_in(Worker, f"L{index}").forward, first).with_tensor_transport("nccl") for index in range(3)]
    return bind(a.join, *leaves)

def circle():
    from raycomm import after
    x = InputNode()
    early, late = bind(a.forward, x), bind(b.forward, x)
    early.after(late)
    late.after(early)
    return MultiOutputNode([early, late])

def with_argument(x):
    return x

def broken():
    raise KeyError("no such thing")

def leaves():
    raise SystemExit(3)

def unbindable():
    return bind(a.forward, 1, 2, 3)

number = 5
if __name__ == "__main__":
    raise AssertionError("run as a script")
"""
NEARBY = """
class Worker:
    def forward(self, x, scale=1):
        raise AssertionError("called")
    def join(self, *parts):
        raise AssertionError("called")
    def split(self, x):
        raise AssertionError("called")
    split.__ray_num_returns__ = 2
"""


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """The command imports as a script does, which ends with its process; here it does not."""
    path, names = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - names:
        if name in ("nearby", "__raycomm_plan__"):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nearby.py").write_text(NEARBY)
    file = tmp_path / "pipeline.py"
    file.write_text(FILE)
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_a_plan_is_printed_and_checked(file: Path, run: Run) -> None:
    code, out, err = run(f"{file}:plain")
    assert (code, err) == (0, "")
    text, verdict = out.removesuffix("no deadlock\n"), out.splitlines()[-1]
    assert verdict == "no deadlock"
    verify(parse_plan(text))
    assert text.startswith('plan "pipeline"\n')
    assert 'channel 1 "A.forward#0" 1 -> 2 hint auto because "actor A: no device was named for it"' in text


@pytest.mark.parametrize(
    ("devices", "link"),
    [
        (["--devices", "A=gpu:0,B=gpu:1"], "link 0 1 -> 2 over nccl"),
        (["--devices", "A=cuda:0", "--devices", "B=gpu:1"], "link 0 1 -> 2 over nccl"),
        (["--devices", "B=gpu:1,*=gpu:0"], "link 0 1 -> 2 over nccl"),
        (["--devices", "*=gpu:0,B=gpu:1"], "link 0 1 -> 2 over nccl"),
        (["--devices", "simulated"], "link 0 1 -> 2 over simulated"),
        (["--devices", "A=simulated:5,B=simulated:6"], "link 0 1 -> 2 over simulated"),
    ],
)
def test_devices(file: Path, run: Run, devices: list[str], link: str) -> None:
    code, out, _ = run(f"{file}:hinted", *devices)
    assert code == 0
    assert link in out.splitlines()
    assert "transport device hint nccl static_shape yes" in out


@pytest.mark.parametrize("policy", ["link", "direction", "shared"])
def test_options_reach_the_passes(file: Path, run: Run, policy: str) -> None:
    devices = ("--devices", "A=gpu:0,L0=gpu:1,L1=gpu:2,L2=gpu:3")
    code, out, _ = run(f"{file}:star", *devices, "--stream-policy", policy, "--no-overlap", "--hardware-queues", "2")
    assert code == 0
    assert f"streams 1 {policy}" in out.splitlines()
    code, out, _ = run(f"{file}:star", *devices, "--stream-policy", policy, "--max-links", "2")
    assert code == 0
    fallen = "direction instead of link 4 links limit 2" if policy == "link" else policy
    assert f"streams 1 {fallen}" in out.splitlines()


def test_a_deadlock_is_printed_action_by_action(run: Run) -> None:
    """A plan written by hand, both of whose ranks send first: on one stream each waits for the other."""
    exchange = f"{Path(__file__).parents[2] / 'dags' / 'exchange.py'}:PLAN"
    code, out, err = run(exchange, "--stream-policy", "shared")
    assert code == DEADLOCK
    assert out.startswith('plan "exchange"\n')
    assert "no deadlock" not in out
    lines = err.splitlines()
    assert lines[0].startswith("deadlock")
    assert sorted(lines[1:3]) == [
        "  rank0: send 1 from r1 on link 0 stream 1 with rank1: r2 = recv 1 on link 0 stream 1",
        "  rank1: send 2 from r1 on link 1 stream 1 with rank0: r2 = recv 2 on link 1 stream 1",
    ]
    assert "stream policy 'link'" in lines[3]
    code, out, _ = run(exchange)
    assert code == 0
    assert "streams 1 link" in out.splitlines()


def test_streams_that_a_plan_has_are_left_to_it(file: Path, run: Run) -> None:
    exchange = (Path(__file__).parents[2] / "dags" / "exchange.py").read_text().partition('PLAN = """\\\n')[2].partition('"""')[0]
    shared = "".join(f"{line} stream 7\n" if " on link " in line else f"{line}\n" for line in exchange.splitlines())
    file.write_text(f"from raycomm.plan.text import parse_plan\nPLAN = parse_plan({shared!r})\n")
    assert "stream 7" in run(f"{file}:PLAN")[1]
    assert run(f"{file}:PLAN")[0] == DEADLOCK
    assert run(f"{file}:PLAN", "--stream-policy", "link")[0] == 0


def test_deadlocks_before_there_is_a_plan_and_of_channels(file: Path, run: Run) -> None:
    code, out, err = run(f"{file}:circle")
    assert (code, out) == (DEADLOCK, "")
    assert sorted(err.splitlines()[1:3]) == ["  A.forward", "  B.forward"]
    code, _, err = run(f"{file}:plain", "--slots", "0")
    assert code == DEADLOCK
    assert err.splitlines()[-1] == "give the channel at least one slot"


REFUSED = [
    ("{file}", [], "is not FILE:GRAPH"),
    ("{file}:", [], "is not FILE:GRAPH"),
    ("nowhere.py:plain", [], "there is no file 'nowhere.py'"),
    ("{nearby}/notes.txt:plain", [], "notes.txt' is not a Python file"),
    ("{nearby}/unreadable.py:plain", [], "SyntaxError"),
    ("{file}:nothing", [], "has no 'nothing'"),
    ("{file}:number", [], "compile takes a node, got a value of type int"),
    ("{file}:a", [], "compile takes a node, got a value of type StandIn"),
    ("{file}:with_argument", [], "TypeError: with_argument() missing 1 required positional argument: 'x'"),
    ("{file}:broken", [], "KeyError: 'no such thing' ("),
    ("{file}:leaves", [], "SystemExit: 3"),
    ("{file}:unbindable", [], "bind: A.forward(x, scale=1) was given (int, int, int): too many"),
    ("{file}:hinted", [], "actor A: no device was named for it, and actor B: no device was named for it; name one"),
    ("{file}:hinted", ["--devices", "A=gpu:0,B=cpu"], "actor B: it has no GPU"),
    ("{file}:hinted", ["--devices", "*=gpu:0"], "actors A and B share cuda:0"),
    ("{file}:hinted", ["--devices", "Z=gpu:0"], "'Z=gpu:0': give ACTOR=DEVICE with one of the actors A, B, or *"),
    ("{file}:hinted", ["--devices", "gpu:0"], "'gpu:0': give ACTOR=DEVICE"),
    ("{file}:hinted", ["--devices", "A=tpu:0"], "'tpu:0' is no device; give gpu:N, simulated:N or cpu"),
    ("{file}:hinted", ["--devices", "simulated", "--max-links", "1"], "max_links is 1"),
    ("{file}:plain", ["--hardware-queues", "0"], "--hardware-queues is 0; give at least 1"),
    ("{exchange}:PLAN", ["--devices", "simulated"], "--devices is for graphs"),
    ("{exchange}:__doc__", [], "plan text, line 1"),
]


@pytest.mark.parametrize(("target", "options", "says"), REFUSED)
def test_what_gives_no_plan_gives_one_line(file: Path, run: Run, target: str, options: list[str], says: str) -> None:
    (file.parent / "notes.txt").write_text("plain")
    (file.parent / "unreadable.py").write_text("def (:\n")
    exchange = Path(__file__).parents[2] / "dags" / "exchange.py"
    code, out, err = run(target.format(file=file, nearby=file.parent, exchange=exchange), *options)
    assert (code, out) == (NO_PLAN, "")
    assert err.startswith("raycomm plan: ")
    assert len(err.splitlines()) == 1
    assert says in err


def test_results_in_a_list_and_several_returns(file: Path, run: Run) -> None:
    code, out, _ = run(f"{file}:several")
    assert code == 0
    assert "r1, r2 = 0:split(r0)" in out
    assert "returns list" in out


def test_the_guide(tmp_path: Path, run: Run) -> None:
    """Its file gives what it says with the command that it shows."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    section = guide.partition("## The plan, before anything runs")[2].partition("## ")[0]
    (tmp_path / "pipeline.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    shown = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    command, *expected = [line for line in shown if line.startswith(("python -m", "channel", "link"))]
    target, *options = command.removeprefix("python -m raycomm plan ").split()
    code, out, _ = run(str(tmp_path / target), *options)
    assert code == 0
    assert len(expected) == 2
    assert set(expected) < set(out.splitlines())
    for option in ("--stream-policy", "--max-links", "--no-overlap", "--slots", "--hardware-queues"):
        assert f"`{option}`" in section


def test_as_a_command_without_ray_and_torch(file: Path) -> None:
    file.write_text(FILE + "\ndef loaded():\n    import sys\n    raise KeyError(sorted({'ray', 'torch'} & set(sys.modules)))\n")
    command = [sys.executable, "-m", "raycomm", "plan"]
    done = subprocess.run([*command, f"{file}:plain"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "no deadlock", "")
    done = subprocess.run([*command, f"{file}:loaded"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (NO_PLAN, "")
    assert "KeyError: []" in done.stderr
    done = subprocess.run([*command, f"{file}:plain", "--stream-policy", "none"], capture_output=True, text=True, timeout=60)
    assert done.returncode == NO_PLAN
    assert "choose from" in done.stderr
