"""The reader's process of the broadcast bench: `python -m microbench.reader FD SYSTEM RANK READERS DIRECTORY`."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from microbench.fleet import Times, clock
from microbench.process import die_with_parent
from microbench.systems import SYSTEMS
from microbench.transports.base import Place, Transport
from microbench.workloads import Sort, Workload


def receive(end: Transport, workload: Workload, messages: int, times: memoryview[int]) -> None:
    """Read so many messages, and note when each was there. Each is looked at after that, so the look costs no time of its own.

    Raises:
        WrongMessage
    """
    read, take, check = end.read, workload.take, workload.check
    value: Any = None
    for number in range(messages):
        value = read()
        taken = take(value)
        times[number] = clock()
        check(number, value, taken)
    workload.check_whole(messages - 1, value)


def serve(talk: Connection[Any, Any], system: str, place: Place) -> None:
    """Answer the writer until it hangs up."""
    end: Transport = SYSTEMS[system].load()(place)
    with closing(end), closing(Times(place.directory / "times", place.readers)) as all_times, all_times.of(place.rank) as times:
        talk.send((True, end.offer()))
        end.join(_hear(talk))
        talk.send((True, None))
        while True:
            workload, messages, encoded = _hear(talk)
            if workload.sort is Sort.TENSOR:
                import torch

                torch.set_num_threads(1)  # the readers share the cores already
            workload.prepare()
            end.prepare(encoded)
            talk.send((True, None))
            receive(end, workload, messages, times)
            _hear(talk)  # asked, not unasked: before its time, the writer takes what it hears for a failure
            talk.send((True, None))


class WriterGone(Exception):
    """It has hung up: there is nothing more to do."""


def _hear(talk: Connection[Any, Any]) -> Any:
    try:
        return talk.recv()
    except (EOFError, OSError) as error:
        raise WriterGone from error


def main(descriptor: str, system: str, rank: str, readers: str, directory: str) -> None:
    """Answers are `(True, answer)`, or `(False, why)` and no more."""
    if not die_with_parent():
        return
    talk: Connection[Any, Any] = Connection(int(descriptor))
    try:
        serve(talk, system, Place(int(rank), int(readers), Path(directory)))
    except WriterGone:
        pass
    except BaseException as error:
        with suppress(OSError):
            talk.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
