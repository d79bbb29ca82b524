"""What each process does, as data: made from a graph, checked, printed, read back. Imports neither Ray nor torch."""

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
from raycomm.plan.arguments import check_arguments, project, split_arguments
from raycomm.plan.deadlock import check_deadlock
from raycomm.plan.device_collectives import on_groups
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.devices import on_devices, place_hinted
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.placement import Placement, Transport, place
from raycomm.plan.places import NO_GPU, Missing, Place, no_cupy, no_nccl
from raycomm.plan.streams import DEFAULT_MAX_LINKS, assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import COMPUTE_STREAM, Backend, DeviceStreams, Group, Link, OwnBackend, Recv, Send, TensorEdge
from raycomm.plan.verify import verify

__all__ = [
    "COMPUTE_STREAM",
    "DEFAULT_MAX_LINKS",
    "NO_GPU",
    "Action",
    "ActorPlan",
    "Argument",
    "Backend",
    "Channel",
    "Collective",
    "Compute",
    "Constant",
    "DeviceStreams",
    "FromChannel",
    "FromInput",
    "Group",
    "Input",
    "Link",
    "Missing",
    "Output",
    "OwnBackend",
    "Place",
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
    "TensorEdge",
    "Transport",
    "Write",
    "assign_streams",
    "check_arguments",
    "check_deadlock",
    "lower",
    "no_cupy",
    "no_nccl",
    "on_devices",
    "on_groups",
    "overlap",
    "parse_plan",
    "place",
    "place_hinted",
    "place_on_device",
    "project",
    "split_arguments",
    "verify",
]
