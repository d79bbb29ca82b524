"""What a user reads when there is no shared memory for a value."""

from __future__ import annotations

from raycomm import _core
from raycomm.errors import SharedMemoryError
from raycomm.plan import Plan


def shared_memory_error(error: _core.PoolFull, plan: Plan, what: str) -> SharedMemoryError:
    """The error a user sees when no block can be had: who holds how much, and what to do."""
    wanted, free, limit, errno, holders, shortage, others = error.args
    mib = 1 << 20
    amounts = [f"{plan.processes[process].label} {size / mib:.1f} MiB" for process, size in sorted(holders.items())]
    if others:
        amounts.append(f"pools of other processes {others / mib:.1f} MiB")
    held = ", ".join(amounts) or "nobody"
    system = f" (the system refused: errno {errno})" if errno else ""
    why = "Let go of received arrays and tensors, or compile with a larger shm_limit_bytes"
    if shortage == _core.SHORTAGE_CIRCULAR:
        why = (
            "Those who hold them wait for this process, so waiting would not help: one execution needs more than the limit. "
            "Compile with a larger shm_limit_bytes"
        )
    elif shortage == _core.SHORTAGE_TOO_LARGE:
        why = "It alone is larger than the limit: compile with a larger shm_limit_bytes"
    return SharedMemoryError(
        f"graph {plan.name!r}: no {wanted / mib:.1f} MiB of shared memory for {what}{system}: {free / mib:.1f} MiB "
        f"free of {limit / mib:.0f} MiB; blocks are held by: {held}. {why}",
        graph=plan.name,
        wanted_bytes=wanted,
        free_bytes=free,
        limit_bytes=limit,
        holders=held,
    )
