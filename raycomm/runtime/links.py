"""An actor's ends of the links of a graph: where they meet, set-up that looks at the graph, and an end that ends all waits.

A link is warmed up before its actor says that it is ready, so no call of the running graph blocks for set-up. All actors take
the links in the plan's order; whoever waits for the other end of one waits for somebody who is at it, or at an earlier one.
Set-up has no limit of its own: the driver has one, `compile_timeout`, and closes the graph when it passes.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from raycomm.channel import Deadline
from raycomm.device import Communicator
from raycomm.errors import CommunicatorError, CompileError
from raycomm.plan import Link, Plan
from raycomm.plan.transfer import Backend

_ABORT_S = 1.0
_LOOK_EVERY_S = 0.05
_ALWAYS_S = 365 * 86400.0
# What stands in for GPUs lies in host memory, and moves as such.
_BY_GLOO = (Backend.GLOO, Backend.SIMULATED)
_NEEDS_TORCH = "pip install torch"


class Meeting(NamedTuple):
    """A store that all actors of a graph reach, and what tells its graph from others that the port may belong to later."""

    host: str
    port: int
    nonce: str


@contextmanager
def meeting_point(plan: Plan) -> Iterator[Meeting | None]:
    """In the driver, while the graph is set up: a store that listens on the loopback device; None if no link needs one.

    Raises:
        CompileError: torch, which has the store, is not installed.
    """
    if not any(link.over in _BY_GLOO for link in plan.links):
        yield None
        return
    try:
        import torch.distributed
    except ImportError as error:
        text = (
            f"graph {plan.name!r} moves tensors over gloo, and torch cannot be imported in the driver ({error}); {_NEEDS_TORCH}"
        )
        raise CompileError(text, remedy=_NEEDS_TORCH) from error
    distributed: Any = torch.distributed  # Its type stubs leave this out.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        # Given a name only, the store would listen on every interface.
        descriptor = listening.detach()
    store = distributed.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    try:
        yield Meeting(host, port, secrets.token_hex(16))
    finally:
        del store


class Links:
    """The ends of one actor, by the links' numbers. False where it has none.

    Args:
        plan: has the links.
        process: the actor's index in it.
        meeting: from `meeting_point`.
    """

    def __init__(self, plan: Plan, process: int, meeting: Meeting | None) -> None:
        self._plan = plan
        self._process = process
        self._mine = [link for link in plan.links if process in (link.writer, link.reader)]
        self._ends: dict[int, Communicator] = {}
        self._device: Any = None
        self._meeting = meeting

    def __bool__(self) -> bool:
        return bool(self._mine)

    def warm_up(self, look: Callable[[], None]) -> None:
        """Make all ends and meet the others. Blocks for as long as the driver waits.

        Args:
            look: raises `_core.Closed` if the graph has ended. Not kept: it knows the memory of the graph.

        Raises:
            CommunicatorError: a link cannot be made; says which, and between whom.
            raycomm._core.Closed: the graph has ended meanwhile.
        """
        store: Any = None
        for link in self._mine:
            if link.over not in _BY_GLOO:
                raise CommunicatorError(f"{self._text(link)}: nothing here carries tensors over {link.over}")
            store = store or self._while_looking(look, self._connect, link)
            end = self._end_over_gloo(link, store)
            self._ends[link.id] = end
            self._while_looking(look, partial(end.warm_up, _ALWAYS_S), link)

    def end(self, link: int) -> tuple[Communicator, int]:
        """This actor's end of a link, and the rank of the other one."""
        end = self._ends[link]
        return end, 1 - end.rank

    def close(self) -> None:
        """Abort all ends, and with them every transfer under way. Blocks for a second at most. Repeated calls do nothing."""
        ends, self._ends = list(self._ends.values()), {}
        threads = [
            threading.Thread(target=end.abort, args=(_ABORT_S,), name=f"raycomm abort {end.name}", daemon=True) for end in ends
        ]
        deadline = Deadline(_ABORT_S)
        started = []
        for thread in threads:
            with suppress(RuntimeError):  # no more threads: the others are aborted all the same
                thread.start()
                started.append(thread)
        for thread in started:
            thread.join(deadline.left())
        if self._device is not None:
            self._device.close()
            self._device = None

    def _connect(self) -> Any:
        import torch.distributed

        assert self._meeting is not None
        distributed: Any = torch.distributed
        store = distributed.TCPStore(self._meeting.host, self._meeting.port, is_master=False, wait_for_workers=False)
        return distributed.PrefixStore(self._meeting.nonce, store)

    def _end_over_gloo(self, link: Link, store: Any) -> Communicator:
        from raycomm.device.cpu import CpuDevice
        from raycomm.device.gloo import GlooCommunicator

        self._device = self._device or CpuDevice(f"cpu of {self._label(self._process)}")
        rank = 0 if link.writer == self._process else 1
        return GlooCommunicator(store, self._text(link), rank, 2, device=self._device)

    def _while_looking(self, look: Callable[[], None], work: Callable[[], Any], link: Link) -> Any:
        """What `work` gives. It runs in a thread that is left behind if the graph ends first: its own limits are minutes."""
        done: list[Any] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:
                failed.append(error.with_traceback(None))

        thread = threading.Thread(target=run, name=f"raycomm set-up {self._plan.name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_EVERY_S)
            look()
        if done:
            return done[0]
        error = failed[0]
        if isinstance(error, ImportError):
            who = self._label(self._process)
            raise CommunicatorError(f"{self._text(link)}: torch cannot be imported by {who} ({error}); {_NEEDS_TORCH}") from None
        if isinstance(error, CommunicatorError):
            raise error
        raise CommunicatorError(f"{self._text(link)} cannot be set up: {type(error).__name__}: {error}") from None

    def _text(self, link: Link) -> str:
        return f"link {link.id} of graph {self._plan.name!r} from {self._label(link.writer)} to {self._label(link.reader)}"

    def _label(self, process: int) -> str:
        return self._plan.processes[process].label
