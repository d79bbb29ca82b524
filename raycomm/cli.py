"""Commands: ``python -m raycomm plan FILE:GRAPH`` prints what a graph becomes and whether it can deadlock, without running it.

    python -m raycomm plan pipeline.py:graph
    python -m raycomm plan pipeline.py:graph --devices W1=gpu:0,W2=gpu:1 --stream-policy direction
    python -m raycomm plan pipeline.py:build --devices simulated --no-overlap

GRAPH is a variable of the file, or a function in it without arguments that gives: a node, a list of results (`MultiOutputNode`),
or a plan, as an object or as its text. Actors may be stand-ins, see `raycomm.testing.stand_in`. Exits with 0 where the plan is
free of deadlocks, 1 where it is not, 2 where there is no plan.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import raycomm
from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.build import build
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Missing, Place
from raycomm.plan.streams import DEFAULT_MAX_LINKS, assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Recv, Send
from raycomm.plan.verify import verify

DEADLOCK = 1
NO_PLAN = 2

# What the file is called while it runs: not "__main__", so that what it does as a script it does not do here.
_MODULE = "__raycomm_plan__"

_NOT_NAMED = Missing("no device was named for it", "name one, for instance --devices W1=gpu:0,W2=gpu:1, or use 'auto' or 'shm'")


class _Refusal(Exception):
    """One line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        plan = _planned(_load(options.target), options)
        print(plan, end="")
        verify(plan, slots=options.slots, hardware_queues=options.hardware_queues)
    except DeadlockError as error:
        steps = "\n".join(f"  {step}" for step in error.cycle)
        print(f"deadlock, each waits for the one before it and the first for the last:\n{steps}\n{error.remedy}", file=sys.stderr)
        return DEADLOCK
    except (CompileError, _Refusal) as error:
        print(f"raycomm plan: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_PLAN
    print("no deadlock")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m raycomm", description="Static graphs of Ray actor method calls.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="print the plan of a graph, and check that it cannot deadlock")
    plan.add_argument("target", metavar="FILE:GRAPH", help="a Python file, and a variable or function of it")
    plan.add_argument(
        "--devices",
        action="append",
        default=[],
        metavar="ACTOR=DEVICE,...",
        help="what actors have: gpu:N, simulated:N or cpu, by the name that the plan gives the actor, or * for all others; "
        "'simulated' alone: each actor a simulated device of its own",
    )
    plan.add_argument(
        "--stream-policy",
        choices=[str(policy) for policy in StreamPolicy],
        help="which operations of a device share a stream; without it 'link', or the streams that a plan has",
    )
    plan.add_argument("--max-links", type=int, default=DEFAULT_MAX_LINKS, help="links of a device that get streams of their own")
    plan.add_argument("--no-overlap", action="store_true", help="leave receives in the order of the calls that they are from")
    plan.add_argument("--slots", type=int, default=1, help="messages that a channel holds which does not say so itself")
    plan.add_argument("--hardware-queues", type=int, help="queues of a device; without it, each stream has its own")
    return parser


def _planned(given: object, options: argparse.Namespace) -> Plan:
    """The plan of what the file holds."""
    if options.hardware_queues is not None and options.hardware_queues < 1:
        raise _Refusal(f"--hardware-queues is {options.hardware_queues}; give at least 1")
    policy = StreamPolicy(options.stream_policy or StreamPolicy.LINK)
    if isinstance(given, str):
        given = parse_plan(given)
    if isinstance(given, Plan):
        if options.devices:
            raise _Refusal("--devices is for graphs; a plan says itself what moves between devices")
        complete = all(action.stream is not None for action in _transfers(given))
        keeps = complete and options.stream_policy is None
        return given if keeps else assign_streams(given, policy, max_links=options.max_links)
    # Ray's nodes are read where the file uses them, and Ray is not loaded where it does not.
    adapter = raycomm._ray_dag()[0] if "ray.dag" in sys.modules else None
    graph = build(given, adapter)
    plan = lower(graph, Path(options.target.rpartition(":")[0]).stem)
    return on_devices(
        plan,
        graph,
        _places(plan, options.devices),
        policy=policy,
        max_links=options.max_links,
        hardware_queues=options.hardware_queues,
        early_receives=not options.no_overlap,
    )


def _transfers(plan: Plan) -> Iterator[Send | Recv]:
    return (action for actor in plan.actors for action in actor.actions if isinstance(action, (Send, Recv)))


def _load(target: str) -> Any:
    """What `target`, FILE:GRAPH, names."""
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise _Refusal(f"{target!r} is not FILE:GRAPH, such as pipeline.py:graph")
    path = Path(file)
    if not path.is_file():
        raise _Refusal(f"there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise _Refusal(f"{file!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script
    sys.modules[_MODULE] = module
    _run(file, spec.loader.exec_module, module)
    if not hasattr(module, name):
        raise _Refusal(f"{file!r} has no {name!r}")
    value = getattr(module, name)
    return _run(target, value) if callable(value) else value


def _run(what: str, function: Any, *arguments: object) -> Any:
    """What code of the user's gives."""
    try:
        return function(*arguments)
    except CompileError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({at.filename}, line {at.lineno})" if at.filename != __file__ else ""
        raise _Refusal(f"{what} fails: {type(error).__name__}: {error}{where}") from error


def _places(plan: Plan, given: Sequence[str]) -> dict[int, Place]:
    """What each actor has, by the index of its process."""
    labels = {process.label: process.index for process in plan.processes[1:]}
    entries = [entry.strip() for text in given for entry in text.split(",") if entry.strip()]
    if entries == ["simulated"]:
        return {index: Place.simulated(f"simulated:{index - 1}") for index in labels.values()}
    places = dict.fromkeys(labels.values(), Place.cpu(_NOT_NAMED))
    # The entry for all others first, wherever it stands.
    for entry in sorted(entries, key=lambda entry: not entry.startswith("*=")):
        label, separator, device = entry.rpartition("=")
        if not separator or (label != "*" and label not in labels):
            raise _Refusal(f"--devices {entry!r}: give ACTOR=DEVICE with one of the actors {', '.join(labels)}, or *")
        for index in labels.values() if label == "*" else (labels[label],):
            places[index] = _place(entry, device)
    return places


def _place(entry: str, device: str) -> Place:
    kind, _, number = device.partition(":")
    if device == "cpu":
        return Place.cpu()
    if number.isdecimal() and kind in ("gpu", "cuda"):
        return Place.gpu(f"cuda:{number}", device.replace("gpu", "cuda"))
    if number.isdecimal() and kind == "simulated":
        return Place.simulated(device)
    raise _Refusal(f"--devices {entry!r}: {device!r} is no device; give gpu:N, simulated:N or cpu")
