"""Every error pickles with its attributes, text, notes and type: ours, and the driver's that are Ray's too."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import cloudpickle
import pytest

from raycomm import errors

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "RaycommError": {},
    "CompileError": {"node": "W1.forward", "argument": "0", "remedy": "bind it"},
    "DeadlockError": {"node": "W1.forward", "cycle": ("a", "b")},
    "ArgumentError": {"expected": "1", "given": "2"},
    "ChannelError": {"graph": "g", "channel": "input"},
    "ChannelTimeoutError": {"graph": "g", "channel": "c", "limit_s": 1.5, "execution": 41, "waits_for": "W1 (pid 1, alive)"},
    "ChannelClosedError": {"graph": "g", "reason": "teardown"},
    "ActorDiedError": {
        "graph": "g",
        "actor": "W1",
        "actor_id": "ab" * 16,
        "pid": 12,
        "node": "n",
        "execution": 3,
    },
    "ExecutionCancelledError": {"execution": 3},
    "CommunicatorError": {"communicator": "link 0", "rank": 0, "peer": 1, "host": "h", "device": "cuda:0", "node": "W1.forward"},
    "TensorMismatchError": {
        "communicator": "link 0",
        "expected": "float32 [2]",
        "given": "float16 [2]",
        "graph": "g",
        "channel": "c",
        "execution": 3,
    },
    "WrongDeviceError": {"communicator": "link 0", "expected": "cuda:0", "given": "cpu"},
    "TransferTimeoutError": {"communicator": "link 0", "limit_s": 1.5, "waits_for": "rank 1"},
    "RankMissingError": {"communicator": "link 0", "limit_s": 1.5, "missing": (1, 2)},
    "PeerDiedError": {"communicator": "link 0", "rank": 0, "peer": 1},
    "CommunicatorClosedError": {"communicator": "link 0", "rank": 0},
    "CollectiveError": {
        "graph": "g",
        "collective": "allreduce SUM #2",
        "execution": 3,
        "tensors": ("rank 0 (W1): torch", "rank 1"),
    },
    "CapacityExceededError": {"graph": "g", "limit": 5, "count": 5},
    "SerializationError": {"path": "value['a'][3]", "type_name": "lock", "channel": "c"},
    "SharedMemoryError": {"graph": "g", "wanted_bytes": 1, "free_bytes": 2, "limit_bytes": 3, "holders": "W1 1 MiB"},
}
DUAL = {
    "ChannelTimeoutError": "RayChannelTimeoutError",
    "ChannelClosedError": "RayChannelError",
    "ActorDiedError": "ActorDiedError",
    "CapacityExceededError": "RayCgraphCapacityExceeded",
}


def classes() -> list[type[errors.RaycommError]]:
    return [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.RaycommError)]


def dual(name: str) -> Any:
    import raycomm.runtime.ray_errors as of_driver

    return getattr(of_driver, name)


def copies(error: BaseException) -> list[BaseException]:
    by_pickle = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [*by_pickle, cloudpickle.loads(cloudpickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


def check(cls: Any, attributes: dict[str, Any]) -> None:
    error = cls("what happened; what to do", **attributes)
    for other in [error, *copies(error)]:
        assert type(other) is cls
        assert str(other) == "what happened; what to do"
        assert other.args == ("what happened; what to do",)
        assert other.attributes == attributes
        for name, value in attributes.items():
            assert getattr(other, name) == value


def test_the_table_names_every_class() -> None:
    assert {cls.__name__ for cls in classes()} == set(ATTRIBUTES)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_ours_pickle(name: str) -> None:
    check(getattr(errors, name), ATTRIBUTES[name])


@pytest.mark.parametrize("name", DUAL)
def test_the_drivers_pickle(name: str) -> None:
    check(dual(name), ATTRIBUTES[name])


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_are_not_given_have_a_default(name: str) -> None:
    cls = getattr(errors, name)
    error = cls("text")
    for attribute in ATTRIBUTES[name]:
        assert getattr(error, attribute) in (None, ())
    assert error.attributes == {}
    assert str(cls()) == ""


@pytest.mark.parametrize(("name", "rays"), DUAL.items())
def test_the_drivers_are_rays_too(name: str, rays: str) -> None:
    import ray.exceptions

    cls, base = dual(name), getattr(ray.exceptions, rays)
    error = cls("text", **ATTRIBUTES[name])
    try:
        raise error
    except base as caught:
        assert caught is error
    assert isinstance(error, getattr(errors, name))
    assert cls.__name__ == name


def test_rays_own_attributes_are_there() -> None:
    """Code that catches Ray's classes reads these."""
    died = dual("ActorDiedError")("text", actor_id="ab", pid=1)
    assert (died.actor_id, died.error_msg, died.preempted, died.actor_init_failed) == ("ab", "text", False, False)
    assert dual("ActorDiedError")("text").actor_id is None
    timed_out = dual("ChannelTimeoutError")("text")
    assert (timed_out.client_exc, timed_out.traceback_str) == ("text", None)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("CompileError", ValueError),
        ("ArgumentError", ValueError),
        ("DeadlockError", errors.CompileError),
        ("ChannelTimeoutError", TimeoutError),
        ("SerializationError", TypeError),
        ("SharedMemoryError", MemoryError),
    ],
)
def test_builtin_bases(name: str, base: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), base)
    assert issubclass(getattr(errors, name), errors.RaycommError)


def test_notes_travel() -> None:
    error = errors.CompileError("text", node="n")
    error.add_note("said later")
    again = pickle.loads(pickle.dumps(error))
    assert (again.__notes__, again.node, str(again)) == (["said later"], "n", "text")
