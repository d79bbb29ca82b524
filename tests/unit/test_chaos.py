"""The parts of the chaos run that need no Ray: values, the reference, and the graphs it draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from raycomm.codec import decode, encode
from tests.chaos.graphs import Call, Const, Draw, Exchange, Input, Result, Spec, inputs_of
from tests.chaos.reference import Failed, evaluate
from tests.chaos.values import Record, digest, draw, draw_unsendable, holds_unsendable, same, scribble


def test_the_same_seed_draws_the_same_value(seed: int) -> None:
    for number in range(200):
        one, other = (draw(random.Random(seed + number), 5000) for _ in range(2))
        assert digest(one) == digest(other), f"seed {seed + number}: {one!r}"


def test_digest_and_equality_see_one_changed_bit() -> None:
    for value, changed in (
        (np.zeros(9), np.array([0.0] * 8 + [-0.0])),
        (torch.zeros(9), torch.zeros(3, 3)),
        (torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)),
        ([1, (2, {"a": 3})], [1, (2, {"a": True})]),
        (b"abc", bytearray(b"abc")),
        (1, 1.0),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (Record("r", np.arange(3)), Record("r", np.arange(1, 4))),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)),
        (np.zeros(1, "M8[s]"), np.zeros(1, "M8[ms]")),
    ):
        assert same(value, value)
        assert not same(value, changed)
        assert digest(value) != digest(changed)


def test_what_is_scribbled_over_differs() -> None:
    for value in (bytearray(b"abc"), np.arange(5), torch.arange(5), [np.zeros(3)], {"a": bytearray(b"x")}):
        before = digest(value)
        scribble(value)
        assert digest(value) != before


def test_unsendable_values_are_refused_by_the_codec(rng: random.Random) -> None:
    for _ in range(20):
        value = draw_unsendable(rng)
        with pytest.raises(TypeError):
            encode(value)


def spec_of(*steps: Any, outputs: list[Any]) -> Spec:
    return Spec(own_input=True, inputs=[None], steps=list(steps), outputs=outputs)


def call(actor: int, method: str, *args: Any, returns: int = 1) -> Call:
    return Call(actor, method, args, {}, returns, True, {})


def test_the_reference_computes_and_fails() -> None:
    whole = Input(None)
    spec = spec_of(
        call(0, "defaults", whole, Const(5)),
        call(1, "split", Result(0, 0), Const(2), returns=2),
        call(0, "miscount", whole, Const(1), returns=2),
        call(0, "fail", whole, Const(1)),
        call(1, "pack", Result(3, 0), Result(2, 0)),
        outputs=[Result(0, 0), Result(1, 0), Result(1, 1), Result(2, 1), Result(4, 0), whole],
    )
    made, first, second, miscounted, packed, passed = evaluate(spec, ["x"], {})
    assert made == ["x", 5, "l"]
    assert (first, second, passed) == (made, digest(made), "x")
    assert isinstance(miscounted, Failed)
    assert miscounted.admits(ValueError("A.m is declared to return 2 values and returned 3"))
    assert not miscounted.admits(ValueError("something else"))
    assert isinstance(packed, Failed)
    assert packed.admits(LookupError(f"no luck with {digest('x')}"))
    assert packed.ways > miscounted.ways


def test_the_reference_knows_where_a_value_must_travel() -> None:
    whole = Input(None)
    spec = spec_of(
        call(0, "hide", whole, Const(1)),
        call(0, "summary", Result(0, 0)),
        call(1, "summary", Result(0, 0)),
        outputs=[Result(0, 0), Result(1, 0), Result(2, 0)],
    )
    out, beside, away = evaluate(spec, [3], {})
    assert isinstance(out, Failed)
    assert isinstance(beside, str)
    assert isinstance(away, Failed)
    assert holds_unsendable({"a": [out, evaluate(spec_of(spec.steps[0], outputs=[]), [3], {})]}) is False


def test_the_reference_exchanges() -> None:
    whole = Input(None)
    tensors = [call(actor, "tensor", whole, Const(4), Const(kind)) for actor, kind in ((0, "int64"), (1, "int64"))]
    ranks = ((0, Result(0, 0)), (1, Result(1, 0)))
    for kind, op in (("allreduce", "sum"), ("allgather", None), ("reducescatter", "max"), ("broadcast", None)):
        spec = spec_of(*tensors, Exchange(kind, op, 1, ranks), outputs=[Result(2, 0), Result(2, 1), Result(0, 0)])
        first, second, given = evaluate(spec, [1], {})
        expected = {"allreduce": given * 2, "allgather": torch.cat([given, given]), "broadcast": given}
        if kind == "reducescatter":
            assert torch.equal(torch.cat([first, second]), given)
        else:
            assert torch.equal(first, expected[kind])
            assert torch.equal(second, expected[kind])


def test_drawn_graphs_make_sense(seed: int) -> None:
    """Each can be computed, uses every call, and crosses the codec unchanged."""
    methods = set()
    for number in range(60):
        spec = Draw(random.Random(seed + number), 6, lambda place: place == 3).draw()
        methods |= {step.method if isinstance(step, Call) else step.kind for step in spec.steps}
        spec.largest = min(spec.largest, 2000)
        used = {operand for step in spec.steps if isinstance(step, Call) for operand in (*step.args, *step.kwargs.values())}
        used |= {result for step in spec.steps if isinstance(step, Exchange) for _, result in step.ranks} | set(spec.outputs)
        for index, step in enumerate(spec.steps):
            elements = step.returns if isinstance(step, Call) else len(step.ranks)
            assert any(Result(index, element) in used for element in range(elements)), str(spec)
        outcomes = evaluate(spec, *inputs_of(spec, number))
        assert len(outcomes) == len(spec.outputs)
        for outcome in outcomes:
            if not isinstance(outcome, Failed):
                assert same(outcome, decode(*encode(outcome))), f"seed {seed + number}\n{spec}"
    assert len(methods) >= 14
