"""An actor's calls, as prepared closures over its registers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ray.exceptions import AsyncioActorExit  # what exit_actor raises on any thread but the main one

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.codec import Failure
from raycomm.plan.actions import Compute, Register
from raycomm.runtime.coroutines import CoroutineMethod
from raycomm.runtime.fault_points import FaultPoints

Step: TypeAlias = Callable[[], None]

# What ends the loop when it comes out of a method, and is no failure of one execution.
ENDS = (AsyncioActorExit, _core.Closed)
# What fails one execution: not only what is an Exception, for a method may use coroutines and generators.
FAILS = (Exception, GeneratorExit, asyncio.CancelledError)


class Calls:
    """Of one actor.

    Args:
        instance: the actor's object.
        label: the actor's.
        registers: of the loop.
        constants: the graph's.
        arena: the actor's memory in the graph.
        faults: what is to go wrong, for tests.
        now: the number of the execution.
    """

    def __init__(
        self,
        instance: Any,
        label: str,
        registers: list[Any],
        constants: Sequence[Any],
        arena: ShmArena,
        faults: FaultPoints,
        now: Callable[[], int],
    ) -> None:
        self._instance = instance
        self._label = label
        self._registers = registers
        self._constants = constants
        self._arena = arena
        self._faults = faults
        self._now = now

    def step(self, action: Compute) -> Step:
        """Runs the method, or passes on the first failure among what it is given."""
        call = self._call(self.method(action), action)
        if action.awaited:
            call = self._unless_cancelled(call, action.awaited)
        registers, outputs = self._registers, action.outputs
        origin = f"{self._label}.{action.method}"

        def step_one() -> None:
            try:
                registers[output] = call()
            except ENDS:
                raise
            except FAILS as error:
                registers[output] = Failure.capture(error, origin, self._now())

        def step_many() -> None:
            try:
                result = call()
                if type(result) is Failure:
                    values = (result,) * len(outputs)
                else:
                    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
                    if not isinstance(result, (tuple, list)) or len(values) != len(outputs):
                        got = f"{len(values)} values" if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
                        raise ValueError(f"{origin} is declared to return {len(outputs)} values and returned {got}")
            except ENDS:
                raise
            except FAILS as error:
                values = (Failure.capture(error, origin, self._now()),) * len(outputs)
            for register, value in zip(outputs, values, strict=True):
                registers[register] = value

        if len(outputs) == 1:
            output = outputs[0]
            return step_one
        return step_many

    def method(self, action: Compute) -> Callable[..., Any]:
        """The actor's method, called as a plain function whatever it is."""
        method = getattr(self._instance, action.method)
        if inspect.iscoroutinefunction(method):
            method = CoroutineMethod(method, self._arena, f"{self._label}.{action.method}")
        return self._faults.around(method, action.method, self._now)

    def _call(self, method: Callable[..., Any], action: Compute) -> Callable[[], Any]:
        """Calls the method on registers and constants, or returns the first failure among them."""
        registers, constants = self._registers, self._constants
        if len(action.args) == 1 and not action.kwargs and isinstance(action.args[0], Register):
            only = action.args[0].index

            def call_one() -> Any:
                value = registers[only]
                return value if type(value) is Failure else method(value)

            return call_one

        sources = [*action.args, *(argument for _, argument in action.kwargs)]
        places = [argument.index for argument in sources if isinstance(argument, Register)]
        # Constants stand in the list already; the registers' values are put between them for each call.
        filled = [None if isinstance(argument, Register) else constants[argument.index] for argument in sources]
        slots = [(slot, argument.index) for slot, argument in enumerate(sources) if isinstance(argument, Register)]
        positional, names = len(action.args), [name for name, _ in action.kwargs]

        def call() -> Any:
            for place in places:
                if type(registers[place]) is Failure:
                    return registers[place]
            given = filled.copy()
            for slot, place in slots:
                given[slot] = registers[place]
            return method(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

        return call

    def _unless_cancelled(self, call: Callable[[], Any], awaited: tuple[int, ...]) -> Callable[[], Any]:
        """A failure of what the call only waits for is no reason not to run, but for a cancellation: that is of all calls."""
        registers = self._registers

        def call_after() -> Any:
            for place in awaited:
                value = registers[place]
                if type(value) is Failure and value.is_cancellation:
                    return value
            return call()

        return call_after
