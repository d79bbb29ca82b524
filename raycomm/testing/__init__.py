"""For tests of programs that use graphs, and for raycomm's own: make an actor fail at a chosen point of a chosen execution.

    from raycomm.testing import Fault, Kill, Point, Stall, inject

    with inject(Fault(actor=worker, point=Point.BEFORE_WRITE, execution=3, action=Kill())):
        graph = raycomm.compile(node)

See `raycomm.testing.faults`. For programs that move tensors between devices there is a simulated one, see
`raycomm.testing.simulated`; and for graphs without a cluster, to look at their plans, `stand_in`.
"""

from raycomm.testing.faults import Action, Exit, ExitActor, Fault, Kill, Point, Raise, Sleep, Stall, inject
from raycomm.testing.stand_in import stand_in

__all__ = ["Action", "Exit", "ExitActor", "Fault", "Kill", "Point", "Raise", "Sleep", "Stall", "inject", "stand_in"]
