"""What can be said of edges, on nodes of raycomm and of `ray.dag`: `with_channel_options`, and `after`, edges without a value."""

from __future__ import annotations

from typing import Any, Never

from raycomm.errors import CompileError
from raycomm.graph.channel_options import FOREIGN_AFTER, FOREIGN_OPTIONS, ChannelOptions
from raycomm.graph.kinds import kind_of, looks_foreign
from raycomm.graph.nodes import MethodNode, MethodOutputNode, ValueNode, is_own


def with_channel_options(
    node: Any,
    *,
    inline_bytes: int | None = None,
    slots: int | None = None,
    share_tensors: bool | None = None,
    allow_pickle: bool | None = None,
    sender_keeps: bool | None = None,
    streams: tuple[int, int] | None = None,
    **unknown: Never,
) -> Any:
    """Set how the value of `node` travels, in place of the graph's options; returns the node itself.

    The settings belong to the channel that carries the value from its actor, or the driver, to all its readers in other
    processes; each element of several returns has its own. Where no other process reads the value there is no channel, and they
    do nothing. What is set for the whole input holds for its parts, where these say nothing. None leaves what was set before.

    Args:
        node: a node that stands for a value, from raycomm or from `ray.dag`.
        inline_bytes: 64 to 1 MiB; a message up to this size travels in its slot, a larger one in a block of memory.
        slots: a power of two, 1 to 32768: how many messages the writer may run ahead of the slowest reader. Where the driver
            writes or reads, at least `max_inflight`: `execute` does not wait for readers, and the driver takes results only when
            it is asked for them. Takes `slots` times `inline_bytes`.
        share_tensors: several processes see one copy of a large tensor; promises that none of them writes to it.
        allow_pickle: False refuses a value that would have to be pickled.
        sender_keeps: promises that the actor never writes to what it returned; then its next call need not wait until that was
            sent. As `streams` only where the value moves between devices.
        streams: numbers of the streams that sends and receives of this value are launched on, at the sender and at the reader,
            in place of what the stream policy chooses. 0 is the one that calls run on.

    Raises:
        CompileError: not a node of a value, an unknown option, or a value out of range; names the node and the option.
    """
    given: dict[str, Any] = {
        "inline_bytes": inline_bytes,
        "slots": slots,
        "share_tensors": share_tensors,
        "allow_pickle": allow_pickle,
        "sender_keeps": sender_keeps,
        "streams": streams,
        **unknown,
    }
    if isinstance(node, ValueNode):
        return node.with_channel_options(**given)
    if is_own(node) or not looks_foreign(node):
        shown = repr(node) if is_own(node) else kind_of(node)
        remedy = "give a node that stands for a value; for several returns, each of the nodes that bind gave"
        raise CompileError(f"with_channel_options: {shown} has no channel; {remedy}", node=shown, argument="node", remedy=remedy)
    attributes = vars(node)
    options = ChannelOptions.checked(type(node).__name__, **given)
    attributes[FOREIGN_OPTIONS] = options.over(attributes.get(FOREIGN_OPTIONS))
    return node


def after(node: Any, *others: Any) -> Any:
    """Run the call of `node` only once the values of `others` are there, without giving them to it; returns `node`.

    So a method that takes nothing can begin a graph, and its executions take no argument:

        with InputNode() as start:
            batch = after(bind(loader.next), start)
        graph.execute()

    The whole input stands for the beginning of an execution and adds no argument; a part of it has to be given to `execute` as
    any other. A call runs also where what it waits for has failed, but not in a cancelled execution (`ref.cancel`). What only
    others wait for has to be used or be a result too.

    Args:
        node: what `bind` of raycomm or of `ray.dag` gave; one of the elements, where it gave several, stands for their call.
        others: nodes that stand for values.

    Raises:
        CompileError: `node` is no call.
    """
    call = node.call if isinstance(node, MethodOutputNode) else node
    if isinstance(call, MethodNode):
        call.after(*others)
    elif not is_own(node) and hasattr(type(node), "is_class_method_call"):
        call = node if node.is_class_method_call else node.class_method_call
        attributes = vars(call)
        attributes[FOREIGN_AFTER] = (*attributes.get(FOREIGN_AFTER, ()), *others)
    else:
        shown = repr(node) if is_own(node) else kind_of(node)
        remedy = "give a node that bind made"
        raise CompileError(f"raycomm.after: {shown} is no call; {remedy}", node=shown, argument="node", remedy=remedy)
    return node
