"""Random graphs: what they are (`Spec`), how one is drawn, and how it is bound to actors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import raycomm
from tests.chaos.methods import PASSING
from tests.chaos.values import LARGEST, draw, draw_constant

_SMALL_SLOT = 500  # bytes
_WEIGHT = 6  # values a value may be made of
_KINDS = ("bytes", "array", "tensor")


@dataclass(frozen=True, eq=False)
class Const:
    """A constant argument."""

    value: Any

    def __repr__(self) -> str:
        return f"Const({self.value!r:.60})"


@dataclass(frozen=True)
class Input:
    """The whole input, or a part of it."""

    key: int | str | None


@dataclass(frozen=True)
class Result:
    """Element `element` of what step `step` gives."""

    step: int
    element: int


Operand = Const | Input | Result


@dataclass(frozen=True)
class Call:
    """One call of a method. `own`: bound with raycomm's bind, else with Ray's."""

    actor: int
    method: str
    args: tuple[Operand, ...]
    kwargs: dict[str, Operand]
    returns: int
    own: bool
    channel: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """A collective; element i of what it gives belongs to the actor of rank i."""

    kind: str
    op: str | None
    root: int
    ranks: tuple[tuple[int, Result], ...]  # actor, its tensor


@dataclass
class Spec:
    """A graph."""

    own_input: bool
    inputs: list[int | str | None]
    steps: list[Call | Exchange] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    single: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    largest: int = LARGEST

    def owner(self, result: Result) -> int:
        """The actor that has this value first."""
        step = self.steps[result.step]
        return step.actor if isinstance(step, Call) else step.ranks[result.element][0]

    @property
    def actors(self) -> list[int]:
        """The actors that take part."""
        return sorted(
            {actor for step in self.steps for actor in ([step.actor] if isinstance(step, Call) else [a for a, _ in step.ranks])}
        )

    def __str__(self) -> str:
        rows = [f"  inputs {self.inputs} ({'raycomm' if self.own_input else 'ray.dag'}), values up to {self.largest} B"]
        rows += [f"  {index}: {step}" for index, step in enumerate(self.steps)]
        return "\n".join([*rows, f"  outputs {'one' if self.single else 'many'} {self.outputs}", f"  options {self.options}"])


class Draw:
    """Draws one graph.

    Args:
        rng: all choices come from it.
        crew: how many actors there are.
        asynchronous: which of them are asyncio actors.
    """

    def __init__(self, rng: random.Random, crew: int, asynchronous: Any) -> None:
        self._rng = rng
        self._asynchronous = asynchronous
        self._actors = rng.sample(range(crew), rng.randint(1, crew))
        inputs: list[int | str | None] = [None]
        form = rng.random()
        if form > 0.8:
            inputs = [0, "key", "other"]
        elif form > 0.6:
            inputs = list(range(rng.randint(1, 3)))
        elif form > 0.5:
            inputs = ["x", "y"]
        self.spec = Spec(own_input=rng.random() < 0.6, inputs=inputs)
        self._weights: dict[Operand, int] = {Input(key): 1 for key in inputs}
        self._reused: set[Operand] = set()  # may hold memory that its actor fills again
        self._hidden: set[Operand] = set()  # may hold what cannot be sent

    def draw(self) -> Spec:
        """The graph."""
        rng, spec = self._rng, self.spec
        spec.largest = rng.choice((100, 2000, 2000, 100_000, LARGEST))
        shape = rng.choice(("chain", "any", "any", "any", "diamond", "fan"))
        if shape == "chain":
            self._chain(rng.randint(1, 8))
        elif shape == "diamond":
            self._diamond()
        elif shape == "fan":
            self._fan()
        else:
            for _ in range(rng.randint(1, 10)):
                self._call(rng.choice(self._actors), self._some())
        if len(self._actors) > 1 and rng.random() < 0.2:
            self._exchange()
        self._finish()
        self._options()
        return spec

    def _call(self, actor: int, given: list[Operand], method: str | None = None) -> list[Operand]:
        """Add a call of a random method; `given` has a node at least."""
        rng = self._rng
        methods = ("echo", "pack", "defaults", "summary", "grow", "lend", "reuse", "keep", "split", "slow", "fail", "miscount")
        method = method or rng.choices((*methods, "hide"), (4, 4, 3, 4, 3, 1, 2, 4, 3, 2, 2, 1, 1))[0]
        weight = sum(self._weights.get(operand, 0) for operand in given)
        local_reuse = any(operand in self._reused and self._owner(operand) == actor for operand in given)
        hidden = any(operand in self._hidden for operand in given)
        if weight > _WEIGHT or (hidden and method in ("split", "miscount")) or (local_reuse and method == "keep"):
            method = "summary"
        args: list[Operand] = given if method in ("pack", "summary", "defaults") else given[:1]
        kwargs: dict[str, Operand] = {}
        returns, channel = 1, {}
        if method == "pack" and rng.random() < 0.5:
            kwargs = {f"k{index}": operand for index, operand in enumerate(args[1:])}
            args = args[:1]
        elif method == "defaults" and rng.random() < 0.5:
            args = args[:2]
            kwargs = {"label": Const(f"label{rng.getrandbits(4)}")}
        elif method in ("grow", "lend", "reuse"):
            args = [args[0], Const(rng.choice((0, 10, 1023, 1025, 32767, 32768, 40000, 1 << 20)) % (self.spec.largest * 4))]
            if method == "reuse":  # memory of its own for each call: those of one actor may be read after each other
                args = [args[0], Const(args[1].value + len(self.spec.steps))]  # type: ignore[union-attr]
            elif method == "grow":
                kwargs = {"kind": Const(rng.choice(_KINDS))}
        elif method == "split":
            returns = rng.randint(2, 4)
            args = [args[0], Const(returns)]
        elif method in ("fail", "hide", "miscount"):
            returns = 2 if method == "miscount" else 1
            args = [args[0], Const(rng.randint(2, 6))]
        elif method == "slow":
            args = [args[0], Const(rng.choice((0.0005, 0.003, 0.02)))]
        elif method in ("echo", "keep") and rng.random() < 0.3:
            kwargs = {"x": args[0]}
            args = []
        if method in ("pack", "summary") and rng.random() < 0.3:
            args = [*args, Const(draw_constant(rng, 3000))]
        own = rng.random() < 0.7
        if rng.random() < 0.2:
            channel = {"inline_bytes": rng.choice((64, 500, 5000, 1 << 17)), "slots": rng.choice((1, 2, 16))}
            if rng.random() < 0.3:
                channel = {"share_tensors": True}
            if method in ("summary", "keep") and rng.random() < 0.3:
                channel = {"allow_pickle": False}
        return self._add(Call(actor, method, tuple(args), kwargs, returns, own, channel), weight, local_reuse, hidden)

    def _add(self, call: Call, weight: int, local_reuse: bool, hidden: bool) -> list[Operand]:
        self.spec.steps.append(call)
        made: list[Operand] = [Result(len(self.spec.steps) - 1, element) for element in range(call.returns)]
        passing = call.method in PASSING
        for operand in made:
            self._weights[operand] = max(1, weight) if passing else 1
        if call.method == "reuse" or (passing and local_reuse):
            self._reused.update(made)
        if call.method == "hide" or (passing and hidden):
            self._hidden.update(made)
        return made

    def _owner(self, operand: Operand) -> int | None:
        return self.spec.owner(operand) if isinstance(operand, Result) else None

    def _results(self) -> list[Operand]:
        return [
            Result(index, element)
            for index, step in enumerate(self.spec.steps)
            for element in range(step.returns if isinstance(step, Call) else len(step.ranks))
        ]

    def _some(self) -> list[Operand]:
        """One to four nodes, later ones more often, some twice; now and then a constant among them."""
        rng = self._rng
        nodes = [*(Input(key) for key in self.spec.inputs), *self._results()[-8:]]
        picked: list[Operand] = [rng.choice(nodes) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        if len(picked) > 1 and rng.random() < 0.3:
            picked.insert(rng.randint(1, len(picked)), Const(draw_constant(rng, 300)))
        return picked

    def _chain(self, length: int) -> None:
        last: Operand = Input(self.spec.inputs[0])
        for index in range(length):
            actor = self._actors[index % len(self._actors)]
            last = self._call(actor, [last])[0]

    def _diamond(self) -> None:
        rng = self._rng
        top = self._call(rng.choice(self._actors), self._some())[0]
        for _ in range(rng.randint(1, 3)):
            arms = [self._call(rng.choice(self._actors), [top])[0] for _ in range(rng.randint(2, 4))]
            top = self._call(rng.choice(self._actors), arms, "pack")[0]

    def _fan(self) -> None:
        top = self._call(self._actors[0], [Input(self.spec.inputs[0])])[0]
        leaves = [self._call(actor, [top])[0] for actor in self._actors for _ in range(2)]
        if self._rng.random() < 0.5:
            self._call(self._actors[0], leaves, "summary")

    def _exchange(self) -> None:
        rng = self._rng
        actors = rng.sample(self._actors, rng.randint(2, len(self._actors)))
        kind = rng.choice(("allreduce", "allreduce", "allgather", "reducescatter", "broadcast"))
        op = rng.choice(("sum", "min", "max")) if kind in ("allreduce", "reducescatter") else None
        rows, dtype = len(actors) * rng.choice((1, 3, 5000)), rng.choice(("int64", "float64", "float32", "int32"))
        ranks = []
        for actor in actors:
            self.spec.steps.append(
                Call(actor, "tensor", (rng.choice(self._some_nodes()), Const(rows), Const(dtype)), {}, 1, True, {})
            )
            ranks.append((actor, Result(len(self.spec.steps) - 1, 0)))
        self.spec.steps.append(Exchange(kind, op, rng.randrange(len(actors)), tuple(ranks)))
        step = len(self.spec.steps) - 1
        for rank, actor in enumerate(actors):
            self._weights[Result(step, rank)] = 1
            if rng.random() < 0.6:
                self._call(rng.choice((actor, rng.choice(self._actors))), [Result(step, rank)])

    def _some_nodes(self) -> list[Operand]:
        return [operand for operand in self._some() if not isinstance(operand, Const)] or [Input(self.spec.inputs[0])]

    def _finish(self) -> None:
        """Every call must lead to an output, and every input that is used must be used in parts or whole."""
        rng, spec = self._rng, self.spec
        used = {operand for step in spec.steps for operand in _operands(step)}
        outputs: list[Operand] = []
        for index, step in enumerate(spec.steps):
            made = [operand for operand in self._results() if isinstance(operand, Result) and operand.step == index]
            if isinstance(step, Exchange):
                outputs += [operand for operand in made if operand not in used]
            elif not any(operand in used for operand in made):
                outputs.append(rng.choice(made))
        extra = rng.random()
        if extra < 0.2:
            outputs.append(rng.choice(outputs or self._results()))  # twice
        elif extra < 0.3:
            outputs.append(rng.choice(self._results()))
        elif extra < 0.4:
            outputs.append(Input(rng.choice(spec.inputs)))
        rng.shuffle(outputs)
        spec.outputs = outputs
        spec.single = len(outputs) == 1 and isinstance(outputs[0], Result) and rng.random() < 0.7
        if not any(isinstance(operand, Result) for operand in outputs):
            spec.outputs, spec.single = [self._results()[-1]], True
        reached = {operand.key for operand in (*used, *outputs) if isinstance(operand, Input)}
        last = max((key for key in reached if isinstance(key, int)), default=-1)
        spec.inputs = [key for key in spec.inputs if key in reached or (isinstance(key, int) and key < last)]

    def _options(self) -> None:
        rng = self._rng
        options: dict[str, Any] = {"max_inflight": rng.choice((1, 2, 10, 10, 10))}
        if rng.random() < 0.2:
            options["inline_bytes"] = rng.choice((64, 200, 9000, 1 << 20))
        if rng.random() < 0.15:
            options["shm_limit_bytes"] = rng.choice((1, 3, 16, 64)) << 20
        if rng.random() < 0.15:
            options["max_buffered_results"] = rng.choice((2, 5, 12))
        if rng.random() < 0.1:
            options["get_timeout"] = 0.01
        if rng.random() < 0.1:
            options["submit_timeout"] = 0.01
        if rng.random() < 0.1:
            options["share_tensors"] = True
        if rng.random() < 0.1 and not any(map(self._asynchronous, self.spec.actors)):
            options["loop_thread"] = "actor"
        if "shm_limit_bytes" in options:  # rings of large slots would alone take more than that, and compile says so
            for inline in (options, *(step.channel for step in self.spec.steps if isinstance(step, Call))):
                if inline.get("inline_bytes", 0) > _SMALL_SLOT:
                    del inline["inline_bytes"]
        # A channel from the driver needs as many slots as executions may be under way; only results have options here.
        self.spec.options = options


def _operands(step: Call | Exchange) -> list[Operand]:
    return [*step.args, *step.kwargs.values()] if isinstance(step, Call) else [result for _, result in step.ranks]


def inputs_of(spec: Spec, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """What execution `seed` is given."""
    rng = random.Random(seed)
    values = {key: draw(rng, spec.largest) for key in spec.inputs}
    args = [value for key, value in values.items() if not isinstance(key, str)]
    return args, {key: value for key, value in values.items() if isinstance(key, str)}


def bind(spec: Spec, handles: list[Any]) -> Any:
    """The nodes of a graph; the root."""
    from ray.dag import InputNode as RayInputNode
    from ray.dag import MultiOutputNode as RayMultiOutputNode

    made: list[list[Any]] = []
    with raycomm.InputNode() if spec.own_input else RayInputNode() as source:

        def node(operand: Operand) -> Any:
            if isinstance(operand, Const):
                return operand.value
            if isinstance(operand, Result):
                return made[operand.step][operand.element]
            return source if operand.key is None else source[operand.key]

        for step in spec.steps:
            if isinstance(step, Exchange):
                tensors = [node(result) for _, result in step.ranks]
                collective = getattr(raycomm, step.kind)
                named = {"op": step.op} if step.op else {"root": step.root} if step.kind == "broadcast" else {}
                made.append(collective(tensors, **named))
                continue
            method = getattr(handles[step.actor], step.method)
            if step.returns > 1:
                method = method.options(num_returns=step.returns)
            args = [node(operand) for operand in step.args]
            kwargs = {name: node(operand) for name, operand in step.kwargs.items()}
            results = raycomm.bind(method, *args, **kwargs) if step.own else method.bind(*args, **kwargs)
            elements = list(results) if step.returns > 1 else [results]
            for element in elements:
                if step.channel:
                    raycomm.with_channel_options(element, **step.channel)
            made.append(elements)
    outputs = [node(operand) for operand in spec.outputs]
    if spec.single:
        return outputs[0]
    return raycomm.MultiOutputNode(outputs) if spec.own_input else RayMultiOutputNode(outputs)
