"""How a plan is refused: one form of message for every rule."""

from __future__ import annotations

from typing import NoReturn

from raycomm.errors import CompileError
from raycomm.plan.actions import Action, ActorPlan

_REMEDY = "use the plan that lower() makes of the graph"


def where(actor: ActorPlan, action: Action) -> str:
    """What messages call an action: its actor, then its text."""
    return f"{actor.process.label}: {action}"


def refuse_action(actor: ActorPlan, action: Action, problem: str) -> NoReturn:
    refuse(where(actor, action), problem)


def refuse(place: str, problem: str) -> NoReturn:
    raise CompileError(f"inconsistent plan, at {place}: {problem}; {_REMEDY}", node=place, remedy=_REMEDY)
