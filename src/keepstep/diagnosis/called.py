"""Who called what: disagreements among the newest collectives that members recorded before their job came to an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from keepstep.diagnosis.mismatch import mismatches
from keepstep.records.evidence import GroupProgress, Position, Signature
from keepstep.records.finding import Finding
from keepstep.records.operations import element_name, operation_name
from keepstep.records.watch_messages import Called, CallMade

__all__ = ["disagreements"]

_ROOTED = frozenset({2, 3, 7, 8})
"""Operations with a root: reduce, broadcast, gather, scatter."""


def disagreements(told: Iterable[Called]) -> list[Finding]:
    """One `collective_mismatch` for each group whose members recorded different collectives under one sequence number.

    A member may have told several times. Only the newest generation counts: in another one sequences begin anew.
    """
    known = list(told)
    newest = max((called.generation for called in known), default=0)
    calls = [(called.rank, call) for called in known if called.generation == newest for call in called.calls]
    names = {call.hash: call.group for _, call in calls if call.group}
    groups: dict[int, dict[int, dict[int, Signature]]] = defaultdict(lambda: defaultdict(dict))
    for rank, call in calls:
        groups[call.hash][rank][call.sequence] = _signature(call)
    return mismatches(_progress(names.get(key, f"{key:08x}"), ranks) for key, ranks in groups.items())


def _progress(name: str, ranks: dict[int, dict[int, Signature]]) -> GroupProgress:
    positions = (Position(rank=rank, started=max(made), signatures=made) for rank, made in sorted(ranks.items()))
    return GroupProgress(group=name, ranks=tuple(sorted(ranks)), positions=tuple(positions))


def _signature(call: CallMade) -> Signature:
    root = call.root if call.op in _ROOTED else None
    return Signature(op=operation_name(call.op), dtype=element_name(call.element), count=call.count, root=root)
