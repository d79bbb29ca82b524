"""What a step is told, and how it says that it failed or was left out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Figures: TypeAlias = dict[str, Any]


class StepFailed(Exception):
    """With the reason, and what was measured all the same."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


class StepSkipped(Exception):
    """With the reason."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a step runs.

    Attributes:
        gpus: of this machine that this process may use; 0 with the stand-in.
        stand_in: whether something stands in for a GPU.
        limit_s: after which the step is ended, in seconds.
        trace: where to put the trace of a profiler.
    """

    gpus: int
    stand_in: bool
    limit_s: float
    trace: str

    @property
    def kind(self) -> str:
        """Of place, see `tests.unit.communicator_ranks.place_of`."""
        return "nccl" if self.stand_in else "cuda"

    @property
    def sharing(self) -> str:
        """What two ranks have, for the record."""
        if self.stand_in:
            return "no GPU: a stand-in in host memory"
        return "two ranks on one GPU: they share its SMs and its memory" if self.gpus < 2 else "a GPU per rank"

    def to_text(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Setting:
        """What `to_text` gave."""
        return cls(**json.loads(text))
