"""What a user reads when there is no shared memory for a value."""

from __future__ import annotations

from collections import Counter

from raycomm import _core
from raycomm.errors import SharedMemoryError
from raycomm.plan.actions import Plan

_MIB = 1 << 20
_DRIVER = 0


def shared_memory_error(error: _core.PoolFull, core: _core.Arena, plan: Plan, what: str) -> SharedMemoryError:
    """The error a user sees when no block can be had for `what` in the process of `core`: who holds how much, and what to do."""
    wanted, free, limit, errno, own_blocks, shortage, others = error.args
    holders = Counter(own_blocks)
    for process in range(len(plan.processes)):
        if process != core.process:
            in_use, blocks = _held_blocks(core, process)
            holders.update(blocks)
            others -= in_use
    amounts = [f"{plan.processes[process].label} {size / _MIB:.1f} MiB" for process, size in sorted(holders.items())]
    if others > 0:
        amounts.append(f"free in the pools of other processes, or out of sight, {others / _MIB:.1f} MiB")
    held = ", ".join(amounts) or "nobody"
    system = f" (the system refused: errno {errno})" if errno else ""
    return SharedMemoryError(
        f"graph {plan.name!r}: no {wanted / _MIB:.1f} MiB of shared memory for {what}{system}: {free / _MIB:.1f} MiB "
        f"free of {limit / _MIB:.1f} MiB; blocks are held by: {held}. {_remedy(errno, shortage, set(holders), core.process)}",
        graph=plan.name,
        wanted_bytes=wanted,
        free_bytes=free,
        limit_bytes=limit,
        holders=held,
    )


def _held_blocks(core: _core.Arena, process: int) -> tuple[int, dict[int, int]]:
    """Bytes of a process's blocks in use, and by holder; nothing if this process does not know its memory."""
    try:
        return core.held_blocks(process)
    except _core.ArenaError:
        return 0, {}


def _remedy(errno: int, shortage: int, holders: set[int], process: int) -> str:
    if errno:
        return (
            "The budget has room, but this machine or the control group of this process has no memory left: stop what uses it, "
            "give the control group more, or let go of received arrays and tensors"
        )
    if shortage == _core.SHORTAGE_CIRCULAR:
        return (
            "Those who hold them wait for this process, so waiting would not help: one execution needs more than the limit. "
            "Compile with a larger shm_limit_bytes"
        )
    if shortage == _core.SHORTAGE_TOO_LARGE:
        return "It alone is larger than the limit: compile with a larger shm_limit_bytes"
    if holders == {process} and process != _DRIVER:
        return (
            "It holds what this execution gave it until the execution is over, and what its methods keep, so waiting would not "
            "help. Compile with a larger shm_limit_bytes, or let its methods keep no views of what they were given"
        )
    if _DRIVER in holders:
        return (
            "The driver's are results that were not fetched yet, and arrays and tensors that it keeps or fills. Fetch results or "
            "drop their refs, let go of received arrays and tensors, or compile with a larger shm_limit_bytes"
        )
    return "Let go of received arrays and tensors, or compile with a larger shm_limit_bytes"
