"""Leaves a graph compiled under `install()` in the way its argument names, and says what it sees."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import ray
from ray.dag import InputNode, MultiOutputNode

import raycomm
from tests.ray.workers import Worker


def build(kind: str, **options: Any) -> tuple[Any, Any]:
    worker = Worker.options(
        **({"lifetime": "detached", "name": "left", "namespace": "here"} if kind == "shutdown" else {})
    ).remote()
    with InputNode() as inp:
        second = worker.hold.bind(inp, "/nowhere/gate") if kind == "interrupt" else worker.add.bind(inp)
        node = MultiOutputNode([worker.echo.bind(inp), second])
    return worker, node.experimental_compile(**options)


async def use(graph: Any) -> None:
    print([await future for future in await graph.execute_async(1)], flush=True)


def main(kind: str) -> None:
    raycomm.install()
    ray.init(log_to_driver=False, namespace="here")
    if kind == "asyncio":
        _, graph = build(kind, enable_asyncio=True)
        asyncio.run(use(graph))
        return
    worker, graph = build(kind)
    if kind == "interrupt":
        refs = graph.execute(1)
        print("executing", flush=True)
        ray.get(refs)
    print(ray.get(graph.execute(1)), flush=True)
    if kind == "shutdown":
        graph_of_ray = sys.modules["ray.dag.compiled_dag_node"]
        graph_of_ray._shutdown_all_compiled_dags()  # the first thing ray.shutdown does
        end = time.monotonic() + 60
        try:
            while time.monotonic() < end:  # Ray kills when it gets round to it
                ray.get(worker.echo.remote(1), timeout=60)
        except ray.exceptions.RayActorError:
            print("killed", graph.is_teardown, flush=True)
        ray.shutdown()


main(sys.argv[1])
