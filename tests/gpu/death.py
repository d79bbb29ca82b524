"""A rank is killed in the middle of a transfer: the other one is told, lives, and makes a new communicator with a third."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch

from raycomm.errors import PeerDiedError, TransferTimeoutError
from tests.gpu import ranks
from tests.gpu.ranks import PATIENCE_S, Ending, Part
from tests.gpu.setting import Figures, Setting, StepFailed
from tests.unit.communicator_programs import BIG, numbers
from tests.unit.communicator_ranks import CudaPlace

_LIMIT_S = 10.0  # within which the death of a peer has to be told
_SENDING_S = 1.0


def death(setting: Setting) -> Figures:
    """Ranks 0 and 1 have the link "first", of which 1 dies; 0 and a third process the link "second"."""
    parts = (Part(_survivor, 0), Part(_victim, 1, ending=Ending.KILLED), Part(_third, 1))
    survivor, _, third = ranks.run(setting, parts, setting.limit_s - 5.0)
    figures: Figures = {"ranks": setting.sharing, **survivor, "right at the third": third}
    if not (survivor["right at the survivor"] and third):
        raise StepFailed("what the survivor and the third rank exchanged afterwards is wrong", figures)
    told = survivor["told after_s"]
    if told > _LIMIT_S:
        raise StepFailed(f"PeerDiedError came after {told} s, and has to come within {_LIMIT_S:g}", figures)
    return {**figures, "summary": f"PeerDiedError after {told} s; a new communicator works"}


def _survivor(place: Any) -> Figures:
    link = place.link("first")
    link.warm_up(PATIENCE_S)
    into = place.device.stream("in")
    begin = time.monotonic()
    try:
        link.recv((_wanted(place),), torch.float32, 1, stream=into).event.synchronize(PATIENCE_S)
    except PeerDiedError as error:
        told, text = time.monotonic() - begin, str(error)
    else:
        raise AssertionError("a receive from a rank that died in the middle of it was reached as if it had come")
    return {"told after_s": round(told, 3), "told": text[:300], "right at the survivor": _exchange(place, 1)}


def _victim(place: Any) -> None:
    link = place.link("first")
    link.warm_up(PATIENCE_S)
    if _wanted(place) == BIG:
        place.die_while_sending(link, 0)
    out = place.device.stream("out")
    sent = link.send(place.device.to_device(numbers(place.rank, BIG), out), 0, stream=out)
    with suppress(TransferTimeoutError):  # NCCL may take all of it, or wait for more room at the other end
        sent.synchronize(_SENDING_S)
    place.die()


def _wanted(place: Any) -> int:
    """How many floats the survivor waits for. A GPU sends a million in less time than it takes to die, so it waits for more than
    are sent: the first have come then, and the rest never does. The stand-in refuses such a receive, and dies in between."""
    return 16 * BIG if isinstance(place, CudaPlace) else BIG


def _third(place: Any) -> bool:
    return _exchange(place, 0)


def _exchange(place: Any, peer: int) -> bool:
    """Over the second link, both ways one after the other; whether what came is right."""
    link = place.link("second")
    link.warm_up(PATIENCE_S)
    stream = place.device.stream("again")
    mine = place.device.to_device(numbers(place.rank, BIG), stream)
    came: Any = None
    for turn in (0, 1):
        if place.rank == turn:
            link.send(mine, peer, stream=stream).synchronize(PATIENCE_S)
        else:
            came = link.recv((BIG,), torch.float32, peer, stream=stream)
            came.event.synchronize(PATIENCE_S)
    return bool((place.device.to_host(came.tensor, stream, PATIENCE_S) == numbers(peer, BIG)).all())
