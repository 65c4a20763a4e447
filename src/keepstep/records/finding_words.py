"""A finding in one line for people, and the ranks it suspects."""

from __future__ import annotations

from keepstep.records.finding import Finding, Suspect

__all__ = ["ends_of", "one_line", "ranks_of", "suspect_words"]

_MOST = 4


def ranks_of(finding: Finding) -> tuple[int, ...]:
    """The ranks among the suspects, each once, in order; ends of suspected links are none."""
    return tuple(sorted({s.rank for group in finding.suspects for s in group if s.rank is not None}))


def ends_of(finding: Finding) -> tuple[int, ...]:
    """The ranks among the suspects, and those at the ends of suspected links and sides, each once, in order."""
    suspects = [one for group in finding.suspects for one in group]
    ends = {rank for one in suspects for rank in (one.rank, one.source, one.destination, *(one.link or ()))}
    return tuple(sorted(rank for rank in ends if rank is not None))


def suspect_words(suspect: Suspect) -> str:
    """One suspect: `rank 3`, `link 3->4`, `node n1`, `sending side of rank 2`."""
    if suspect.link is not None:
        return f"link {suspect.link[0]}->{suspect.link[1]}"
    if suspect.source is not None:
        return f"sending side of rank {suspect.source}"
    if suspect.destination is not None:
        return f"receiving side of rank {suspect.destination}"
    names = (
        ("domain", suspect.domain),
        ("node", suspect.node),
        ("rank", suspect.rank),
        ("process", suspect.pid),
        ("device", suspect.device),
        ("dp", suspect.dp),
        ("tp", suspect.tp),
        ("stage", suspect.stage),
        ("ep", suspect.ep),
    )
    return " ".join(f"{name} {value}" for name, value in names if value is not None) or "unknown"


def one_line(finding: Finding) -> str:
    """Kind, suspects (those that cannot be told apart joined by `or`), layer and how sure."""
    groups = [" or ".join(suspect_words(s) for s in group[:_MOST]) for group in finding.suspects[:_MOST]]
    more = " and others" if any(len(group) > _MOST for group in (*finding.suspects, finding.suspects)) else ""
    whom = f", {' and '.join(groups)}{more}" if groups else ""
    layer = "" if finding.layer == "undetermined" else f", {finding.layer}"
    return f"{finding.kind}{whom}{layer} ({finding.confidence:.0%} sure)"
