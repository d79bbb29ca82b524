"""An actor's ends of links and groups: where they meet, set-up that looks at the graph, and an end that ends all waits.

A link is warmed up before its actor says that it is ready, so no call of the running graph blocks for set-up. All actors take
the links in the plan's order; whoever waits for the other end of one waits for somebody who is at it, or at an earlier one.
Set-up has no limit of its own: the driver has one, `compile_timeout`, and closes the graph when it passes.

A link over NCCL that fails is aborted, and what waits for its transfers on the device goes on with memory that nothing has come
into. What is computed from that is to reach nobody. So the graph is ended first, at the driver and the neighbours, and then all
that this actor sends on is aborted. Whoever has it all the same looks, before anything leaves the devices, whether the graph has
ended (`transfers`).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from raycomm.channel import Deadline
from raycomm.device import Communicator
from raycomm.errors import CommunicatorError, CompileError
from raycomm.observe.notice import FIRST_NOTICE_S, NEXT_NOTICE_S
from raycomm.plan.actions import Plan
from raycomm.plan.transfer import Backend, Group, Link, OwnBackend
from raycomm.runtime.own_end import OwnEnd
from raycomm.runtime.step import Step

if TYPE_CHECKING:
    from raycomm.runtime.ray_communicator import RayCommunicator

logger = logging.getLogger("raycomm")

_ABORT_S = 1.0
_LOOK_EVERY_S = 0.05
_ALWAYS_S = 365 * 86400.0
# What stands in for GPUs lies in host memory, and moves as such.
_BY_GLOO = (Backend.GLOO, Backend.SIMULATED)
_FIRST_S = 0.05  # how long what is aborted first has until the rest is
_WATCH_EVERY_S = 0.5
_TELL_AFTER_S = 0.5
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
    if not (plan.links or plan.groups):
        yield None
        return
    try:
        import torch.distributed
    except ImportError as error:
        text = (
            f"graph {plan.name!r} has links, whose ends meet in a store of torch's, and torch cannot be imported in the driver "
            f"({error}); {_NEEDS_TORCH}"
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
    """The ends of one actor, of links and groups. False where it has none.

    Args:
        plan: has the links.
        process: the actor's index in it.
        meeting: from `meeting_point`.
        device: the GPU to use, such as ``cuda:0``; None: the one that torch uses on this thread.
        communicators: that the user brought, classes or objects of Ray's, by number.

    Attributes:
        late: what may not have arrived that a call was given, and for how many seconds that call runs; set by whoever knows.
    """

    def __init__(
        self,
        plan: Plan,
        process: int,
        meeting: Meeting | None,
        device: str | None = None,
        communicators: Sequence[Any] = (),
    ) -> None:
        self._plan = plan
        self._process = process
        parts: list[Link | Group] = [*plan.links, *plan.groups]
        self._mine = [part for part in parts if process in _ranks(part)]
        # Whoever is a member of one is waited for in its set-up, whether or not anything goes to it here.
        self._joined = {part.over for part in parts if isinstance(part.over, OwnBackend) and process in part.over.ranks}
        self._whole: dict[OwnBackend, RayCommunicator] = {}
        self._communicators = communicators
        self._ends: dict[Link | Group, Communicator] = {}
        self._devices: dict[Callable[..., Any], Any] = {}  # by what makes them
        self._meeting = meeting
        self._gpu = device
        self._failing = threading.Lock()
        self._failed = False
        self._first: frozenset[Link | Group | None] = frozenset()  # what is aborted before what has failed
        self._end: Callable[[CommunicatorError], None] | None = None
        self.late: Callable[[], tuple[float, str] | None] = _nothing
        self._look: Callable[[], None] | None = None  # during set-up
        self._tell: Callable[[str], None] = _tell_nobody

    def __bool__(self) -> bool:
        return bool(self._mine)

    @property
    def on_streams(self) -> bool:
        """Whether code of this thread runs on streams of a device that has links."""
        return any(end.device.current_stream() is not None for end in self._ends.values())

    def warm_up(self, look: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Make all ends and meet the others. Blocks for as long as the driver waits.

        Args:
            look: raises `_core.Closed` if the graph has ended. Not kept, as `tell`: they know the memory of the graph.
            tell: called with what takes long. Does not block.

        Raises:
            CommunicatorError: a link cannot be made; says which, and between whom.
            raycomm._core.Closed: the graph has ended meanwhile.
        """
        self._look, self._tell = look, tell
        try:
            for own in sorted(self._joined, key=lambda own: own.number):
                rank = own.ranks.index(self._process)
                # Made on this thread, which knows the actor's GPU. To be destroyed, too, if `initialize` fails.
                self._while_looking(self._join(own, rank).initialize, f"initialize({rank}) of {self._name(own)}")
            store: Any = None
            for part in self._mine:
                store = store or self._while_looking(self._connect, self._text(part))
                ranks = _ranks(part)
                make = partial(self._end_over(part), part, store, ranks.index(self._process), len(ranks))
                if isinstance(part.over, OwnBackend):  # code of the user's, which may take its time
                    own_text = f"{part.over.name}(...) for {self._text(part)}"
                    end = self._while_looking(make, own_text, lambda late: late.abort(_ABORT_S))
                else:
                    end = make()
                self._ends[part] = end
                self._while_looking(partial(end.warm_up, _ALWAYS_S), f"warm_up of {self._text(part)}")
        finally:
            self._look, self._tell = None, _tell_nobody

    def end(self, link: int) -> tuple[Communicator, int]:
        """This actor's end of a link, and the rank of the writer, or at the writer that of the first reader."""
        end = self._ends[self._plan.links[link]]
        return end, 0 if end.rank else 1

    def member(self, group: int) -> Communicator:
        """This actor's end of a group."""
        return self._ends[self._plan.groups[group]]

    def close(self) -> None:
        """Abort all ends, and with them every transfer under way. Blocks for a second at most. Repeated calls do nothing."""
        ends = self._senders_first()
        self._failed = True  # as far as others are concerned: the graph has ended
        self._ends = {}
        self.late = _nothing
        self._abort(ends, _ABORT_S)
        deadline = Deadline(_ABORT_S)
        for whole in self._whole.values():
            whole.destroy(deadline.left())
        self._whole.clear()
        for device in self._devices.values():
            device.close()
        self._devices.clear()

    def _abort(self, ends: list[Communicator], limit_s: float) -> None:
        """Side by side. Blocks for `limit_s` seconds at most."""
        threads = [
            threading.Thread(target=end.abort, args=(limit_s,), name=f"raycomm abort {end.name}", daemon=True) for end in ends
        ]
        deadline = Deadline(limit_s)
        started = []
        for thread in threads:
            with suppress(RuntimeError):  # no more threads: the others are aborted all the same
                thread.start()
                started.append(thread)
        for thread in started:
            thread.join(deadline.left())

    @contextmanager
    def watched(self, look: Callable[[], None], end: Callable[[CommunicatorError], None]) -> Iterator[None]:
        """Inside, a thread looks now and then, and aborts all ends once the graph has ended or one of them has failed: this one
        may wait in the device's driver, and nothing else ends that. It also says in the log what is late. Only where code runs on
        streams; and over communicators that the user brought, of which nobody else notices that a send has failed.

        Args:
            look: see `warm_up`.
            end: ends the graph, for the reason given; called, by any thread, when an end has failed and before it is aborted.
        """
        if not (self.on_streams or any(isinstance(part.over, OwnBackend) for part in self._mine)):
            yield
            return
        ended = threading.Event()
        self._end = end

        def watch() -> None:
            told_s = 0.0
            while not ended.wait(_WATCH_EVERY_S):
                try:
                    late_s, what = self.late() or (0.0, "")
                    if late_s >= max(FIRST_NOTICE_S, told_s + NEXT_NOTICE_S):
                        logger.warning("graph %r: for %.0f s %s", self._plan.name, late_s, what)
                        told_s = late_s
                    elif late_s < told_s:
                        told_s = 0.0
                    look()
                    for end in self._senders_first():
                        end.poll()
                except Exception as error:  # whatever it is: nobody else ends the waits of this actor
                    text = f"links cannot be watched: {error!r}"
                    self._fail(None, error if isinstance(error, CommunicatorError) else CommunicatorError(text))
                    self._abort(self._senders_first(), 0.0)
                    return

        watcher = threading.Thread(target=watch, name=f"raycomm links {self._plan.name}", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(_ABORT_S)
            self._end = None

    def _fail(self, failed: Link | Group | None, error: CommunicatorError) -> None:
        """Before an end that has failed is aborted: end the graph, and abort all others that this actor sends on. Once; whoever
        calls it meanwhile for an end that is not one of those waits until that is done."""
        if failed in self._first:
            return
        with self._failing:
            if self._failed:
                return
            self._failed = True
            if self._end is not None:
                self._end(error)
            first = {part: end for part, end in dict(self._ends).items() if self._sends_on(part) and part != failed}
            self._first = frozenset(first)
            self._abort(list(first.values()), _FIRST_S)

    def _senders_first(self) -> list[Communicator]:
        ends = dict(self._ends)
        return [ends[part] for part in sorted(ends, key=lambda part: not self._sends_on(part))]

    def _sends_on(self, part: Link | Group) -> bool:
        return isinstance(part, Group) or part.writer == self._process

    def _connect(self) -> Any:
        import torch.distributed

        assert self._meeting is not None
        distributed: Any = torch.distributed
        store = distributed.TCPStore(self._meeting.host, self._meeting.port, is_master=False, wait_for_workers=False)
        return distributed.PrefixStore(self._meeting.nonce, store)

    def _end_over(self, part: Link | Group) -> Callable[[Any, Any, int, int], Communicator]:
        """What makes an end over what carries it."""
        if isinstance(part.over, OwnBackend):
            return self._end_over_own
        return self._end_over_gloo if part.over in _BY_GLOO else self._end_over_nccl

    def _join(self, own: OwnBackend, rank: int) -> RayCommunicator:
        from raycomm.runtime.ray_communicator import RayCommunicator

        whole = RayCommunicator(self._communicators[own.number], rank, self._name(own), self._gpu)
        self._whole[own] = whole
        return whole

    def _end_over_own(self, part: Link | Group, store: Any, rank: int, size: int) -> Communicator:
        own = part.over
        assert isinstance(own, OwnBackend)
        if own.ranks:
            return self._whole[own].part(self._text(part), [own.ranks.index(process) for process in _ranks(part)])
        try:
            end = self._communicators[own.number](store, self._text(part), rank, size)
        except Exception as error:
            text = f"{self._text(part)}: {own.name}(store, name, {rank}, {size}) failed with {type(error).__name__}: {error}"
            raise CommunicatorError(text) from error
        if not isinstance(end, Communicator) or (end.rank, end.size) != (rank, size):
            text = f"{self._text(part)}: {own.name} made {end!r:.80}, which is not rank {rank} of {size} of a communicator"
            raise CommunicatorError(f"{text}; give it what raycomm.device.Communicator has")
        return OwnEnd(end, own.name, self._text(part), partial(self._fail, part))

    def _end_over_gloo(self, part: Link | Group, store: Any, rank: int, size: int) -> Communicator:
        from raycomm.device.cpu import CpuDevice
        from raycomm.device.gloo import GlooCommunicator

        device = self._device_of(CpuDevice, f"cpu of {self._label(self._process)}")
        return GlooCommunicator(store, self._text(part), rank, size, device=device)

    def _end_over_nccl(self, part: Link | Group, store: Any, rank: int, size: int) -> Communicator:
        from raycomm.device.cuda import CudaDevice
        from raycomm.device.nccl import NcclCommunicator

        device = self._device_of(CudaDevice, None if self._gpu is None else int(self._gpu.partition(":")[2]))
        device.use()  # as on the actor's own thread, whatever thread this is
        return NcclCommunicator(store, self._text(part), rank, size, device=device, before_abort=partial(self._fail, part))

    def _device_of(self, make: Callable[..., Any], *args: Any) -> Any:
        """One of each kind for all links."""
        if make not in self._devices:
            self._devices[make] = make(*args)
        return self._devices[make]

    def _while_looking(self, work: Callable[[], Any], what: str, undo: Callable[[Any], object] | None = None) -> Any:
        """What `work` gives. It runs in a thread that is left behind if the graph ends first: its own limits are minutes. What it
        gives after that is undone."""
        assert self._look is not None
        step = Step(work, undo)
        thread = threading.Thread(target=step.run, name=f"raycomm set-up {self._plan.name}", daemon=True)
        thread.start()
        told = Deadline(_TELL_AFTER_S)
        try:
            while thread.is_alive():
                thread.join(_LOOK_EVERY_S)
                self._look()
                if told.over and thread.is_alive():
                    told = Deadline(None)
                    self._tell(what)
        except BaseException:
            step.leave()
            raise
        error = step.failure
        if error is None:
            return step.given
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "torch":
            who = self._label(self._process)
            raise CommunicatorError(f"{what}: torch cannot be imported by {who} ({error}); {_NEEDS_TORCH}") from None
        if isinstance(error, CommunicatorError):
            raise error
        raise CommunicatorError(f"{what} failed: {type(error).__name__}: {error}") from None

    def _name(self, own: OwnBackend) -> str:
        return f"communicator {own.number} ({own.name}) of graph {self._plan.name!r}"

    def _text(self, part: Link | Group) -> str:
        if isinstance(part, Group):
            return f"group {part.id} of graph {self._plan.name!r} of {', '.join(map(self._label, part.processes))}"
        readers = ", ".join(map(self._label, part.readers))
        return f"link {part.id} of graph {self._plan.name!r} from {self._label(part.writer)} to {readers}"

    def _label(self, process: int) -> str:
        return self._plan.processes[process].label


def _ranks(part: Link | Group) -> tuple[int, ...]:
    """The processes that have an end of it, by rank."""
    return part.processes if isinstance(part, Group) else (part.writer, *part.readers)


def _nothing() -> None:
    """Nothing is late."""


def _tell_nobody(_what: str) -> None:
    """Outside of set-up."""
