"""A pipeline of four stages on four actors: InputNode -> W1 -> W2 -> W3 -> W4, each a small torch module on the CPU.

    python -m dags.pipeline --executions 64 --in-flight 8

Several executions are under way at once, so all stages work at the same time, each on another batch. Every result is
compared with the same computation done in this process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import ray
import torch
import typer

import raycomm
from raycomm import InputNode

STAGES = 4


def make_stage(index: int, width: int) -> torch.nn.Module:
    """The module of one stage; the same index gives the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()).eval()


@ray.remote(num_cpus=0)  # the machine may have fewer cores than the pipeline has stages
class Worker:
    """Holds one stage and runs batches through it."""

    def __init__(self, index: int, width: int) -> None:
        self.stage = make_stage(index, width)

    @torch.inference_mode()
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """`(batch, width)` in, `(batch, width)` out."""
        result: torch.Tensor = self.stage(batch)
        return result


def build(workers: Sequence[Any]) -> Any:
    """The graph: the input passes the workers in order."""
    with InputNode() as batch:
        value: Any = batch
        for worker in workers:
            value = worker.forward.bind(value)
    return value


def run(graph: Any, batches: Sequence[torch.Tensor], in_flight: int) -> list[torch.Tensor]:
    """Executes the graph on each batch, `in_flight` at a time, and returns the results in order."""
    results: list[torch.Tensor] = []
    pending: deque[Any] = deque()
    for batch in batches:
        if len(pending) == in_flight:
            results.append(pending.popleft().get())
        pending.append(graph.execute(batch))
    results.extend(ref.get() for ref in pending)
    return results


def main(
    executions: Annotated[int, typer.Option(min=1, help="How many batches to send.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 16,
    width: Annotated[int, typer.Option(min=1, help="Columns of a batch: the width of each layer.")] = 256,
    in_flight: Annotated[int, typer.Option(min=1, help="Executions under way at once.")] = 8,
) -> None:
    """Runs the pipeline, checks every result and prints the throughput."""
    # A cluster of its own, or, as a job (`ray job submit`), the cluster that runs the job.
    address = os.environ.get("RAY_ADDRESS", "local")
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, **own)
    try:
        workers = [Worker.remote(index, width) for index in range(STAGES)]  # type: ignore[attr-defined]  # added by Ray
        local = torch.nn.Sequential(*(make_stage(index, width) for index in range(STAGES)))
        batches = [torch.randn(batch, width) for _ in range(executions)]

        with raycomm.compile(build(workers), max_inflight=in_flight) as graph:  # torn down at the end of the block
            run(graph, batches[:1], in_flight=1)  # the first execution pays for what is set up once
            start = time.perf_counter()
            results = run(graph, batches, in_flight)
            seconds = time.perf_counter() - start

        with torch.inference_mode():
            # Not torch.equal: another number of threads may add in another order.
            correct = [torch.allclose(got, local(sent), atol=1e-5) for sent, got in zip(batches, results, strict=True)]
        for number, right in enumerate(correct):
            print(f"execution {number:3}: {'ok' if right else 'WRONG'}")
        print(f"{executions} executions in {seconds:.3f} s: {executions / seconds:,.0f} per second")
        if not all(correct):
            raise typer.Exit(1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
