"""Who called what: disagreements among the newest collectives that members recorded before their job came to an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from keepstep.diagnosis.mismatch import mismatches
from keepstep.records.evidence import GroupProgress, Position, Signature
from keepstep.records.finding import Finding, Suspect
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
    progress = [_progress(names.get(key, f"{key:08x}"), ranks) for key, ranks in groups.items()]
    return [_by_history(finding, progress) for finding in mismatches(progress)]


def _by_history(finding: Finding, groups: Iterable[GroupProgress]) -> Finding:
    """Where no majority says who is wrong: who calls what nobody had called in this group before, if others do not."""
    if len(finding.suspects) != 1 or len(finding.suspects[0]) < 2 or finding.sequence is None:
        return finding
    positions = next(group.positions for group in groups if group.group == finding.group)
    usual = {s for p in positions for number, s in p.signatures.items() if number < finding.sequence}
    now = {p.rank: p.signatures.get(finding.sequence) for p in positions}
    odd = sorted(rank for rank, called in now.items() if called is not None and called not in usual)
    if not usual or not odd or len(odd) == len(now):
        return finding
    return msgspec.structs.replace(
        finding,
        suspects=tuple((Suspect(rank=rank),) for rank in odd),
        victims=tuple(sorted(set(now) - set(odd))),
        confidence=0.85,
        evidence=(*finding.evidence, f"nobody had called in this group before what ranks {odd} called now"),
    )


def _progress(name: str, ranks: dict[int, dict[int, Signature]]) -> GroupProgress:
    positions = (Position(rank=rank, started=max(made), signatures=made) for rank, made in sorted(ranks.items()))
    return GroupProgress(group=name, ranks=tuple(sorted(ranks)), positions=tuple(positions))


def _signature(call: CallMade) -> Signature:
    root = call.root if call.op in _ROOTED else None
    return Signature(op=operation_name(call.op), dtype=element_name(call.element), count=call.count, root=root)
