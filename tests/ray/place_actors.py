"""Actors of `test_places_of_errors.py`: in a module of their own, for workers import their classes by name."""

from __future__ import annotations

import os
import threading
from typing import Any

import ray

import raycomm


class PlaceBody:
    """Methods that fail in each way there is."""

    def boom(self, x: Any) -> Any:
        raise ValueError(f"bad {x}")

    def chained(self, x: Any) -> Any:
        try:
            self.boom(x)
        except ValueError as error:
            raise KeyError("second") from error

    def group(self, x: Any) -> Any:
        raise ExceptionGroup("several", [ValueError(x), TypeError(x)])

    def none(self, x: Any) -> Any:
        raise StopIteration(x)

    def two(self, x: Any) -> Any:
        return (x,)

    def lock(self, _x: Any) -> Any:
        return threading.Lock()

    def ours(self, x: Any) -> Any:
        raise raycomm.CollectiveError(f"mine {x}")

    def ours_chained(self, x: Any) -> Any:
        try:
            self.boom(x)
        except ValueError as error:
            raise raycomm.CollectiveError(f"mine {x}") from error

    def echo(self, x: Any) -> Any:
        return x

    def big(self, _x: Any) -> Any:
        return bytes(8 << 20)

    def pid(self) -> int:
        return os.getpid()


Place = ray.remote(num_cpus=0)(PlaceBody)


class AsyncPlaceBody:
    async def boom(self, x: Any) -> Any:
        raise ValueError(f"bad {x}")

    async def pid(self) -> int:
        return os.getpid()


AsyncPlace = ray.remote(num_cpus=0)(AsyncPlaceBody)
