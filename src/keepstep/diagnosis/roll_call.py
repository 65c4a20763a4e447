"""Ranks and processes that another tool calls dead, absent, behind or failed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keepstep.records.evidence import Place, Reporter
from keepstep.records.finding import Finding, FindingKind, Layer, Suspect

__all__ = ["diagnose_reporters", "unclear_finding"]

_REMOTE_ERROR = re.compile(r" 6$|remote", re.IGNORECASE)
"""ncclRemoteError, as a number or in words: somebody else failed, so the rank that reports it is a victim."""

_WHAT: dict[str, tuple[FindingKind, Layer, float, str]] = {
    "dead": ("crash", "undetermined", 0.85, "exit status and log of the process, kernel log and state of its host"),
    "absent": (
        "reporter_silent",
        "undetermined",
        0.8,
        "is the process alive (state, stack), and does its host answer?",
    ),
    "failed": ("crash", "undetermined", 0.6, "log of this process around the error"),
    "behind": ("noncommunication_hang", "undetermined", 0.5, "ask again some seconds later; stack of the process"),
}
_ORDER = ("dead", "absent", "failed", "behind")


def diagnose_reporters(reporters: Iterable[Reporter], places: Iterable[Place] = ()) -> tuple[Finding, ...]:
    """One finding for each process that is dead, absent, failed or behind; the gravest word about it counts.

    Where only node and pid of a process are known, its rank is looked up in `places`. Ranks that merely lack entries
    (`empty`, `truncated`, `duplicate`) are no finding by themselves.
    """
    rank_of: dict[tuple[str | None, int | None], int] = {
        (place.node, place.pid): place.rank for place in places if place.pid is not None
    }
    gravest: dict[object, Reporter] = {}
    said: dict[object, list[str]] = {}
    for reporter in reporters:
        if reporter.state not in _ORDER or _is_victim(reporter):
            continue
        rank = reporter.rank if reporter.rank is not None else rank_of.get((reporter.node, reporter.pid))
        key = rank if rank is not None else (reporter.node, reporter.device, reporter.pid)
        known = gravest.get(key)
        said.setdefault(key, []).append(reporter.detail)
        if known is None or _ORDER.index(reporter.state) < _ORDER.index(known.state):
            gravest[key] = reporter
    ranks = {key for key in gravest if isinstance(key, int)}
    return tuple(
        _finding(reporter, key if isinstance(key, int) else None, said=said[key], also=len(ranks))
        for key, reporter in gravest.items()
    )


def unclear_finding(reporters: Iterable[Reporter]) -> Finding | None:
    """What a tool says is wrong without saying with whom, or errors that all come from somebody else; None if nothing.

    It counts only where nothing else is found.
    """
    some = list(reporters)
    unclear = [reporter.detail for reporter in some if reporter.state == "unclear"]
    victims = sorted({one.rank for one in some if _is_victim(one) and one.rank is not None})
    if any(map(_is_victim, some)):
        unclear.append("ranks report errors of other ranks only (ncclRemoteError); nobody reports one of its own")
    if not unclear:
        return None
    return Finding(
        kind="undetermined",
        victims=tuple(victims),
        confidence=0.3,
        evidence=tuple(dict.fromkeys(unclear)),
        next_probe="ncclras -v, twice some seconds apart: it names more ranks, and shows whether they still move",
    )


def _is_victim(reporter: Reporter) -> bool:
    return reporter.state == "failed" and _REMOTE_ERROR.search(reporter.detail) is not None


def _finding(reporter: Reporter, rank: int | None, *, said: list[str], also: int) -> Finding:
    kind, layer, confidence, probe = _WHAT[reporter.state]
    if rank is not None:
        suspect = Suspect(rank=rank)
    else:
        suspect = Suspect(node=reporter.node, device=reporter.device)
    where = [] if reporter.node is None else [f"node {reporter.node}"]
    where += [] if reporter.device is None else [f"GPU {reporter.device}"]
    where += [] if reporter.pid is None else [f"process {reporter.pid}"]
    who = "a process of unknown rank" if rank is None else f"rank {rank}"
    evidence = [f"{who}" + (f" ({', '.join(where)})" if where else ""), *dict.fromkeys(text for text in said if text)]
    if reporter.state == "dead":
        evidence.append("RAS cannot tell a process that ended from a host or a network that went away")
    return Finding(
        kind=kind,
        layer=layer,
        suspects=((suspect,),),
        confidence=confidence,
        evidence=tuple(evidence),
        next_probe=probe,
    )
