"""An ordinary channel each way between two ranks, for control records: rings in shared memory, as between two actors."""

from __future__ import annotations

import json
from typing import Any

from raycomm.channel import Address, RingLayout, ShmArena
from raycomm.options import Options
from tests.gpu.ranks import Meeting

_SLOTS = 16
_LIMIT = 64 << 20


def channels(place: Any, meeting: Meeting) -> tuple[Any, Any]:
    """The end that this rank writes and the one that it reads. Channel i is written by rank i; rank 0 has the budget."""
    rank, peer = place.rank, 1 - place.rank
    options = Options(shm_limit_bytes=_LIMIT)
    rings = [RingLayout(rank, _SLOTS, options.inline_bytes, (peer,))]
    arena = ShmArena.create(rank, rings, options, loops=2, processes=2 if rank == 0 else 0)
    mine = arena.address
    meeting.tell(f"arena {rank}", json.dumps([mine.process, mine.pid, mine.fd, mine.nonce.hex()]))
    process, pid, descriptor, nonce = json.loads(meeting.ask(f"arena {peer}"))
    arena.attach(Address(process, pid, descriptor, bytes.fromhex(nonce)))
    arena.join(0)
    meeting.wait()
    place.arena = arena  # for as long as the rank lives
    return arena.writer((rank,)), arena.reader(peer, peer, 0, drain=True)
