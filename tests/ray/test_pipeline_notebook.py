"""The notebook runs as it stands, and a cell that waits for a result can be interrupted and run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "dags" / "pipeline.ipynb"
CELL_LIMIT_S = 120

pytestmark = pytest.mark.timeout(300)


def test_the_notebook_is_valid_and_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_notebook_runs_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute()  # raises CellExecutionError with the traceback of a failing cell
    printed = "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "executions per second" in printed
    assert "all 64 results are right" in printed


class Kernel:
    """A running kernel that cells are sent to one by one."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager = manager
        self._client = client

    def start(self, source: str) -> str:
        """Sends a cell and returns its message id without waiting for it."""
        message: str = self._client.execute(source)
        return message

    def printed(self, message: str, wanted: str) -> None:
        """Waits until the running cell has printed `wanted`."""
        text = ""
        while wanted not in text:
            received = self._client.get_iopub_msg(timeout=CELL_LIMIT_S)
            if received["parent_header"].get("msg_id") == message and received["msg_type"] == "stream":
                text += received["content"]["text"]

    def finish(self, message: str) -> dict[str, Any]:
        """The reply to a cell: its `status` is "ok" or "error", and then `ename` names the exception."""
        while True:
            reply = self._client.get_shell_msg(timeout=CELL_LIMIT_S)
            if reply["parent_header"].get("msg_id") == message:
                content: dict[str, Any] = reply["content"]
                return content

    def run(self, source: str) -> None:
        reply = self.finish(self.start(source))
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(startup_timeout=CELL_LIMIT_S, kernel_name="python3", cwd=str(ROOT))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        # Ray's own processes end with the process that started them.
        manager.shutdown_kernel(now=True)


SET_UP = """
import pathlib, time
import ray, raycomm
from raycomm import InputNode

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Gate:
    def pass_on(self, value, path={path!r}):
        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        return value + 1

first, second = Gate.remote(), Gate.remote()
with InputNode() as value:
    graph = raycomm.compile(second.pass_on.bind(first.pass_on.bind(value)))
ref = graph.execute(1)
"""

WAIT = """
print("waiting", flush=True)
result = ref.get()
"""


def test_an_interrupted_cell_can_be_run_again(kernel: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    kernel.run(SET_UP.format(path=str(gate)))

    waiting = kernel.start(WAIT)
    kernel.printed(waiting, "waiting")
    kernel.manager.interrupt_kernel()
    reply = kernel.finish(waiting)
    assert (reply["status"], reply.get("ename")) == ("error", "KeyboardInterrupt")

    # The interrupt reached the waiting only: the execution is still under way and its result can be fetched.
    gate.touch()
    kernel.run(WAIT)
    kernel.run("assert result == 3, result")
    # And the graph goes on with further ones.
    kernel.run("assert [ref.get() for ref in [graph.execute(number) for number in range(5)]] == [2, 3, 4, 5, 6]")
    kernel.run("graph.teardown()")
    kernel.run("ray.shutdown()")
