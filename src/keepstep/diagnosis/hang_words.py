"""Plain words about an operation that blocks ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keepstep.diagnosis.waiting import Blocker

__all__ = ["about", "counted", "listed", "title", "waiting"]

_SHOWN = 12


def listed(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, with dots after the first dozen; `no rank` for none."""
    if not ranks:
        return "no rank"
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:_SHOWN])) + (", ..." if len(ordered) > _SHOWN else "")
    return f"rank {shown}" if len(ordered) == 1 else f"ranks {shown}"


def waiting(ranks: Collection[int]) -> str:
    """`rank 3 waits`, `ranks 0, 1 wait`."""
    return f"{listed(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def counted(ranks: Collection[int]) -> str:
    """`1 rank waits`, `4 ranks wait`."""
    return "1 rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"


def title(blocker: Blocker) -> str:
    """What the operation is and where: group, purpose, sequence, name."""
    if blocker.transfer is not None:
        return f"transfer from rank {blocker.transfer.source} to rank {blocker.transfer.destination}"
    group = blocker.group
    assert group is not None
    purpose = f" ({group.description})" if group.description else ""
    name = next(
        (
            position.signatures[blocker.sequence].op
            for position in group.positions
            if blocker.sequence in position.signatures
        ),
        group.kinds or "collective",
    )
    return f"group {group.group}{purpose}, {name} {blocker.sequence}"


def about(blocker: Blocker, ranks: Sequence[int]) -> str:
    """Who waits in the operation, and how far `ranks` are from it."""
    start = f"{title(blocker)}: {waiting(blocker.waiters)} in it"
    absent = [rank for rank in ranks if rank in blocker.missing]
    if blocker.group is None or not absent:
        return f"{start}; {listed(absent)} did not come" if absent else start
    reached = {position.rank: position.queued for position in blocker.group.positions}
    top = max((queued for queued in reached.values() if queued is not None), default=None)
    at = sorted({reached[rank] for rank in absent if rank in reached and reached[rank] is not None}, key=str)
    if not at:
        return f"{start}; {listed(absent)} queued nothing there"
    return f"{start}; {listed(absent)} queued up to {at[0]} only, others up to {top}"
