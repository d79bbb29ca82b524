"""Actors that compile graphs through themselves, or others."""

from __future__ import annotations

import asyncio
from typing import Any

import raycomm
from tests.ray.workers import PATIENCE_S, chain


def through(me: Any) -> Any:
    """Compiles a graph through the actor `me`, and runs it."""
    with raycomm.compile(chain(me.echo), name="own", compile_timeout=PATIENCE_S) as graph:
        return graph.execute(7).get(timeout=PATIENCE_S)


class Itself:
    """Compiles a graph through itself."""

    def echo(self, x: Any) -> Any:
        return x

    def go(self, me: list[Any]) -> Any:
        return through(me[0])


class ItselfInALoop:
    """The same, with an event loop."""

    def echo(self, x: Any) -> Any:
        return x

    async def go(self, me: list[Any]) -> Any:
        return through(me[0])

    async def aside(self, me: list[Any]) -> Any:
        return await asyncio.to_thread(through, me[0])
