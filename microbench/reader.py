"""The reader's process of the broadcast bench: `python -m microbench.reader FD SYSTEM RANK READERS DIRECTORY`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from microbench.fleet import Times, clock
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


def main(descriptor: str, system: str, rank: str, readers: str, directory: str) -> None:
    """Answers the writer until it hangs up: `(True, answer)`, or `(False, why)` and no more."""
    talk: Connection[Any, Any] = Connection(int(descriptor))
    place = Place(int(rank), int(readers), Path(directory))
    try:
        end: Transport = SYSTEMS[system].load()(place)
        times = Times(place.directory / "times", place.readers).of(place.rank)
        talk.send((True, end.offer()))
        end.join(talk.recv())
        talk.send((True, None))
        while True:
            workload, messages, encoded = talk.recv()
            if workload.sort is Sort.TENSOR:
                import torch

                torch.set_num_threads(1)  # the readers share the cores already
            end.prepare(encoded)
            talk.send((True, None))
            receive(end, workload, messages, times)
            talk.recv()  # asked, not unasked: before its time, the writer takes what it hears for a failure
            talk.send((True, None))
    except (EOFError, ConnectionResetError):
        end.close()
    except BaseException as error:
        talk.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
