"""Bench processes by interpreter: a rival that needs an environment of its own is measured beside the others, round by round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microbench.process import BenchProcess


class Interpreters:
    """Offers what `BenchProcess` does; each system's requests go to a process of the interpreter it needs. A context manager.

    Args:
        serves: as for `BenchProcess`.
        python_of: path of a system's interpreter.
    """

    def __init__(self, serves: str, python_of: Callable[[str], str]) -> None:
        self._serves = serves
        self._python_of = python_of
        self._processes: dict[str, BenchProcess] = {}
        self._current: BenchProcess | None = None

    @property
    def running(self) -> bool:
        return self._current is not None and self._current.running

    def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        """As `BenchProcess.ask`. "open" says, by its first argument, where the requests go from now on."""
        if method == "open":
            python = self._python_of(args[0])
            if python not in self._processes:
                self._processes[python] = BenchProcess(self._serves, python)
            self._current = self._processes[python]
        assert self._current is not None
        return self._current.ask(method, *args, limit_s=limit_s)

    def kill(self) -> None:
        """End the process that requests go to."""
        if self._current is not None:
            self._current.kill()

    def __enter__(self) -> Interpreters:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for process in self._processes.values():
            process.__exit__(kind, error, trace)
