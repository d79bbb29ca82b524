"""The text form of a plan, both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycomm.errors import CompileError
from raycomm.graph.model import CollectiveKind, Key, Nothing, Position, ReduceOp, Whole
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.options import StreamPolicy
from raycomm.plan.actions import (
    ActorPlan,
    Channel,
    Collective,
    Compute,
    Constant,
    FromChannel,
    FromInput,
    Input,
    Plan,
    Process,
    Read,
    Register,
    Release,
    Signature,
    Write,
)
from raycomm.plan.placement import Transport
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Backend, DeviceStreams, Group, Link, OwnBackend, Recv, Send, TensorEdge

# Quotes, line ends of every kind, control characters, words of the grammar, lone surrogates: whatever a label can hold.
ODD = [
    '"',
    "\\",
    "a\nb",
    "a\r\nb",
    "\u2028",
    "\x85",
    "\x00",
    "",
    " ",
    "r0",
    "c1",
    "read",
    "whole",
    "é",
    "名",
    "x=y",
    "\ud800",
    "a b",
    "w->r",
    "\\n",
]

names = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=[]), max_size=8),
    st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True),
)
numbers = st.integers(0, 10**6)
some_numbers = st.lists(numbers, min_size=1, max_size=4).map(tuple)
projections = st.one_of(st.just(Whole()), st.just(Nothing()), st.builds(Position, numbers), st.builds(Key, names))
flags = st.one_of(st.none(), st.booleans())
perhaps = st.one_of(st.none(), numbers)
transports = st.sampled_from([Transport.SHARED_MEMORY, Transport.DEVICE])
hints, devices = st.sampled_from(TensorTransport), st.sampled_from(TensorDevice)
tensors = st.one_of(st.none(), st.builds(TensorEdge, hints, devices, st.booleans(), st.booleans(), st.one_of(st.none(), names)))
settings_given = (perhaps, perhaps, flags, flags, transports, st.booleans(), tensors)
channels = st.builds(Channel, numbers, names, numbers, some_numbers, *settings_given)
several = st.lists(numbers, min_size=1, max_size=3).map(tuple)
own = st.builds(OwnBackend, numbers, names, st.one_of(st.just(()), some_numbers))
over = st.one_of(st.none(), st.sampled_from(Backend), own)
links = st.builds(Link, numbers, numbers, several, over)
groups = st.builds(Group, numbers, several, over, st.one_of(st.none(), names))
policies = st.sampled_from(StreamPolicy)
given_channels = st.one_of(st.just(()), some_numbers)
streams = st.one_of(
    st.builds(DeviceStreams, numbers, policies, given=given_channels),
    st.builds(DeviceStreams, numbers, policies, policies, numbers, numbers, given_channels),
)
arguments = st.one_of(st.builds(Register, numbers), st.builds(Constant, numbers))


@st.composite
def writes(draw: st.DrawFn) -> Write:
    channels = draw(some_numbers)
    return Write(channels, draw(st.lists(numbers, min_size=len(channels), max_size=len(channels)).map(tuple)))


actions = st.one_of(
    st.builds(Read, numbers, numbers),
    st.builds(
        Compute,
        numbers,
        names,
        st.lists(arguments, max_size=4).map(tuple),
        st.lists(st.tuples(names, arguments), max_size=3).map(tuple),
        some_numbers,
        st.one_of(st.just(()), some_numbers),
    ),
    writes(),
    st.builds(Send, numbers, numbers, numbers, perhaps, st.booleans()),
    st.builds(Recv, numbers, numbers, numbers, perhaps),
    st.builds(Release, some_numbers),
    st.builds(
        Collective,
        numbers,
        st.sampled_from(CollectiveKind),
        st.one_of(st.none(), st.sampled_from(ReduceOp)),
        st.one_of(st.none(), numbers),
        numbers,
        some_numbers,
        some_numbers,
        st.one_of(st.just(()), some_numbers),
        st.one_of(st.just(()), some_numbers),
    ).flatmap(lambda action: st.one_of(st.just(action), st.builds(replace, st.just(action), group=numbers, stream=perhaps))),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of any content, consistent or not: the text form does not judge."""
    labels = draw(st.lists(names, min_size=1, max_size=4))
    processes = tuple(Process(index, label) for index, label in enumerate(labels))
    actors = tuple(ActorPlan(process, tuple(draw(st.lists(actions, max_size=5))), draw(numbers)) for process in processes[1:])
    return Plan(
        name=draw(names),
        processes=processes,
        channels=tuple(draw(st.lists(channels, max_size=4))),
        actors=actors,
        inputs=tuple(draw(st.lists(st.builds(Input, numbers, projections), max_size=3))),
        outputs=tuple(draw(st.lists(st.one_of(st.builds(FromChannel, numbers), st.builds(FromInput, projections)), max_size=3))),
        single_output=draw(st.booleans()),
        signature=draw(st.builds(Signature, st.one_of(st.none(), numbers), st.lists(names, max_size=3).map(tuple))),
        links=tuple(draw(st.lists(links, max_size=2))),
        streams=tuple(draw(st.lists(streams, max_size=2))),
        groups=tuple(draw(st.lists(groups, max_size=2))),
    )


@settings(max_examples=300, deadline=None)
@given(plans())
def test_text_is_read_back_to_an_equal_plan(plan: Plan) -> None:
    text = plan.to_text()
    assert parse_plan(text) == plan
    assert text.isascii()


@given(names)
@example("whole")
def test_every_label_survives(name: str) -> None:
    plan = Plan(
        name=name,
        processes=(Process(0, "driver"), Process(1, name)),
        channels=(Channel(0, name, 1, (0,)),),
        actors=(ActorPlan(Process(1, name), (Compute(0, name, (), ((name, Constant(0)), (name, Register(1))), (0,)),), 1),),
        inputs=(Input(0, Key(name)),),
        outputs=(FromInput(Key(name)),),
        single_output=True,
        signature=Signature(0, (name, name)),
    )
    assert parse_plan(plan.to_text()) == plan


SMALL = """\
plan "small"
signature whole
process 0 "driver"
process 1 "W"
channel 0 "input" 0 -> 1
channel 1 "W.f#0" 1 -> 0
input whole -> channel 0
output channel 1
returns one
actor 1 registers 2
  r0 = read 0
  r1 = 0:f(r0, c0, k=r0)
  write 1 from r1
  release r0, r1
"""


def test_layout_does_not_matter() -> None:
    plan = parse_plan(SMALL)
    assert plan.to_text() == SMALL
    assert parse_plan("\n\n".join(f"   {line.strip()}  \t" for line in SMALL.splitlines())) == plan


@pytest.mark.parametrize(
    ("line", "changed", "problem"),
    [
        (2, "signature", "expected a number"),
        (3, "process 0 driver", "expected a quoted string"),
        (3, 'process x "driver"', "expected a number"),
        (3, 'process 0 "driver', "unreadable"),
        (3, 'process 0 "dr\\qiver"', "malformed string"),
        (3, 'process 0 "driver" 7', "surplus '7'"),
        (5, 'channel 0 "input" 0 1', "expected '->'"),
        (5, 'channel 0 "input" 0 ->', "expected a number"),
        (5, 'channel 0 "input" 0 -> 1 slots', "expected a number"),
        (5, 'channel 0 "input" 0 -> 1 slots 2 inline_bytes 64', "surplus 'inline_bytes'"),
        (5, 'channel 0 "input" 0 -> 1 allow_pickle maybe', "expected 'no'"),
        (7, "input half -> channel 0", "unknown part of the input 'half'"),
        (8, "output 1", "expected 'channel'"),
        (9, "returns two", "expected 'list'"),
        (9, "r0 = read 0", "an action outside an actor"),
        (11, "  r0, r1 = read 0", "read fills one register"),
        (11, "  r0 = 5", "expected ':'"),
        (12, "  r1 = collective 0 allmix rank 0 from r0", "unknown collective 'allmix'"),
        (12, "  r1 = collective 0 allreduce mean rank 0 from r0", "expected 'rank'"),
        (12, "  r1 = collective 0 allreduce sum rank 0 from c0", "expected r and a number"),
        (12, "  r1 = collective 0 allreduce sum rank 0 from r0 parts", "expected a number"),
        (12, "  r1 = 0:f(k=r0, c0)", "a positional argument after a keyword"),
        (12, "  r1 = 0:f(r0 c0)", "expected ','"),
        (12, "  r1 = 0:f(r0", "expected ','"),
        (12, "  r1 = 0:f(x0)", "expected r and a number"),
        (12, "  r1 = 0:f(r0) after", "expected r and a number"),
        (12, "  r1 = 0:f(r0) after c0", "expected r and a number"),
        (12, "  r1 = 0:f(r0) before r0", "surplus 'before'"),
        (13, "  write 1", "expected 'from'"),
        (13, "  write 1 from c1", "expected r and a number"),
        (5, 'channel 0 "input" 0 -> 1 transport reference', "expected 'device'"),
        (5, 'channel 0 "input" 0 -> 1 transport device sender_keeps no', "expected 'yes'"),
        (6, "link 0 1 2", "expected '->'"),
        (6, "streams 1 ring", "unknown stream policy 'ring'"),
        (6, "streams 1 direction instead of link 9", "expected 'links'"),
        (6, "streams 1 direction instead link 9 links limit 6", "expected 'of'"),
        (6, "streams 1 link given", "expected a number"),
        (11, "  r0 = recv 0", "expected 'on'"),
        (11, "  r0 = recv 0 on link 0 stream", "expected a number"),
        (11, "  r0, r1 = recv 0 on link 0", "recv fills one register"),
        (13, "  send 1 on link 0", "expected 'from'"),
        (13, "  send 1 from r1, r2 on link 0", "expected 'on'"),
        (13, "  send 1 from r1 on link 0 below", "surplus 'below'"),
        (14, "  ^", "unreadable"),
        (14, "  17", "expected a word"),
        (14, "  drop r0", "expected r and a number"),
    ],
)
def test_malformed_line_is_named(line: int, changed: str, problem: str) -> None:
    lines = SMALL.splitlines()
    lines[line - 1] = changed
    with pytest.raises(CompileError) as caught:
        parse_plan("\n".join(lines))
    assert f"plan text, line {line}: {problem}" in str(caught.value)
    assert caught.value.argument == f"line {line}"
    assert caught.value.remedy is not None
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("line", [1, 2, 9])
def test_missing_line(line: int) -> None:
    lines = SMALL.splitlines()
    del lines[line - 1]
    with pytest.raises(CompileError, match="lacks its 'plan', 'signature' or 'returns' line; pass the whole"):
        parse_plan("\n".join(lines))


def test_actor_without_process() -> None:
    with pytest.raises(CompileError, match="actor 7 but no process 7; add its line") as caught:
        parse_plan(SMALL.replace("actor 1", "actor 7"))
    assert caught.value.node == "actor 7"


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_damaged_text_is_refused_or_read_but_never_crashes(plan: Plan, data: st.DataObject) -> None:
    text = plan.to_text()
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.sampled_from(['"', "", "r", "\n", ",", "9", "\\", "é"])) + text[place + 1 :]
    try:
        parsed = parse_plan(damaged)
    except CompileError:
        return
    assert parse_plan(parsed.to_text()) == parsed
