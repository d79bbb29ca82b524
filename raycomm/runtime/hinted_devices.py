"""Where tensors of a value lie at its reader, if a hint says so.

Without a hint a tensor of a GPU goes to the reader's, where it has one (`raycomm.codec.tensor`), and all others stay in host
memory. Looked for as on links: in dicts, lists and tuples, see `raycomm.channel.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from raycomm.codec import Failure
from raycomm.graph.tensor_hint import TensorDevice
from raycomm.options import DeviceKind, Options
from raycomm.plan import ActorPlan, Plan, Read, Write
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
        return move(to, those_on) if hint is not None and hint.device is wanted and has_gpu(self._options) else None

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


def has_gpu(options: Options) -> bool:
    """Whether hints about a GPU mean one of this process."""
    if options.device is DeviceKind.SIMULATED:  # stands for one, in host memory
        return False
    import torch

    return torch.cuda.is_available()


def move(to: str, those_on: str) -> Move:
    """Copies the tensors of a value that lie on one kind of device to another. A value without any stays itself."""
    import torch

    from raycomm.channel.tensors import put_together, take_apart

    def is_meant(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == those_on

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to(to)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(there, requires_grad=tensor.requires_grad)
        return there.requires_grad_(tensor.requires_grad)

    def of(value: Any) -> Any:
        structure, tensors, leaves = take_apart(value, is_meant)
        return put_together(structure, [moved(tensor) for tensor in tensors], leaves) if tensors else value

    return of
