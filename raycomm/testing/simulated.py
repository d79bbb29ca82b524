"""A simulated device, for tests of programs that move tensors between devices, without any device.

    from raycomm.testing.simulated import Device, Group, World

    world = World(seed=7)
    left, right = Device(world, "left"), Device(world, "right")
    link = Group(world, "link", [left, right])
    world.start("left", program)     # a generator or a function: launches on streams, waits for events
    world.run()                      # to the end, or SimulatedHang says who waits for what

The clock is virtual: thousands of runs take seconds, and the seed repeats a run exactly. `simulate` runs a whole plan;
`communicators` gives a group the interface of `raycomm.device.Communicator`.
"""

from raycomm.testing.simulated_actor import Results
from raycomm.testing.simulated_communicator import SimulatedCommunicator, communicators
from raycomm.testing.simulated_device import Device, Stream, Tensor
from raycomm.testing.simulated_group import Group
from raycomm.testing.simulated_memory import Hazard, MemoryFault, Poison, SimulatedMemoryError
from raycomm.testing.simulated_operations import Event
from raycomm.testing.simulated_plan import Outcome, PlanRun, simulate
from raycomm.testing.simulated_queue import Queue
from raycomm.testing.simulated_world import Delays, SimulatedHang, World

__all__ = [
    "Delays",
    "Device",
    "Event",
    "Group",
    "Hazard",
    "MemoryFault",
    "Outcome",
    "PlanRun",
    "Poison",
    "Queue",
    "Results",
    "SimulatedCommunicator",
    "SimulatedHang",
    "SimulatedMemoryError",
    "Stream",
    "Tensor",
    "World",
    "communicators",
    "simulate",
]
