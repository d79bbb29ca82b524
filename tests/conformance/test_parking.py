"""How often a process that waits looks for dead peers: a driver soon, because its caller is to be told, a loop seldom."""

from __future__ import annotations

import resource

import pytest

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena, ShmReader
from raycomm.options import Options

WAIT_S = 0.5


def parks(reader: ShmReader) -> int:
    """How often this thread went to sleep while it waited in vain."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    with pytest.raises(_core.TimedOut):
        reader.read(WAIT_S)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


def test_a_waiting_driver_looks_around_more_often_than_a_loop() -> None:
    options = Options(shm_limit_bytes=1 << 20, max_inflight=4)
    driver = ShmArena.create(0, [RingLayout(0, 4, 256, (1,))], options, loops=2, processes=2)
    actor = ShmArena.create(1, [RingLayout(1, 4, 256, (0,))], options, loops=2)
    driver.attach(actor.address)
    actor.attach(driver.address)
    driver.join(0)
    actor.join(0)
    input_reader = actor.reader(0, 0, 0, drain=False)
    result_reader = driver.reader(1, 1, 0, drain=True)
    assert parks(input_reader) <= 8  # three slices of 200 ms; a wait for the interpreter's lock counts as well
    assert parks(result_reader) >= 10  # twenty-five of 20 ms
