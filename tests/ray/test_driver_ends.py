"""A driver that ends at any point of its graph's life: its actors are soon free for others."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import InputNode, bind
from raycomm.testing import Stall
from tests.ray.leader import Leader
from tests.ray.workers import PATIENCE_S, Gate, Worker, chain, free, until

pytestmark = pytest.mark.usefixtures("cluster")

_HANG_S = 20.0  # two seconds are promised


_DRIVER = """
import sys, time, ray, raycomm
from raycomm.testing import Fault, Point, Stall, inject
address, point, path = sys.argv[1:]
ray.init(address=address, namespace="faults", log_to_driver=False)
a, b = ray.get_actor("a"), ray.get_actor("b")
with raycomm.InputNode() as x:
    out = raycomm.bind(b.add, raycomm.bind(a.add, x))
with inject(*([Fault(actor=a, point=Point[point], action=Stall(path))] if point != "IDLE" else [])):
    graph = raycomm.compile(out)
refs = [graph.execute(1)]
if point == "IDLE":
    assert refs[0].get(timeout=60) == 3
    open(path + ".reached", "w").close()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def named(cluster: None) -> list[Any]:
    """Two actors that a driver finds by name."""
    workers = [Worker.options(name=name, namespace="faults").remote(name) for name in ("a", "b")]
    ray.get([worker.pid.remote() for worker in workers])
    return workers


@pytest.mark.parametrize("point", ["IDLE", "SETUP_ARENA", "SETUP_READY", "BEFORE_READ", "AFTER_CALL", "AFTER_WRITE"])
def test_a_driver_that_is_killed_leaves_its_actors_to_others(named: list[Any], stall: Stall, point: str) -> None:
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, address, point, stall.path])
    try:
        until(lambda: stall.reached() or driver.poll() is not None, "the driver has come to its point")
        assert driver.poll() is None
    finally:
        driver.kill()
        driver.wait()
    stall.release()
    begin = time.monotonic()
    free(*named)
    assert time.monotonic() - begin < _HANG_S
    with InputNode() as x:
        out = bind(named[1].add, bind(named[0].add, x))
    with raycomm.compile(out) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 3


def test_an_actor_that_is_a_driver_is_killed(workers: list[Any], gate: Gate) -> None:
    leader = Leader.remote()
    ray.get(leader.begin.remote(*workers[:2], gate.path), timeout=PATIENCE_S)
    gate.wait_entered()
    ray.kill(leader)
    until(lambda: ray.get(workers[0].vitals.remote())["loops"] == 0, "the idle loop leaves", _HANG_S)
    assert ray.get(workers[1].add.remote(1)) == 2  # the other is in its method still
    gate.open()
    free(*workers[:2])
    with raycomm.compile(chain(*(worker.add for worker in workers))) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 4
