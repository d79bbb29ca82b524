"""The driver's calls to the actors of a graph while it is set up: who answers, what a refusal means, how long is waited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
import ray.exceptions

from raycomm.channel import Deadline
from raycomm.errors import ChannelTimeoutError, CompileError
from raycomm.graph.model import Graph
from raycomm.observe.notice import Notice
from raycomm.options import Options
from raycomm.runtime import ray_errors
from raycomm.runtime.actor_thread import claims_of_others, taken

_LOOK_EVERY_S = 0.5
_ANSWER_S = 20.0
_RESTART_PAUSE_S = 0.1

# Which of them it is only the actor knows, and it does not answer.
NOT_THERE = (
    "an actor answers once it has the resources it asks for (compare `ray status`), its constructor has finished, and a plain "
    "call that it runs has returned"
)
BUSY = "an actor answers once a plain call that it runs has returned"


class Conversation:
    """With the actors of one graph, by index of their process: 1 is the first. One limit of time for all of it.

    Args:
        graph: has the actors' handles.
        labels: of the processes.
        name: the graph's.
        options: `compile_timeout` counts from here.

    Attributes:
        nonce: of the graph, once it has one: whose claims of actors' threads are its own.
    """

    def __init__(self, graph: Graph, labels: Sequence[str], name: str, options: Options) -> None:
        self._graph = graph
        self._labels = labels
        self._name = name
        self._limit_s = options.compile_timeout
        self._deadline = Deadline(options.compile_timeout)
        self._notice = Notice()
        self.nonce = b""
        self.processes = [actor.index + 1 for actor in graph.actors]
        self._reached = False

    def reach(self) -> None:
        """Wait until every actor answers; nothing to do if they have before. After this, one that dies has died during set-up.

        Constructors take their time, and an actor that is restarting is waited for.

        Raises:
            ActorDiedError, CompileError, ChannelTimeoutError: as `ask`.
        """
        if not self._reached:
            self.ask(_process_id)

    def ask(self, question: Callable[[Any], Any]) -> dict[int, Any]:
        """What `question`, called with each actor's object, returns there; by process. Blocks, and waits as `reach` does.

        Raises:
            ActorDiedError: an actor is dead.
            CompileError: an actor cannot be called, or `question` cannot be unpickled there.
            ChannelTimeoutError: not all have answered within `compile_timeout`.
        """
        calls = {self.call(process, question): process for process in self.processes}
        answers: dict[int, Any] = {}
        while calls:
            for call, process in self.next_answers(calls, NOT_THERE):
                try:
                    answers[process] = ray.get(call)
                except ray.exceptions.ActorUnavailableError:
                    self.still_waiting(f"actor {self._labels[process]} is restarting")
                    time.sleep(_RESTART_PAUSE_S)
                    calls[self.call(process, question)] = process
                except ray.exceptions.RayActorError as error:
                    raise self.died(process, str(error)) from None  # which has all of its text that helps
                except ray.exceptions.RayError as error:
                    raise self.refused(process, error) from error
        self._reached = True
        return answers

    def call(self, process: int, question: Callable[..., Any], *args: Any) -> Any:
        """Start a call of `question` with the actor's object and `args`; Ray's ref of it.

        Raises:
            CompileError: Ray does not take it.
        """
        actor = self._graph.actors[process - 1]
        handle: Any = actor.handle
        try:
            return handle.__ray_call__.remote(question, *args)
        except Exception as error:  # Ray raises no more special one for an actor that it does not know
            label = self._labels[process]
            remedy = "make the actor again after ray.init(), and bind the new handle"
            raise CompileError(
                f"graph {self._name!r} cannot be set up: Ray takes no call to actor {label} (id {actor.key}): {error}. A "
                f"handle of another cluster, or of an earlier one in this process, is of no use here; {remedy}",
                node=label,
                remedy=remedy,
            ) from error

    def next_answers(self, calls: dict[Any, int], why: str) -> list[tuple[Any, int]]:
        """Takes from `calls` those that have been answered, waiting a moment for the first of them; `why` that may take long."""
        done, _ = ray.wait(list(calls), num_returns=1, timeout=self.moment())
        if not done:
            self._refuse_lent(calls.values())
            names = ", ".join(self._labels[process] for process in sorted(calls.values()))
            self.still_waiting(f"set-up waits for {names}: {why}")
        return [(call, calls.pop(call)) for call in done]

    def moment(self) -> float:
        """How long to wait in seconds before looking at everything again."""
        return self._deadline.left(at_most=min(self._notice.left(), _LOOK_EVERY_S))

    def still_waiting(self, what: str) -> None:
        """Say so, now and then.

        Raises:
            ChannelTimeoutError: the limit has passed.
        """
        self._notice.give(lambda: f"graph {self._name!r}: {what}")
        if self._deadline.over:
            kind: type[ChannelTimeoutError] = ray_errors.ChannelTimeoutError
            raise kind(
                f"graph {self._name!r} was not ready within {self._limit_s} s: {what}; give a larger compile_timeout",
                graph=self._name,
                limit_s=self._limit_s,
                waits_for=what,
            )

    def alive(self, process: int, pid: int) -> bool:
        """Whether the actor still runs in process `pid` of the system; it may have died and restarted."""
        handle: Any = self._graph.actors[process - 1].handle
        try:
            return bool(ray.get(handle.__ray_call__.remote(_process_id), timeout=_ANSWER_S) == pid)
        except ray.exceptions.RayActorError:
            return False
        except ray.exceptions.RayError:
            return True

    def died(self, process: int, why: str) -> BaseException:
        """What to raise where an actor has died; `why` is Ray's text, or ours."""
        label = self._labels[process]
        death = ray_errors.Death.told_by(why)
        error = ray_errors.ActorDiedError(
            f"actor {label}{death.who} of graph {self._name!r} died before it was set up (make it again, and bind the new "
            f"handle): {death.cause}",
            graph=self._name,
            actor=label,
            actor_id=self._graph.actors[process - 1].key if process else None,
            pid=death.pid,
        )
        assert isinstance(error, BaseException)
        return error

    def refused(self, process: int, error: BaseException) -> CompileError:
        """What to raise where a call failed in an actor before any code of ours ran."""
        return CompileError(
            f"graph {self._name!r} cannot be set up: actor {self._labels[process]} refused: {error}. "
            "Either raycomm is not installed in its environment in the driver's version, or a constant bound in the graph, or a "
            "communicator, cannot be unpickled there",
            node=self._labels[process],
            remedy="install raycomm, and what these are made of, in the actor's environment, or pass the constant as an input",
        )

    def _refuse_lent(self, processes: Iterable[int]) -> None:
        """An actor whose thread is lent to another graph answers no call: it is refused here, or set-up would wait with it."""
        claims = claims_of_others(self.nonce)
        for process in processes:
            other = claims.get(self._graph.actors[process - 1].key)
            if other is not None:
                label = self._labels[process]
                raise CompileError(
                    f"graph {self._name!r} cannot be set up: actor {label}: {taken(other)}",
                    node=label,
                    argument="loop_thread",
                    remedy=f"tear down graph {other!r} first",
                )


def _process_id(_instance: object) -> int:
    return os.getpid()
