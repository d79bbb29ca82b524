"""`install()`: random executing, fetching and dropping, beside a model of what is in flight and what is buffered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayCgraphCapacityExceeded

import raycomm
from tests.ray.install_fixtures import compiled
from tests.ray.workers import start

pytestmark = pytest.mark.usefixtures("cluster", "installed")

IN_FLIGHT, BUFFERED, OUTPUTS, STEPS = 4, 3, 2, 1500


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


class Model:
    """Which outputs of which execution somebody still has a ref for, and whether they were brought over."""

    def __init__(self) -> None:
        self.open: dict[int, set[int]] = {}
        self.brought_over: set[int] = set()
        self.count = 0

    @property
    def in_flight(self) -> list[int]:
        return sorted(set(self.open) - self.brought_over)

    def may_execute(self) -> bool:
        return len(self.in_flight) < IN_FLIGHT

    def executed(self) -> int:
        self.open[self.count] = set(range(OUTPUTS))
        self.count += 1
        return self.count - 1

    def fetch(self, execution: int, output: int) -> bool:
        """Whether it is allowed. What was brought over on the way to a refusal stays so."""
        for earlier in [index for index in self.in_flight if index <= execution]:
            if len(self.brought_over) >= BUFFERED:
                return False
            self.brought_over.add(earlier)
        self.close(execution, output)
        return True

    def close(self, execution: int, output: int) -> None:
        self.open[execution].discard(output)
        if not self.open[execution]:
            del self.open[execution]
            self.brought_over.discard(execution)


def test_random_use_follows_the_rules(seed: int, cluster: None) -> None:
    rng = random.Random(seed)
    one, two = start(2)
    model, refs, inputs = Model(), dict[tuple[int, int], Any](), dict[int, int]()
    refused = {"execute": 0, "fetch": 0}

    def build(inp: Any) -> Any:
        return [one.fail_if_odd.bind(inp), two.add.bind(inp)]

    with compiled(build, _max_inflight_executions=IN_FLIGHT, _max_buffered_results=BUFFERED) as graph:
        for _ in range(STEPS):
            action = rng.random()
            if action < 0.4:
                value = rng.randrange(1000)
                if not model.may_execute():
                    refused["execute"] += 1
                    with pytest.raises(RayCgraphCapacityExceeded, match=f"more than {IN_FLIGHT} in-flight"):
                        graph.execute(value)
                    continue
                made = graph.execute(value)
                index = model.executed()
                inputs[index] = value
                refs.update({(index, output): ref for output, ref in enumerate(made)})
                del made
            elif refs and action < 0.8:
                index, output = rng.choice(list(refs))
                if not model.fetch(index, output):
                    refused["fetch"] += 1
                    with pytest.raises(RayCgraphCapacityExceeded, match=f"more than {BUFFERED} buffered"):
                        ray.get(refs[index, output])
                    continue
                ref = refs.pop((index, output))
                if inputs[index] % 2:
                    with pytest.raises(ValueError, match=f"bad {inputs[index]}$|bad {inputs[index]}\n"):
                        ray.get(ref)
                else:
                    assert ray.get(ref) == inputs[index] + output
                del ref
            elif refs:
                index, output = rng.choice(list(refs))
                del refs[index, output]
                model.close(index, output)
            assert set(graph._result_buffer) == model.brought_over
        assert min(refused.values()) > 0, "the limits were reached"
        refs.clear()
        assert [graph._result_buffer, graph._destructed_ref_idxs, graph._got_ref_idxs] == [{}, {}, {}]
