"""What is sure to happen before what, whatever the delays: vector clocks over streams and host programs.

An agent is whatever does one thing after the other: a stream, a host program. A clock says of each agent how many of its steps
are sure to be over. Launches, events, messages and transfers hand clocks on. Two uses of memory of which neither knows the other
are not ordered, even where they happen not to meet in this run.
"""

from __future__ import annotations

from typing import TypeAlias

Clock: TypeAlias = "dict[Agent, int]"


class Agent:
    """Does one thing after the other. `clock`: what is over for it."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """What `clock` says is over for this agent, too."""
        join(self.clock, clock)

    def step(self, known: Clock | None = None) -> Moment:
        """The next thing it does, knowing `known` besides. It is over for the agent once that has learned the moment's clock."""
        clock = dict(self.clock)
        if known:
            join(clock, known)
        number = clock.get(self, 0) + 1
        clock[self] = number
        return Moment(self, number, clock)


class Moment:
    """A step of an agent, and what was over when it began."""

    __slots__ = ("agent", "clock", "number")

    def __init__(self, agent: Agent, number: int, clock: Clock) -> None:
        self.agent = agent
        self.number = number
        self.clock = clock

    def comes_after(self, other: Moment) -> bool:
        """Whether `other` is over in every run by the time that this begins."""
        return self.clock.get(other.agent, 0) >= other.number


def join(into: Clock, clock: Clock) -> None:
    """Add to `into` what `clock` knows."""
    for agent, number in clock.items():
        if into.get(agent, 0) < number:
            into[agent] = number
