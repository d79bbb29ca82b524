"""Runs a graph while everything that leaves with Ray's Compiled Graphs is refused to raycomm, in the driver and in the actors.

`ray.dag`, `ray.experimental` and the ref class are refused to importers inside raycomm only: Ray itself needs them. Ray's three
channel exceptions are hidden while raycomm is imported.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import sys
from typing import Any

import ray
import ray.exceptions

REFUSED = ("ray.dag", "ray.experimental")
HIDDEN = ("RayChannelError", "RayChannelTimeoutError", "RayCgraphCapacityExceeded")


def load_raycomm_without() -> list[str]:
    """Import raycomm's modules under the block; returns what it tried to import in vain."""
    asked: list[str] = []
    original = builtins.__import__

    def refuse(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = (globals or {}).get("__name__", "") or ""
        names = [name, *(f"{name}.{part}" for part in fromlist or ())]
        if importer.split(".")[0] == "raycomm" and any(f"{full}.".startswith(f"{bad}.") for full in names for bad in REFUSED):
            asked.append(f"{importer}: {name}")
            raise ImportError(f"{name} is refused to {importer}")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = refuse
    assert not any(module.startswith("raycomm") for module in sys.modules), "too late"
    hidden = {name: getattr(ray.exceptions, name) for name in HIDDEN}
    for name in HIDDEN:
        delattr(ray.exceptions, name)
    try:
        for module in ("raycomm", "raycomm.runtime.compile", "raycomm.runtime.setup", "raycomm.runtime.loop"):
            importlib.import_module(module)
    finally:
        for name, value in hidden.items():
            setattr(ray.exceptions, name, value)
    return asked


@ray.remote(num_cpus=0)
class Worker:
    """Blocks the same in its own process, before raycomm is first imported there."""

    def __init__(self) -> None:
        self.asked = load_raycomm_without()

    def double(self, x: Any) -> Any:
        return 2 * x

    def fail(self, x: Any) -> Any:
        raise ValueError(f"bad {x}")

    def what_was_asked(self) -> list[str]:
        return self.asked

    def loaded(self) -> list[str]:
        return [name for name in sys.modules if name.startswith("raycomm.ray_dag")]


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    asked = load_raycomm_without()
    import raycomm
    from raycomm.runtime.refs import Ref

    a, b = Worker.remote(), Worker.remote()
    with raycomm.InputNode() as x:
        out = raycomm.bind(b.double, raycomm.bind(a.double, x))
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(20)]
        assert all(type(ref) is Ref for ref in refs)
        assert [ref.get(timeout=60) for ref in refs] == [4 * value for value in range(20)]

        async def wait() -> Any:
            return await graph.execute(5)

        assert asyncio.run(wait()) == 20
    try:
        graph.execute(1)
    except raycomm.ChannelClosedError as error:
        assert not isinstance(error, ray.exceptions.RayChannelError)
    with raycomm.InputNode() as x:
        out = raycomm.bind(b.double, raycomm.bind(a.fail, x))
    with raycomm.compile(out, max_inflight=1) as graph:
        try:
            graph.execute(3).get(timeout=60)
        except ValueError as error:
            assert isinstance(error, ray.exceptions.RayTaskError)
            assert "bad 3" in str(error)
        else:
            raise AssertionError("no error")
    assert ray.get([a.loaded.remote(), b.loaded.remote()]) == [[], []]
    # The only one to ask was the adapter, which `raycomm.compile` then went on without.
    asked += [entry for worker in (a, b) for entry in ray.get(worker.what_was_asked.remote())]
    assert asked
    assert all(entry.startswith("raycomm.ray_dag.") for entry in asked), asked
    # A node of ray.dag is a plain constant now, and refused as one.
    from ray.dag import InputNode as RayInputNode

    try:
        raycomm.compile(a.double.bind(RayInputNode()))
    except raycomm.CompileError as error:
        assert "compile takes a node" in str(error)
    else:
        raise AssertionError("no error")
    ray.shutdown()
    print("well")


main()
