"""The lifecycle bench's session with actors that start sooner."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from microbench.lifecycle_session import HELD_S, LifecycleSession


class Light:
    """`microbench.lifecycle_session.Lifelike` without torch."""

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def echo_or_hold(self, path: str) -> str:
        if path:
            Path(path).touch()
            time.sleep(HELD_S)
        return path


class Brief(LifecycleSession):
    """See the module."""

    body = Light
