"""Which messages were written and read, from the counters in the rings. A row of the board says what a process set out to wait
for; these say whether it is there by now.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.plan.actions import Plan, Write

_SEARCHED = 256  # operations of a writer's recorder that are searched for the writing of a message


class Messages:
    """Of one graph, seen from the driver. A channel has one message per execution, so a message's number is its execution.

    Args:
        plan: names channels.
        arena: the driver's.
        slots: channel -> messages its ring holds.
    """

    def __init__(self, plan: Plan, arena: ShmArena, slots: Mapping[int, int]) -> None:
        self._plan = plan
        self._arena = arena
        self._slots = slots

    def written(self, channel: int) -> int:
        """How many messages have been written; message n is there once this is larger than n."""
        published: int = self._counters(channel)["published"]
        return published

    def taken(self, channel: int, process: int) -> int:
        """How many of them `process` has taken: the number of the one it takes next."""
        place = self._plan.channels[channel].readers.index(process)
        taken: int = self._counters(channel)["readers"][place][0]
        return taken

    def in_the_way(self, channel: int) -> tuple[int, ...]:
        """The readers without whom there would be room to write on `channel` and on those that are written with it."""
        late = set()
        for each in self._together(channel):
            counters = self._counters(each)
            for process, (taken, _, _) in zip(self._plan.channels[each].readers, counters["readers"], strict=True):
                if taken + self._slots[each] <= counters["published"]:
                    late.add(process)
        return tuple(sorted(late))

    def age_s(self, channel: int, number: int) -> float | None:
        """Seconds since a message was written; None where the writer's recorder does not tell (it keeps no failures)."""
        front = self._together(channel)[0]
        for kind, subject, execution, start_ns, duration_ns, _ in reversed(
            self._arena.core.records(self._plan.channels[channel].writer, _SEARCHED)
        ):
            if (kind, subject, execution) == (_core.WRITING, front, number):
                return max(0.0, (time.monotonic_ns() - start_ns - duration_ns) / 1e9)
        return None

    def _counters(self, channel: int) -> dict[str, Any]:
        return self._arena.core.channel_counters(self._plan.channels[channel].writer, channel)

    def _together(self, channel: int) -> tuple[int, ...]:
        """The channels that are written in one go with `channel`; waits and records name the first of them."""
        writer = self._plan.channels[channel].writer
        if writer == 0:
            return tuple(item.channel for item in self._plan.inputs)
        for action in self._plan.actors[writer - 1].actions:
            if isinstance(action, Write) and channel in action.channels:
                return action.channels
        return (channel,)
