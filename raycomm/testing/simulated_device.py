"""A simulated device: streams that are queues, events, and memory from a pool that may be used again once its stream is past it.

A stream is a queue of operations; the one at the head begins when what it needs is there, and the next one stands at the head
when it has ended. With `hardware_queues`, streams share that many queues, in the order of their launches: as on a device whose
hardware queues are fewer than its streams, one that waits holds up all behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raycomm.testing.simulated_memory import Access, Block, Hazard, MemoryFault, Piece, SimulatedMemoryError
from raycomm.testing.simulated_operations import Compute, Event, HardwareQueue, Kernel, Operation, Reuse, WaitEvent
from raycomm.testing.simulated_order import Agent, Clock, join
from raycomm.testing.simulated_world import Program, SimulatedDeath, Task, World


class Tensor:
    """A handle on a block. Ends with `free`, or when nobody refers to it any more: the block goes back to the pool of the stream
    that it was allocated on."""

    __slots__ = ("alive", "block", "device", "dtype", "made_on", "name", "piece", "seen", "shape", "used_on")

    def __init__(self, device: Device, block: Block, made_on: Stream, shape: tuple[int, ...], dtype: Any, name: str) -> None:
        self.device = device
        self.block = block
        self.made_on = made_on
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.piece = Piece(block, block.granted, shape, dtype)
        self.alive = True
        self.used_on: list[Stream] = []
        self.seen: Clock = {}  # Whoever drops the last reference, does so after the hosts' looks at the content.

    def record_stream(self, stream: Stream) -> None:
        """Also after `free`, keep the memory until what is in `stream` by then has ended."""
        if stream is not self.made_on and stream not in self.used_on:
            self.used_on.append(stream)

    def free(self) -> None:
        """Give the memory back: to be used again after what is now in the stream that it was made on, and in those recorded."""
        if self.alive:
            self.alive = False
            self.device.take_back(self)

    def __del__(self) -> None:
        self.free()

    @property
    def content(self) -> Any:
        """What is in the memory now, for a host that has waited for it. Poison if it should have waited longer."""
        access = Access(f"the host of {self.device.name}", self.device.faults)
        moment = self.device.world.host.step()
        self.device.world.host.learn(moment.clock)
        join(self.seen, moment.clock)
        access.begin((self.piece,), (), self.device.world.now, moment)
        return access.taken(self.device.world.now)[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.block})"


class Stream:
    """Operations in the order of their launch. `failure`: what the first of them that did not end well ended with."""

    def __init__(self, device: Device, name: str, queue: HardwareQueue) -> None:
        self.device = device
        self.world = device.world
        self.name = name
        self.queue = queue
        self.failure: Exception | None = None
        self.agent = Agent()
        self.world.agents.append(self.agent)

    def launch(self, operation: Operation) -> Event:
        """Put an operation into the stream; does not wait. Its end."""
        if self.device.alive:
            self.queue.operations.append(operation)
            self.queue.advance()
        return operation.end_event

    def compute(
        self, name: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), function: Kernel | None = None
    ) -> Event:
        """Launch a kernel that puts `function` of the contents of `reads` into `writes`; without one, a term that shows them."""
        places = range(len(writes))
        operation = Compute(name, self, reads, writes, function or (lambda given: [(name, place, *given) for place in places]))
        for tensor in (*reads, *writes):
            self.device.check(tensor, operation)
        return self.launch(operation)

    def record(self) -> Event:
        """The end of everything in the stream so far."""
        return self.launch(Operation("event", self))

    def wait(self, event: Event) -> None:
        """Hold up what is launched from now on until `event` is complete; does not block the host."""
        self.launch(WaitEvent(event, self))

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host program until the stream is empty. Raises as `Event.synchronize`."""
        self.record().synchronize(limit_s)

    def __str__(self) -> str:
        return f"stream {self.name} of {self.device.name}"


class Device:
    """A device with as many streams as anybody wants.

    Args:
        hardware_queues: how many of them can make progress beside each other; None: all.

    Attributes:
        faults: wrong uses of its memory so far.
        alive: False once killed; what is launched from then on is lost.
        on_death: called when it dies.
    """

    def __init__(self, world: World, name: str, hardware_queues: int | None = None) -> None:
        self.world = world
        self.name = name
        self.faults: list[MemoryFault] = []
        self.alive = True
        self.on_death: list[Callable[[], None]] = []
        self._queues: list[HardwareQueue] = []
        self._limit = hardware_queues
        self._streams: dict[str, Stream] = {}
        self._blocks = 0
        self._pools: dict[tuple[Stream, tuple[int, ...], Any], list[Block]] = {}
        world.watched.append(self)

    def stream(self, name: str) -> Stream:
        """The stream of that name, made where there is none yet; the i-th one uses hardware queue i modulo their number."""
        if name not in self._streams:
            place = len(self._streams)
            if self._limit is None or place < self._limit:
                self._queues.append(HardwareQueue())
            self._streams[name] = Stream(self, name, self._queues[place % len(self._queues)])
        return self._streams[name]

    def current_stream(self) -> None:
        """None: what runs on the device is launched on streams by name."""

    def allocate(self, shape: tuple[int, ...], dtype: Any, stream: Stream, name: str = "tensor") -> Tensor:
        """Memory for use on `stream`, and on others that wait for it; first what was freed there. Poisoned until written."""
        pool = self._pools.get((stream, shape, dtype))
        if pool:
            block = pool.pop()
            block.granted += 1
            return Tensor(self, block, stream, shape, dtype, name)
        self._blocks += 1
        return Tensor(self, Block(self.name, self._blocks - 1), stream, shape, dtype, name)

    def take_back(self, tensor: Tensor) -> None:
        """See `Tensor.free`."""
        if tensor.used_on:
            events = [stream.record() for stream in tensor.used_on]
            self.world.after(0.0, Task(self.world, "pool", self._later(tensor, events), self).resume)
        else:
            self._reuse(tensor)

    def check(self, tensor: Tensor, operation: Operation) -> None:
        """Note a fault if `tensor` was freed before `operation` is launched."""
        if not tensor.alive:
            fault = MemoryFault(Hazard.EARLY_FREE, str(operation), str(tensor), "it was freed before the launch", self.world.now)
            self.faults.append(fault)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """See `Tensor.record_stream`."""
        tensor.record_stream(stream)

    def holds(self, tensor: object) -> bool:
        """Whether it is a tensor of this device."""
        return isinstance(tensor, Tensor) and tensor.device is self

    def to_device(self, host: Any, stream: Stream) -> Tensor:
        """A tensor that will hold a copy of a real one."""
        copy = host.clone()
        tensor = self.allocate(tuple(host.shape), host.dtype, stream, "copy from the host")
        stream.compute("copy from the host", (), (tensor,), lambda _: [copy])
        return tensor

    def to_host(self, tensor: Tensor, stream: Stream, limit_s: float | None = None) -> Any:
        """The real tensor that is in `tensor` after what is in `stream`. Raises `SimulatedMemoryError` where none is."""
        taken: list[Any] = []

        def take(contents: list[Any]) -> list[Any]:
            taken.extend(contents)
            return []

        stream.compute("copy to the host", (tensor,), (), take).synchronize(limit_s)
        if not taken:
            raise SimulatedMemoryError.of(self.faults)
        return taken[0].clone()

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host program until all streams are empty. Raises as `Event.synchronize`."""
        for event in [stream.record() for stream in self._streams.values()]:
            event.synchronize(limit_s)

    def kill(self) -> None:
        """It and its host programs (those started with this device as their rank) are gone; what is in its streams never ends."""
        self.alive = False
        for queue in self._queues:
            queue.operations.clear()
        for task in self.world.tasks:
            if task.rank is self:
                task.end(SimulatedDeath())
        for call in self.on_death:
            call()

    def leave(self, operation: Operation, failure: Exception | None) -> None:
        """An operation has ended."""
        if not self.alive:
            return
        stream = operation.stream
        stream.queue.operations.popleft()
        stream.agent.learn(operation.moment.clock)
        stream.failure = stream.failure or failure
        operation.end_event.finish(stream.failure)
        stream.queue.advance()

    def heads(self) -> Iterator[str]:
        """What stands at the head of each queue."""
        for queue in self._queues:
            if queue.operations:
                head = queue.operations[0]
                behind = f", {len(queue.operations) - 1} behind it" if len(queue.operations) > 1 else ""
                yield f"{head.stream}: {head.name} waits for {head.waits_for()}{behind}"

    def _later(self, tensor: Tensor, events: list[Event]) -> Program:
        yield from events
        self._reuse(tensor)

    def _reuse(self, tensor: Tensor) -> None:
        tensor.made_on.launch(Reuse(tensor, tensor.made_on))
        self._pools.setdefault((tensor.made_on, tensor.shape, tensor.dtype), []).append(tensor.block)

    def __str__(self) -> str:
        return self.name
