"""For tests of programs that use graphs, and for raycomm's own: make an actor fail at a chosen point of a chosen execution.

    from raycomm.testing import Fault, Kill, Point, Stall, inject

    with inject(Fault(actor=worker, point=Point.BEFORE_WRITE, execution=3, action=Kill())):
        graph = raycomm.compile(node)

See `raycomm.testing.faults`. For programs that move tensors between devices there is a simulated one, see
`raycomm.testing.simulated`; and for graphs without a cluster, to look at their plans, `stand_in`.
"""

from typing import TYPE_CHECKING, Any

from raycomm.testing.faults import Action, Exit, ExitActor, Fault, Kill, Point, Raise, Sleep, Stall, inject

if TYPE_CHECKING:
    from raycomm.testing.stand_ins import stand_in

__all__ = ["Action", "Exit", "ExitActor", "Fault", "Kill", "Point", "Raise", "Sleep", "Stall", "inject", "stand_in"]


def __getattr__(name: str) -> Any:
    # Every actor loads this package, for its points; what makes nodes is for drivers.
    if name == "stand_in":
        from raycomm.testing.stand_ins import stand_in

        return stand_in
    raise AttributeError(f"module 'raycomm.testing' has no attribute {name!r}")
