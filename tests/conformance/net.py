"""Channels between agents, wherever these live: what the conformance tests are parametrised over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raycomm.channel import RingLayout
from tests.conformance.peer import Agent, Remote

KINDS = {"one process": 1, "two processes": 1, "two readers": 2, "three readers": 3}


class Net:
    """One writer (process 0), some readers (1, 2, ...), one channel (number 1), or several to the same readers."""

    def __init__(
        self,
        readers: list[Any],
        slots: int = 4,
        inline: int = 1024,
        limit: int = 64 << 20,
        drain: bool = True,
        channels: int = 1,
        writer: Any = Agent,
    ) -> None:
        indices = tuple(range(1, len(readers) + 1))
        rings = [RingLayout(channel, slots, inline, indices) for channel in range(1, channels + 1)]
        self.agents: list[Any] = [writer(0, rings, limit), *(make(index, [], limit) for index, make in enumerate(readers, 1))]
        addresses = [agent.address() for agent in self.agents]
        for agent in self.agents:
            agent.attach(addresses)
        self.writer, *self.readers = self.agents
        self.writer.open_writer([ring.channel for ring in rings])
        for index, reader in enumerate(self.readers):
            reader.open_reader(0, 1, index, drain)

    @property
    def reader(self) -> Any:
        return self.readers[0]

    def end(self) -> None:
        """Nothing of it stays in any process that still lives."""
        for agent in self.agents:
            if not isinstance(agent, Remote) or agent.popen.poll() is None:
                agent.drop()
                agent.let_go()


class Nets:
    """Makes the channels of one test, from processes that serve many tests."""

    def __init__(self, peers: list[Remote]) -> None:
        self._peers = peers

    @contextlib.contextmanager
    def __call__(self, kind: str, **settings: Any) -> Iterator[Net]:
        """The channels of a kind in KINDS."""
        readers = [Agent] if kind == "one process" else [peer.become for peer in self._peers[: KINDS[kind]]]
        net = Net(readers, **settings)
        try:
            yield net
        finally:
            net.end()


@contextlib.contextmanager
def all_at_once(agents: list[Any], name: str, *args: Any) -> Iterator[list[Future[Any]]]:
    """The same call on several agents, each on a thread of its own, while the body runs. All of them have ended afterwards."""
    with ThreadPoolExecutor(len(agents)) as pool:
        yield [pool.submit(getattr(agent, name), *args) for agent in agents]
