"""What each process does, as data: made from a graph, checked, printed, read back. Imports neither Ray nor torch."""

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
from raycomm.plan.arguments import check_arguments, project, split_arguments
from raycomm.plan.deadlock import check_deadlock
from raycomm.plan.lowering import lower
from raycomm.plan.placement import Placement, Transport, place
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import COMPUTE_STREAM, DeviceStreams, Link, Recv, Send, StreamPolicy
from raycomm.plan.verify import verify

__all__ = [
    "COMPUTE_STREAM",
    "Action",
    "ActorPlan",
    "Argument",
    "Channel",
    "Collective",
    "Compute",
    "Constant",
    "DeviceStreams",
    "FromChannel",
    "FromInput",
    "Input",
    "Link",
    "Output",
    "Placement",
    "Plan",
    "Process",
    "Read",
    "Recv",
    "Register",
    "Release",
    "Send",
    "Signature",
    "StreamPolicy",
    "Transport",
    "Write",
    "check_arguments",
    "check_deadlock",
    "lower",
    "parse_plan",
    "place",
    "project",
    "split_arguments",
    "verify",
]
