"""Reads the text form of a plan back; the grammar is the one that `raycomm.plan.actions` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NoReturn, TypeVar

from raycomm.errors import CompileError
from raycomm.graph.model import CollectiveKind, Key, Nothing, Position, Projection, ReduceOp, Whole
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.options import StreamPolicy
from raycomm.plan.actions import (
    Action,
    ActorPlan,
    Argument,
    Channel,
    Collective,
    Compute,
    Constant,
    FromChannel,
    FromInput,
    Input,
    Output,
    Plan,
    Process,
    Read,
    Register,
    Release,
    Signature,
    Write,
)
from raycomm.plan.placement import Transport
from raycomm.plan.transfer import Backend, Carrier, DeviceStreams, Group, Link, OwnBackend, Recv, Send, TensorEdge

_Word = TypeVar("_Word", bound=StrEnum)

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[=:(),])')


def parse_plan(text: str) -> Plan:
    """The plan whose `to_text()` is `text`; empty lines and indentation do not matter.

    Raises:
        CompileError: a line is not part of a plan's text, or a part is missing; `argument` names the line.
    """
    name: str | None = None
    signature: Signature | None = None
    single: bool | None = None
    processes: list[Process] = []
    channels: list[Channel] = []
    links: list[Link] = []
    groups: list[Group] = []
    streams: list[DeviceStreams] = []
    inputs: list[Input] = []
    outputs: list[Output] = []
    bodies: list[tuple[int, int, list[Action]]] = []
    for line in _lines(text):
        match line.word():
            case "plan":
                name = line.string()
            case "signature":
                signature = Signature(None if line.accept("whole") else line.number(), tuple(line.names()))
            case "process":
                processes.append(Process(line.number(), line.string()))
            case "channel":
                channels.append(_channel(line))
            case "link":
                links.append(_link(line))
            case "group":
                groups.append(_group(line))
            case "streams":
                streams.append(_streams(line))
            case "input":
                projection = _projection(line)
                line.expect("->")
                line.expect("channel")
                inputs.append(Input(line.number(), projection))
            case "output":
                outputs.append(FromInput(_projection(line)) if line.accept("input") else _from_channel(line))
            case "returns":
                single = line.accept("one")
                if not single:
                    line.expect("list")
            case "actor":
                index = line.number()
                line.expect("registers")
                bodies.append((index, line.number(), []))
            case word:
                if not bodies:
                    line.fail("an action outside an actor")
                bodies[-1][2].append(_action(line, word))
        line.end()
    if name is None or signature is None or single is None:
        raise CompileError(
            "plan text lacks its 'plan', 'signature' or 'returns' line; pass the whole of plan.to_text()",
            remedy="pass the whole text",
        )
    by_index = {process.index: process for process in processes}
    for index, _, _ in bodies:
        if index not in by_index:
            raise CompileError(
                f"plan text has actor {index} but no process {index}; add its line",
                node=f"actor {index}",
                remedy="add the process line",
            )
    actors = tuple(ActorPlan(by_index[index], tuple(actions), registers) for index, registers, actions in bodies)
    return Plan(
        name,
        tuple(processes),
        tuple(channels),
        actors,
        tuple(inputs),
        tuple(outputs),
        single,
        signature,
        tuple(links),
        tuple(streams),
        tuple(groups),
    )


class _Line:
    """Tokens of one line, read from left to right; every reader fails with the line's number."""

    def __init__(self, number: int, text: str) -> None:
        self._number = number
        self._text = text
        self._tokens: list[str] = []
        self._next = 0
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                self.fail(f"unreadable from {text[position:]!r:.40}")
            self._tokens.append(found[1])
            position = found.end()

    def fail(self, problem: str) -> NoReturn:
        remedy = "pass text as plan.to_text() gives it"
        raise CompileError(
            f"plan text, line {self._number}: {problem}, in {self._text.strip()!r:.80}; {remedy}",
            argument=f"line {self._number}",
            remedy=remedy,
        )

    def peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self._next += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self._next += 1
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}, found {self.peek()!r}")

    def word(self) -> str:
        token = self.take()
        if not token[:1].isalpha() and token[:1] != "_":
            self.fail(f"expected a word, found {token!r}")
        return token

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal():
            self.fail(f"expected a number, found {token!r}")
        return int(token)

    def numbers(self) -> tuple[int, ...]:
        numbers = [self.number()]
        while self.accept(","):
            numbers.append(self.number())
        return tuple(numbers)

    def string(self) -> str:
        token = self.take()
        if not token.startswith('"'):
            self.fail(f"expected a quoted string, found {token!r}")
        try:
            value = json.loads(token)
        except ValueError:
            self.fail(f"malformed string {token}")
        assert isinstance(value, str)
        return value

    def name(self) -> str:
        return self.string() if self.peek().startswith('"') else self.word()

    def names(self) -> Iterator[str]:
        while self.peek():
            yield self.name()

    def numbered(self, letter: str) -> int:
        token = self.take()
        if token[:1] != letter or not token[1:].isdecimal():
            self.fail(f"expected {letter} and a number, found {token!r}")
        return int(token[1:])

    def flag(self) -> bool:
        yes = self.accept("yes")
        if not yes:
            self.expect("no")
        return yes

    def promise(self, name: str) -> bool:
        given = self.accept(name)
        if given:
            self.expect("yes")
        return given

    def one_of(self, words: type[_Word], what: str) -> _Word:
        word = next((word for word in words if self.accept(word)), None)
        if word is None:
            self.fail(f"unknown {what} {self.peek()!r}")
        return word

    def registers(self) -> tuple[int, ...]:
        registers = [self.numbered("r")]
        while self.accept(","):
            registers.append(self.numbered("r"))
        return tuple(registers)

    def argument(self) -> Argument:
        return Constant(self.numbered("c")) if self.peek().startswith("c") else Register(self.numbered("r"))

    def end(self) -> None:
        if self.peek():
            self.fail(f"surplus {self.peek()!r}")

    def back(self) -> None:
        self._next -= 1

    def followed_by(self, token: str) -> bool:
        return self._next + 1 < len(self._tokens) and self._tokens[self._next + 1] == token


def _lines(text: str) -> Iterator[_Line]:
    # Only "\n" separates lines: strings are ASCII in JSON, so nothing else that Python calls a line end can be inside one.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _Line(number, line)


def _channel(line: _Line) -> Channel:
    index, value, writer = line.number(), line.string(), line.number()
    line.expect("->")
    readers = line.numbers()
    inline_bytes, slots = (line.number() if line.accept(name) else None for name in ("inline_bytes", "slots"))
    share_tensors, allow_pickle = (line.flag() if line.accept(name) else None for name in ("share_tensors", "allow_pickle"))
    transport = Transport.SHARED_MEMORY
    if line.accept("transport"):
        line.expect("device")
        transport = Transport.DEVICE
    keeps = line.promise("sender_keeps")
    tensors = _tensors(line) if line.accept("hint") else None
    return Channel(index, value, writer, readers, inline_bytes, slots, share_tensors, allow_pickle, transport, keeps, tensors)


def _tensors(line: _Line) -> TensorEdge:
    hint = line.one_of(TensorTransport, "transport")
    device = line.one_of(TensorDevice, "device") if line.accept("device") else TensorDevice.DEFAULT
    static_shape, direct_return = line.promise("static_shape"), line.promise("direct_return")
    return TensorEdge(hint, device, static_shape, direct_return, line.string() if line.accept("because") else None)


def _link(line: _Line) -> Link:
    index, writer = line.number(), line.number()
    line.expect("->")
    readers = line.numbers()
    return Link(index, writer, readers, _carrier(line))


def _carrier(line: _Line) -> Carrier | None:
    if not line.accept("over"):
        return None
    if not line.accept("own"):
        return line.one_of(Backend, "back end")
    number, name = line.number(), line.string()
    return OwnBackend(number, name, line.numbers() if line.accept("ranks") else ())


def _group(line: _Line) -> Group:
    index, processes = line.number(), line.numbers()
    over = _carrier(line)
    return Group(index, processes, over, line.string() if line.accept("because") else None)


def _streams(line: _Line) -> DeviceStreams:
    process, policy = line.number(), line.one_of(StreamPolicy, "stream policy")
    instead_of = links = limit = None
    if line.accept("instead"):
        line.expect("of")
        instead_of, links = line.one_of(StreamPolicy, "stream policy"), line.number()
        line.expect("links")
        line.expect("limit")
        limit = line.number()
    return DeviceStreams(process, policy, instead_of, links, limit, line.numbers() if line.accept("given") else ())


def _link_and_stream(line: _Line) -> tuple[int, int | None]:
    line.expect("on")
    line.expect("link")
    return line.number(), line.number() if line.accept("stream") else None


def _from_channel(line: _Line) -> FromChannel:
    line.expect("channel")
    return FromChannel(line.number())


def _projection(line: _Line) -> Projection:
    if line.accept("whole"):
        return Whole()
    if line.accept("nothing"):
        return Nothing()
    if line.accept("position"):
        return Position(line.number())
    if not line.accept("key"):
        line.fail(f"unknown part of the input {line.peek()!r}")
    return Key(line.string())


def _action(line: _Line, word: str) -> Action:
    if word == "write":
        channels = line.numbers()
        line.expect("from")
        return Write(channels, line.registers())
    if word == "send":
        channel = line.number()
        line.expect("from")
        register = line.numbered("r")
        link, stream = _link_and_stream(line)
        return Send(channel, register, link, stream, line.accept("beside"))
    if word == "release":
        return Release(line.registers())
    line.back()
    registers = line.registers()
    line.expect("=")
    if line.peek() in ("read", "recv"):
        verb, channel = line.take(), line.number()
        if len(registers) != 1:
            line.fail(f"{verb} fills one register")
        if verb == "read":
            return Read(channel, registers[0])
        return Recv(channel, registers[0], *_link_and_stream(line))
    if line.accept("collective"):
        return _collective(line, registers)
    node = line.number()
    line.expect(":")
    method = line.name()
    line.expect("(")
    args: list[Argument] = []
    kwargs: list[tuple[str, Argument]] = []
    while not line.accept(")"):
        if args or kwargs:
            line.expect(",")
        if line.followed_by("="):
            name = line.name()
            line.expect("=")
            kwargs.append((name, line.argument()))
        elif kwargs:
            line.fail("a positional argument after a keyword argument")
        else:
            args.append(line.argument())
    awaited = line.registers() if line.accept("after") else ()
    return Compute(node, method, tuple(args), tuple(kwargs), registers, awaited)


def _collective(line: _Line, outputs: tuple[int, ...]) -> Collective:
    node, kind = line.number(), line.one_of(CollectiveKind, "collective")
    op = next((op for op in ReduceOp if line.accept(op)), None)
    root = line.number() if line.accept("root") else None
    line.expect("rank")
    rank = line.number()
    line.expect("from")
    args = line.registers()
    parts = line.numbers() if line.accept("parts") else ()
    slices = line.numbers() if line.accept("slices") else ()
    group = stream = None
    if line.accept("on"):
        line.expect("group")
        group, stream = line.number(), line.number() if line.accept("stream") else None
    return Collective(node, kind, op, root, rank, args, outputs, parts, slices, group, stream)
