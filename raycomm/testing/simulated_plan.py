"""Runs a plan on simulated devices, one per actor: what the runtime does with it on real ones, under a virtual clock.

Values are terms that show what they were computed from, so that a wrong, stale or torn value is another value. Per actor, the
host passes its actions in order:

- a read waits for its message, a write for room in its channel, a collective does both on its channels;
- a send waits for room, writes the control record and launches; a receive waits for the control record and launches. Neither
  waits for the transfer;
- a collective on a group publishes only whether it has its tensors, and then launches; it does not wait for the result;
- a call runs on stream 0, after the receives that filled its registers and after the earlier sends of its actor that are not
  `beside` it. It may look at its values, so the host waits for it. For what a write or a collective takes it waits, too;
- a release gives memory back, to be used again once the computations and sends so far are past it.

`PlanRun` has a method for each of these duties; a test that leaves one out proves that the simulation notices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from raycomm.errors import ActorDiedError
from raycomm.plan.actions import Collective, FromChannel, FromInput, Plan
from raycomm.plan.arguments import project, split_arguments
from raycomm.plan.placement import DRIVER
from raycomm.plan.transfer import COMPUTE_STREAM, Recv, Send
from raycomm.testing.simulated_actor import Actor, Results
from raycomm.testing.simulated_device import Device, Stream, Tensor
from raycomm.testing.simulated_group import Group
from raycomm.testing.simulated_memory import MemoryFault, SimulatedMemoryError
from raycomm.testing.simulated_operations import Event
from raycomm.testing.simulated_queue import Queue
from raycomm.testing.simulated_world import Delays, Program, World

Arguments: TypeAlias = tuple[Sequence[object], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run gave.

    Attributes:
        results: per execution, its outputs.
        time: when it ended, in virtual seconds.
        transfers: how many sends were launched.
    """

    results: list[list[object]]
    time: float
    transfers: int


def simulate(
    plan: Plan,
    executions: Sequence[Arguments] | int = 3,
    *,
    constants: Sequence[object] = (),
    seed: int = 0,
    delays: Delays | None = None,
    slots: int = 2,
    hardware_queues: int | None = None,
    results: Results = Results.FRESH,
    failing: frozenset[tuple[int, int]] = frozenset(),
    deaths: Mapping[int, float] | None = None,
    run: type[PlanRun] | None = None,
) -> Outcome:
    """Run `plan` to the end. Its inputs are those of `executions`, or as many made-up ones.

    Args:
        slots: capacity of channels that do not say theirs.
        hardware_queues: of each device; None: a stream never holds up another one.
        failing: calls that fail, as (node, execution).
        deaths: actors that die, by index of the process, and when, in virtual seconds.
        run: how actors do their duties.

    Raises:
        SimulatedHang: the plan cannot go on.
        SimulatedMemoryError: memory was read, written or freed at a wrong time.
        ActorDiedError, PeerDiedError: an actor died, and so the others could not end.
    """
    given = _made_up(plan, executions) if isinstance(executions, int) else executions
    running = (run or PlanRun)(plan, given, constants, World(seed, delays), slots, hardware_queues, results, failing)
    for process, time in (deaths or {}).items():
        running.kill_at(process, time)
    return running.outcome()


class PlanRun:
    """One run of one plan."""

    def __init__(
        self,
        plan: Plan,
        executions: Sequence[Arguments],
        constants: Sequence[object],
        world: World,
        slots: int,
        hardware_queues: int | None,
        results: Results,
        failing: frozenset[tuple[int, int]],
    ) -> None:
        self.plan = plan
        self.world = world
        self.constants = constants
        self.failing = failing
        self.returned = results
        self.transfers = 0
        self._executions = executions
        self.devices = {actor.process.index: Device(world, actor.process.label, hardware_queues) for actor in plan.actors}
        self.links = {
            link.id: Group(world, f"link {link.id}", [self.devices[end] for end in (link.writer, *link.readers)])
            for link in plan.links
        }
        self.groups = {
            group.id: Group(world, f"group {group.id}", [self.devices[process] for process in group.processes])
            for group in plan.groups
        }
        self.queues: dict[int, Queue] = {}
        for channel in plan.channels:
            capacity = slots if channel.slots is None else channel.slots
            self.queues[channel.id] = Queue(world, capacity, f"channel {channel.id} ({channel.value})", len(channel.readers))
        self._results: list[list[object]] = []
        world.start("driver's execute", self._submit())
        world.start("driver's get", self._fetch())
        for actor in plan.actors:
            device = self.devices[actor.process.index]
            launched = [action for action in actor.actions if isinstance(action, (Send, Recv, Collective))]
            for number in range(max((action.stream or COMPUTE_STREAM for action in launched), default=COMPUTE_STREAM) + 1):
                device.stream(str(number))
            world.start(actor.process.label, Actor(self, actor.process.index, actor.actions).program(len(executions)), device)

    def outcome(self) -> Outcome:
        """Run to the end. See `simulate`."""
        self.world.run()
        faults: list[MemoryFault] = [fault for device in self.devices.values() for fault in device.faults]
        if faults:
            raise SimulatedMemoryError.of(faults)
        for task in self.world.tasks:
            if task.failure is not None:
                raise task.failure
        return Outcome(self._results, self.world.now, self.transfers)

    def kill_at(self, process: int, time: float) -> None:
        """At `time` the actor dies; after a while the others learn of it."""
        device = self.devices[process]
        error = ActorDiedError(f"{device} died at {time:.3f} virtual seconds", graph=self.plan.name, actor=str(device))
        device.on_death.append(lambda: self.world.after(self.world.draw("notice"), lambda: self._close(error)))
        self.world.after(time, device.kill)

    def reader_of(self, channel: int, process: int) -> int:
        """The place of a process among the readers of a channel."""
        return self.plan.channels[channel].readers.index(process)

    def wait_for_receive(self, compute: Stream, value: Event) -> None:
        """Before a computation: hold it up until what it is given was received."""
        compute.wait(value)

    def wait_for_send(self, compute: Stream, sent: Event) -> None:
        """Before a computation, which may overwrite what the actor returned earlier: hold it up until that was sent."""
        compute.wait(sent)

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        """After something was launched that uses the tensor: keep its memory until that has ended."""
        tensor.record_stream(stream)

    def _close(self, error: ActorDiedError) -> None:
        for queue in self.queues.values():
            queue.close(error)

    def _submit(self) -> Program:
        for args, kwargs in self._executions:
            for item, value in zip(self.plan.inputs, split_arguments(self.plan, args, kwargs), strict=True):
                queue = self.queues[item.channel]
                yield queue.room
                queue.put(value)
            yield self.world.draw("host")

    def _fetch(self) -> Program:
        channels = list(dict.fromkeys(output.channel for output in self.plan.outputs if isinstance(output, FromChannel)))
        for args, kwargs in self._executions:
            taken: dict[int, object] = {}
            for channel in channels:
                reader = self.reader_of(channel, DRIVER)
                yield self.queues[channel].message(reader)
                taken[channel] = self.queues[channel].take(reader)
            self._results.append(
                [
                    project(output.projection, args, kwargs) if isinstance(output, FromInput) else taken[output.channel]
                    for output in self.plan.outputs
                ]
            )


def _made_up(plan: Plan, count: int) -> list[Arguments]:
    signature = plan.signature
    width = 1 if signature.arity is None else signature.arity
    return [
        (
            [f"input {place} of {execution}" for place in range(width)],
            {key: f"input {key} of {execution}" for key in signature.keys},
        )
        for execution in range(count)
    ]
