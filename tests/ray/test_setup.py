"""Set-up: what driver and actor compare before anything is attached."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ray

import raycomm
from raycomm.runtime import compile as compile_module
from raycomm.runtime.blueprint import Blueprint

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote
class Echo:
    """Returns what it is given."""

    def forward(self, value: Any) -> Any:
        """The value itself."""
        return value


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "0.0.1"}, ["the driver has raycomm 0.0.1", f"this actor has raycomm {raycomm.__version__}"]),
        ({"layout": 77}, ["memory layout 77", "install the same version"]),
        ({"driver_node": "elsewhere"}, ["the driver on node elsewhere", "place all actors on the driver's node"]),
    ],
)
def test_a_difference_between_driver_and_actor_is_told(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: list[str]
) -> None:
    def make(*args: Any, **kwargs: Any) -> Blueprint:
        fields = dict(zip(("plan", "process", "constants", "options", "driver", "driver_node"), args, strict=False))
        return Blueprint(**{**fields, **kwargs, **changed})

    actor = Echo.remote()
    with raycomm.InputNode() as value:
        node = raycomm.bind(actor.forward, value)
    with monkeypatch.context() as patch:
        patch.setattr(compile_module, "Blueprint", functools.partial(make))
        with pytest.raises(raycomm.CompileError) as caught:
            raycomm.compile(node, name="told")
    for text in ["told", "Echo", *said]:
        assert text in str(caught.value)
    # Nothing was left behind: the same actor takes part in the next graph.
    with raycomm.compile(node) as graph:
        assert graph.execute(7).get(timeout=30) == 7
