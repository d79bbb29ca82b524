"""An actor's ends of the links of a graph: where they meet, set-up with a limit, and an end that ends all waits.

A link is warmed up before its actor says that it is ready, so no call of the running graph blocks for set-up. All actors take
the links in the plan's order; whoever waits for the other end of one waits for somebody who is at it, or at an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from raycomm.channel import Deadline
from raycomm.device import Communicator, Device
from raycomm.errors import CommunicatorError
from raycomm.plan import Link, Plan
from raycomm.plan.transfer import Backend

_ABORT_S = 1.0
_SET_UP_S = 60.0


@contextmanager
def meeting_point(plan: Plan) -> Iterator[tuple[str, int] | None]:
    """In the driver, while the graph is set up: a store that all actors reach, by host and port; None if no link needs one."""
    if not any(link.over is Backend.GLOO for link in plan.links):
        yield None
        return
    import torch.distributed

    distributed: Any = torch.distributed  # Its type stubs leave this out.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port


class Links:
    """The ends of one actor, by the links' numbers. A context manager: on the way out all of them are aborted.

    Args:
        plan: has the links.
        process: the actor's index in it.
        meeting: from `meeting_point`.
    """

    def __init__(self, plan: Plan, process: int, meeting: tuple[str, int] | None) -> None:
        self._plan = plan
        self._process = process
        self._mine = [link for link in plan.links if process in (link.writer, link.reader)]
        self._ends: dict[int, Communicator] = {}
        self._device: Device | None = None
        self._meeting = meeting

    def warm_up(self, limit_s: float | None) -> None:
        """Make all ends and meet the others. Blocks; None: for a minute at most.

        Raises:
            RankMissingError: the other end of a link did not come. CommunicatorError: it cannot be made.
            ImportError: what it is made of is not installed here.
        """
        deadline = Deadline(_SET_UP_S if limit_s is None else limit_s)
        store: Any = None
        for link in self._mine:
            if link.over is not Backend.GLOO:
                raise CommunicatorError(f"{link} of graph {self._plan.name!r}: nothing here carries tensors over {link.over}")
            import torch.distributed

            from raycomm.device.cpu import CpuDevice
            from raycomm.device.gloo import GlooCommunicator

            if store is None:
                assert self._meeting is not None
                distributed: Any = torch.distributed
                store = distributed.TCPStore(*self._meeting, is_master=False, wait_for_workers=False)
                self._device = CpuDevice(f"cpu of {self._plan.processes[self._process].label}")
            assert isinstance(self._device, CpuDevice)
            name = f"link {link.id} of graph {self._plan.name!r}"
            end = GlooCommunicator(store, name, self._rank(link), 2, device=self._device)
            self._ends[link.id] = end
            end.warm_up(deadline.left(at_most=_SET_UP_S))

    def end(self, link: int) -> tuple[Communicator, int]:
        """This actor's end of a link, and the rank of the other one."""
        end = self._ends[link]
        return end, 1 - end.rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends.values():
            end.abort(_ABORT_S)
        self._ends.clear()

    def _rank(self, link: Link) -> int:
        return 0 if link.writer == self._process else 1
