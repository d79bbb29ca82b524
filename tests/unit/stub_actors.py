"""Stand-ins for Ray's actor handles: they have the attributes that `raycomm.graph.actor` reads, and nothing else."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class StubId:
    def __init__(self, text: str) -> None:
        self._text = text

    def hex(self) -> str:
        return self._text


@dataclass
class StubMethod:
    """Like `ray.actor.ActorMethod`."""

    _actor: Any
    _method_name: str
    _num_returns: Any
    _signature: list[inspect.Parameter] | None

    def options(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(_actor_method=self, _options=options)


class StubHandle:
    """Like `ray.actor.ActorHandle` of an actor of class `cls`; two handles with one `actor_id` name one actor."""

    def __init__(self, cls: type, actor_id: str | None = None) -> None:
        self._cls = cls
        self._actor_id = StubId(actor_id or hashlib.sha256(cls.__name__.encode()).hexdigest()[:32])
        self._ray_dag_bind_index = 0
        self._ray_actor_creation_function_descriptor = SimpleNamespace(class_name=cls.__name__)
        trace = inspect.Parameter("_ray_trace_ctx", inspect.Parameter.KEYWORD_ONLY, default=None)
        self._ray_method_signatures: dict[str, list[inspect.Parameter]] = {}
        for name, method in vars(cls).items():
            if callable(method) and not name.startswith("_"):
                parameters = list(inspect.signature(method).parameters.values())[1:]
                keywords = [parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
                plain = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
                self._ray_method_signatures[name] = [*plain, trace, *keywords]

    def __getattr__(self, name: str) -> StubMethod:
        signatures = self.__dict__.get("_ray_method_signatures", {})
        if name not in signatures:
            raise AttributeError(name)
        returns = getattr(getattr(self._cls, name), "num_returns", 1)
        return StubMethod(self, name, returns, signatures[name])


def actor(name: str = "W1", actor_id: str | None = None) -> Any:
    """A handle of a new actor of a class called `name`, with methods `forward`, `join`, `split` (two returns) and `scale`."""

    def forward(self: Any, x: Any) -> Any:
        return x

    def join(self: Any, *parts: Any, **named: Any) -> Any:
        return parts, named

    def split(self: Any, x: Any) -> Any:
        return x, x

    def scale(self: Any, x: Any, factor: int = 1, *, offset: int = 0) -> Any:
        return x * factor + offset

    def stream(self: Any, x: Any) -> Any:
        yield x

    split.num_returns = 2  # type: ignore[attr-defined]
    stream.num_returns = "streaming"  # type: ignore[attr-defined]
    methods = {"forward": forward, "join": join, "split": split, "scale": scale, "stream": stream}
    return StubHandle(type(name, (), methods), actor_id)
