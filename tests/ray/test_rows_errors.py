"""Every error as it is really raised: what it names and tells to do, what it also is, and that all of it survives pickling."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import (
    ActorDiedError,
    ArgumentError,
    CapacityExceededError,
    ChannelClosedError,
    ChannelTimeoutError,
    CompileError,
    InputNode,
    MultiOutputNode,
    RaycommError,
    SerializationError,
    SharedMemoryError,
    bind,
)
from tests.ray.row_actors import Odd
from tests.ray.workers import PATIENCE_S, Gate, NeedsArguments, Opaque, Worker, start

pytestmark = pytest.mark.usefixtures("cluster")


def graph_of(*methods: Any, **options: Any) -> Any:
    with InputNode() as x:
        value: Any = x
        for method in methods:
            value = bind(method, value)
    return raycomm.compile(value, name="named", **options)


def caught(call: Callable[[], Any]) -> Any:
    with pytest.raises(Exception) as info:
        call()
    return info.value


def check_travels(error: BaseException) -> None:
    """Pickled, copied, sent through Ray and through a graph's failure: the same type, text, attributes and notes."""
    ways = [pickle.loads(pickle.dumps(error)), cloudpickle.loads(cloudpickle.dumps(error)), copy.copy(error)]
    ways.append(ray.get(ray.put([error]))[0])  # alone it would be raised
    for other in ways:
        assert type(other).__name__ == type(error).__name__
        assert str(other) == str(error)
        if isinstance(error, RaycommError):
            assert isinstance(other, RaycommError)
            assert other.attributes == error.attributes
            assert all(getattr(other, name) == value for name, value in error.attributes.items())
            assert [base for base in RAYS if isinstance(other, base)] == [base for base in RAYS if isinstance(error, base)]
        assert getattr(other, "__notes__", []) == getattr(error, "__notes__", [])


RAYS = [
    ray.exceptions.RayChannelTimeoutError,
    ray.exceptions.RayChannelError,
    ray.exceptions.ActorDiedError,
    ray.exceptions.RayCgraphCapacityExceeded,
    ray.exceptions.RayTaskError,
    ValueError,
    TypeError,
    TimeoutError,
    MemoryError,
]


def test_wrong_graphs_travel(workers: list[Any]) -> None:
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        unused = bind(workers[1].echo, a)
        error = caught(lambda: raycomm.compile(bind(workers[2].echo, a)))
    assert isinstance(error, CompileError)
    assert "WorkerBody" in str(error)
    assert error.node in str(error)
    assert error.remedy in str(error)
    check_travels(error)
    del unused
    error = caught(lambda: bind(workers[0].add))
    assert "missing a required argument" in str(error)
    check_travels(error)


def test_wrong_options_travel(workers: list[Any]) -> None:
    error = caught(lambda: graph_of(workers[0].echo, max_inflight=0))
    assert isinstance(error, CompileError)
    for part in ("max_inflight", "0", "1", "4096"):
        assert part in str(error)
    check_travels(error)


def test_wrong_arguments(workers: list[Any]) -> None:
    with InputNode() as inp:
        out = bind(workers[0].pair, inp[0], inp.k)
    with raycomm.compile(out, name="named") as graph:
        for arguments, keywords, says in (
            ((), {"k": 1}, r"takes 1 positional argument (inp[0] is used) and keyword arguments 'k', was given 0"),
            ((1, 2), {"k": 1}, "was given 2 positional arguments and keyword arguments 'k'"),
            ((1,), {}, "missing 'k'"),
            ((1,), {"k": 1, "z": 2, "y": 3}, "unknown 'z', 'y'"),
            ((), {"z": 1}, "missing 'k'"),
        ):
            error = caught(lambda arguments=arguments, keywords=keywords: graph.execute(*arguments, **keywords))
            assert isinstance(error, ArgumentError)
            assert says in str(error)
            assert "named" in str(error)
            assert error.expected in str(error)
            assert error.given
            check_travels(error)
        assert graph.execute(1, k=2).get() == ("w0", 1, 2)


@pytest.mark.parametrize("kind", ["value", "cause", "arguments", "lock", "stop"])
def test_the_users_own_exceptions_travel(workers: list[Any], kind: str) -> None:
    with InputNode() as x:
        value = bind(workers[2].echo, bind(workers[1].echo, bind(workers[0].fail, x, kind)))
    with raycomm.compile(value, name="named") as graph:
        error = caught(graph.execute(7).get)
        assert isinstance(error, ray.exceptions.RayTaskError)
        assert any("WorkerBody" in note and "fail" in note and "execution 0 of graph 'named'" in note for note in error.__notes__)
        assert "in fail" in str(error)
        if kind == "arguments":
            assert isinstance(error, NeedsArguments)
        again = caught(graph.execute(8).get)
        assert any("execution 1" in note for note in again.__notes__)


@pytest.mark.parametrize("kind", ["value", "cause", "stop"])
def test_the_users_own_exceptions_can_be_sent_on(workers: list[Any], kind: str) -> None:
    """A driver that is an actor or a task hands to its caller what it caught."""
    with InputNode() as x:
        value = bind(workers[0].fail, x, kind)
    with raycomm.compile(value, name="named") as graph:
        error = caught(graph.execute(7).get)
        sent = ray.get(ray.put([error]))[0]
        assert isinstance(sent, ray.exceptions.RayTaskError)
        assert str(sent) == str(error)
        assert type(sent.cause) is type(error.cause)


def test_a_limit_that_passes(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[0].hold, x, gate.path))
    with raycomm.compile(out, name="named", max_inflight=1) as graph:
        ref = graph.execute(1)
        gate.wait_entered()
        errors = [
            caught(lambda: ref.get(timeout=0.01)),
            caught(lambda: graph.execute(2, timeout=0.01)),
            caught(lambda: ray.get(ref, timeout=0.01)),
        ]
        for error in errors:
            assert isinstance(error, ChannelTimeoutError)
            assert error.graph == "named"
            assert error.limit_s == 0.01
            for part in ("'named'", "0.01 s", "WorkerBody", "computes", "hold", "alive", "larger"):
                assert part in str(error), (part, str(error))
            check_travels(error)
        gate.open()
        assert ref.get(timeout=PATIENCE_S) == 1


def test_use_after_teardown(workers: list[Any]) -> None:
    graph = graph_of(workers[0].echo)
    ref = graph.execute(1)
    graph.teardown()
    for call in (lambda: graph.execute(1), ref.get, lambda: ray.get(ref)):
        error = caught(call)
        assert isinstance(error, ChannelClosedError)
        assert (error.graph, error.reason) == ("named", "teardown")
        assert "compile it again" in str(error)
        check_travels(error)


def test_a_dead_actor(cluster: None) -> None:
    workers = start(2)
    graph = graph_of(workers[0].echo, workers[1].echo)
    pid = ray.get(workers[1].pid.remote())
    assert graph.execute(1).get() == 1
    os.kill(pid, signal.SIGKILL)
    for call in (lambda: graph.execute(1).get(timeout=PATIENCE_S), lambda: graph.execute(2).get(timeout=PATIENCE_S)):
        error = caught(call)
        assert isinstance(error, ActorDiedError)
        assert (error.graph, error.pid) == ("named", pid)
        for part in ("'named'", str(pid), "WorkerBody", "compile a new one"):
            assert part in str(error)
        check_travels(error)
    graph.teardown()


def test_an_actor_that_was_dead_at_compile(cluster: None) -> None:
    worker = start(1)[0]
    ray.kill(worker)
    error = caught(lambda: graph_of(worker.echo, compile_timeout=PATIENCE_S))
    assert isinstance(error, ActorDiedError)
    assert (error.graph, error.actor_id) == ("named", worker._actor_id.hex())
    assert "WorkerBody" in str(error)
    check_travels(error)


def test_too_many_results(workers: list[Any]) -> None:
    with graph_of(workers[0].echo, max_inflight=1, max_buffered_results=2) as graph:
        refs = []
        with pytest.raises(CapacityExceededError) as info:
            for value in range(10):
                refs.append(graph.execute(value))
        for part in ("'named'", "2 results", "max_buffered_results", "drop their refs"):
            assert part in str(info.value)
        check_travels(info.value)
        assert ray.get(refs) == list(range(len(refs)))


def test_an_input_that_cannot_be_sent(workers: list[Any]) -> None:
    with InputNode() as inp:
        out = bind(workers[0].pair, inp[0], inp.k)
    with raycomm.compile(out, name="named") as graph:
        error = caught(lambda: graph.execute(1, k=[0, {"deep": (Opaque(),)}]))
        assert isinstance(error, SerializationError)
        assert error.path.endswith("[1]['deep'][0]")
        assert "Opaque" in error.type_name
        assert "Opaque stays where it is" in str(error)
        check_travels(error)
        assert graph.execute(1, k=2).get() == ("w0", 1, 2)


def test_an_input_that_cannot_be_sent_names_the_channel(workers: list[Any]) -> None:
    with InputNode() as inp:
        out = bind(workers[0].pair, inp[0], inp.k)
    with raycomm.compile(out, name="named") as graph:
        error = caught(lambda: graph.execute(1, k=Opaque()))
        assert "named" in str(error)
        assert "k" in (error.channel or "")


def test_a_result_that_cannot_be_sent(workers: list[Any]) -> None:
    with graph_of(workers[0].opaque_if_odd, workers[1].echo) as graph:
        error = caught(graph.execute(1).get)
        assert isinstance(error, SerializationError)
        assert "WorkerBody" in error.channel
        assert error.path == "value['inside'][1]"
        for part in ("'named'", "opaque_if_odd", "Opaque"):
            assert part in str(error)
        assert any("execution 0" in note for note in error.__notes__)
        check_travels(error)
        assert graph.execute(2).get() == 2


def test_no_memory(workers: list[Any]) -> None:
    with graph_of(workers[0].zeros, shm_limit_bytes=2 << 20) as graph:
        error = caught(graph.execute(64 << 20).get)
        assert isinstance(error, SharedMemoryError)
        assert error.graph == "named"
        assert error.wanted_bytes >= 64 << 20
        assert error.limit_bytes == 2 << 20
        for part in ("'named'", "64.0 MiB", "zeros", "shm_limit_bytes"):
            assert part in str(error)
        check_travels(error)
        error = caught(lambda: graph.execute(np.zeros(64 << 20, np.uint8), timeout=PATIENCE_S))
        assert isinstance(error, SharedMemoryError)
        assert "the input" in str(error)
        check_travels(error)
        assert graph.execute(5).get().nbytes == 5


def test_a_wrong_number_of_returns(workers: list[Any]) -> None:
    with InputNode() as x:
        one, two = bind(workers[0].as_two, x)
    with raycomm.compile(MultiOutputNode([one, two]), name="named") as graph:
        bad, good = graph.execute([1, 2, 3]), graph.execute([1, 2])
        for ref in bad:
            error = caught(ref.get)
            assert isinstance(error, ValueError)
            assert "as_two is declared to return 2 values and returned 3 values" in str(error)
            assert any("execution 0 of graph 'named'" in note for note in error.__notes__)
        assert ray.get(good) == [1, 2]


def test_raycomm_is_missing_in_the_actor(workers: list[Any]) -> None:
    class Without:
        def __init__(self) -> None:
            for name in [name for name in sys.modules if name.split(".")[0] == "raycomm"]:
                del sys.modules[name]
            sys.modules["raycomm"] = None  # type: ignore[assignment]

        def echo(self, x: Any) -> Any:
            return x

    actor = ray.remote(num_cpus=0)(Without).remote()
    error = caught(lambda: graph_of(workers[0].echo, actor.echo))
    assert isinstance(error, CompileError)
    for part in ("'named'", "Without", "raycomm is not installed"):
        assert part in str(error)
    check_travels(error)
    with graph_of(workers[0].echo) as graph:
        assert graph.execute(1).get() == 1
    ray.kill(actor)


def test_a_method_that_is_not_there(workers: list[Any]) -> None:
    """The class promises it, the object lacks it."""

    class Loses:
        def __init__(self) -> None:
            self.gone = None  # type: ignore[assignment]

        def gone(self, x: Any) -> Any:
            return x

    actor = ray.remote(num_cpus=0)(Loses).remote()
    error = caught(lambda: graph_of(workers[0].echo, actor.gone))
    assert isinstance(error, CompileError)
    for part in ("'named'", "Loses", "'gone'"):
        assert part in str(error)
    check_travels(error)
    with graph_of(workers[0].echo) as graph:
        assert graph.execute(1).get() == 1
    ray.kill(actor)


@pytest.mark.parametrize("size", [0, 900, 5000])
def test_an_error_of_raycomms_own_passes_through_calls(workers: list[Any], size: int) -> None:
    """A value that cannot be sent early in a chain arrives as that error at its end, text and attributes whole."""
    with InputNode() as x:
        value = bind(workers[0].opaque_if_odd, x)
        for number in range(4):
            value = bind(workers[number % 3].echo, value)
    with raycomm.compile(value, name="n" * (size + 1)) as graph:
        error = caught(graph.execute(1).get)
        assert isinstance(error, SerializationError)
        assert error.path == "value['inside'][1]"
        assert graph.execute(2).get() == 2


def test_a_keyboard_interrupt_in_a_method_ends_the_actors_part(cluster: None) -> None:
    odd, worker = Odd.remote(), Worker.remote("w")
    with InputNode() as x:
        out = bind(worker.echo, bind(odd.interrupt, x))
    graph = raycomm.compile(out, name="named")
    assert graph.execute("stay").get() == "stay"
    with pytest.raises(ActorDiedError, match="OddBody"):
        graph.execute("go").get(timeout=PATIENCE_S)
    graph.teardown()
    with graph_of(worker.echo) as again:
        assert again.execute(1).get() == 1


def test_a_constant_that_cannot_be_sent(workers: list[Any]) -> None:
    import threading

    with InputNode() as x:
        out = bind(workers[0].pair, x, {"k": [threading.Lock()]})
    error = caught(lambda: raycomm.compile(out, name="named"))
    assert isinstance(error, RaycommError)
    for part in ("'named'", "pair", "argument 1", "lock"):
        assert part in str(error)
    assert "Blueprint" not in str(error)


def test_calls_from_inside_a_call_are_refused(workers: list[Any]) -> None:
    """A reducer that uses the graph which is encoding it: an error, not a deadlock."""
    with graph_of(workers[0].echo) as graph:

        class Reentrant:
            def __reduce__(self) -> Any:
                graph.execute(1).get()
                return int, ()

        error = caught(lambda: graph.execute(Reentrant()))
        assert isinstance(error, SerializationError)
        assert "called from inside one of its own calls" in str(error)
        assert graph.execute(2).get() == 2


def test_a_driver_behind_ray_client_is_told_where_to_run() -> None:
    from ray.util.client.common import ClientRemoteMethod

    method = ClientRemoteMethod(object(), "echo", 1, None)
    error = caught(lambda: bind(method, InputNode()))
    assert isinstance(error, CompileError)
    assert "Ray Client" in str(error)
    assert "on the cluster" in str(error.remedy)
