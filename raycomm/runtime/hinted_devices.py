"""Where tensors of a value lie at its reader, if a hint says so.

Without a hint a tensor of a GPU goes to the reader's, where it has one (`raycomm.codec.tensor`), and all others stay in host
memory. Looked for as on links: in dicts, lists and tuples, see `raycomm.channel.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from raycomm.codec import Failure
from raycomm.graph.tensor_transport import TensorDevice
from raycomm.options import DeviceKind, Options
from raycomm.plan.actions import ActorPlan, Plan, Read, Write
from raycomm.plan.transfer import Recv
from raycomm.runtime.calls import Step

Move: TypeAlias = Callable[[Any], Any]

_GPU = "cuda"
_HOST = "cpu"


class HintedDevices:
    """What an actor's loop does beside its reads and writes so that tensors get where hints say.

    Args:
        plan: has the hints.
        options: of the graph.
        registers: of the loop. It gets more, for what is to be written and lies elsewhere in the actor.
        label: the actor's.
        now: the number of the execution.
    """

    def __init__(self, plan: Plan, options: Options, registers: list[Any], label: str, now: Callable[[], int]) -> None:
        self._plan = plan
        self._options = options
        self._registers = registers
        self._label = label
        self._now = now

    def any_of(self, actor: ActorPlan) -> bool:
        """Whether any action of the actor needs one."""
        reads = any(self._to_gpu(action.channel) for action in actor.actions if isinstance(action, (Read, Recv)))
        return reads or any(
            self._to_host(channel) for action in actor.actions if isinstance(action, Write) for channel in action.channels
        )

    def after(self, action: Read | Recv) -> list[Step]:
        """After a value has arrived: what is in host memory goes to this actor's GPU, if the hint says so."""
        move = self._to_gpu(action.channel)
        return [] if move is None else [self._step(move, action.channel, action.register, action.register)]

    def around(self, action: Write, write: Callable[[Write], Step]) -> list[Step]:
        """Writes values; those whose readers want host memory are copied there first, and stay where they are in this actor."""
        steps: list[Step] = []
        copies: dict[int, int] = {}  # by place in the action, the register of the copy
        for place, channel in enumerate(action.channels):
            move = self._to_host(channel)
            if move is not None:
                copies[place] = len(self._registers)
                self._registers.append(None)
                steps.append(self._step(move, channel, action.registers[place], copies[place]))
        if not copies:
            return [write(action)]
        sources = tuple(copies.get(place, register) for place, register in enumerate(action.registers))
        registers = self._registers

        def release() -> None:
            for register in copies.values():
                registers[register] = None

        return [*steps, write(replace(action, registers=sources)), release]

    def _to_host(self, channel: int) -> Move | None:
        return self._move(channel, TensorDevice.CPU, _HOST, _GPU)

    def _to_gpu(self, channel: int) -> Move | None:
        return self._move(channel, TensorDevice.GPU, _GPU, _HOST)

    def _move(self, channel: int, wanted: TensorDevice, to: str, those_on: str) -> Move | None:
        hint = self._plan.channels[channel].tensors
        if hint is None or hint.device is not wanted or self._options.device is DeviceKind.SIMULATED:
            return None  # what is simulated stands for a GPU, in host memory
        from raycomm.channel import moving  # torch comes with them
        from raycomm.codec import tensor

        return moving.move(to, those_on) if tensor.has_gpu() else None

    def _step(self, move: Move, channel: int, source: int, target: int) -> Step:
        registers, now = self._registers, self._now
        origin = f"{self._label} moving {self._plan.channels[channel].value} to the device of its hint"

        def step() -> None:
            value = registers[source]
            if type(value) is not Failure:
                try:
                    value = move(value)
                except Exception as error:  # no memory, say
                    value = Failure.capture(error, origin, now())
            registers[target] = value

        return step
