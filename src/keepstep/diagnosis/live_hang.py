"""A job that completes no more steps: who stands still and is waited for, or who only takes long.

When to look is relative to the job's own steps. Whom to name comes from the sequence numbers of nested groups
(`wavefront`); what it means comes from what the origin does instead: a rank that saves, validates, compiles or uses
CPU is not hung, and its peers' wait is imbalance until it lasts far longer than anything before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from keepstep.diagnosis.hang_words import counted
from keepstep.diagnosis.live_links import dead_links, held_by_links, waited_for
from keepstep.diagnosis.live_progress import fresh, group_progress, odd_one, slow_pairs, transfers
from keepstep.diagnosis.live_state import Seen, Verdict, Watch
from keepstep.diagnosis.wavefront import diagnose_hang
from keepstep.records.evidence import Place
from keepstep.records.finding import Finding, Layer, Suspect
from keepstep.records.finding_words import ends_of
from keepstep.records.ring import SpanKind

__all__ = ["hang_verdicts", "patience_s"]

_MARGIN_S = 1.0
_UNKNOWN_S = 20.0
_FAR_LONGER = 20.0
_AT_LEAST_S = 60.0
_DEAD_S, _DEAD_TIMES = 6.0, 3.0
_SURE_TIMES = 8.0
_STOPPED, _GONE = frozenset("TtZX"), frozenset("ZX")
_BUSY_S = 1.0


def patience_s(watch: Watch) -> float:
    """How long no step may end before it is looked into, in s: by the longest of the last steps.

    A step counts with the time of its quickest rank, so that waits for one that saves do not make it longer.
    """
    history = watch.history
    if history.done < 2:
        return _UNKNOWN_S
    count = min(history.done + 1, 64)
    told = history.stamp[:, history.columns(history.done, count)] >= 0
    spent = np.where(told, history.of("duration_us", history.done, count=count), np.inf).min(axis=0)
    spent = spent[np.isfinite(spent)]
    if not len(spent):
        return _UNKNOWN_S
    return float(_MARGIN_S + max(2.0 * np.median(spent), 1.2 * spent.max()) / 1e6)


def hang_verdicts(watch: Watch, now: float) -> Iterator[Verdict]:
    """What stands still at `now`. Nothing while steps end, and nothing where nobody waits for anybody."""
    stalled = now - watch.advanced
    stopped = [rank for rank, seen in watch.seen.items() if seen.progress and seen.progress.host.state in _STOPPED]
    limit = patience_s(watch)
    if stalled < (0.5 * limit if stopped else limit):
        return
    known = fresh(watch, now)
    if not known:
        return
    places = [Place(rank=rank, node=watch.seen[rank].node or None) for rank in known]
    found = diagnose_hang(group_progress(watch, known), transfers(watch, known), places=places)
    since = watch.history.done + 1
    halted = [rank for rank in stopped if rank in known]
    if halted and found:
        yield from _halted(watch, halted, found=found, now=now)
    for number, finding in enumerate(found):
        if set(halted) & {*_suspected(watch, finding), *finding.victims}:
            continue  # they wait for a process that is stopped: that is said
        if finding.kind == "noncommunication_hang":
            yield from _origins(watch, finding, now=now, limit=limit)
        elif finding.kind == "communication_hang":
            yield from _links(watch, finding, now=now, limit=limit)
        elif finding.kind == "undetermined":
            if stalled > 3 * limit:
                yield Verdict(key="hang:undetermined", finding=finding, since=since)
        elif finding.kind == "collective_mismatch":
            finding = odd_one(watch, finding, known=known)
            yield Verdict(key=f"{finding.kind}:{finding.group or number}", finding=finding, since=since)
        elif finding.kind != "reporter_silent" or not watch.seen.keys() & set(_suspected(watch, finding)):
            yield Verdict(key=f"{finding.kind}:{finding.group or number}", finding=finding, since=since)


def _halted(watch: Watch, halted: list[int], *, found: Sequence[Finding], now: float) -> Iterator[Verdict]:
    """Processes in a state that moves nothing, wherever they were stopped: before a collective, or in the middle."""
    waiting = {rank for finding in found for rank in (*_suspected(watch, finding), *finding.victims)}
    for rank in halted:
        layer, why, hard = _cause({rank: watch.seen[rank]}, now, limit=0.0)
        progress = watch.seen[rank].progress
        gone = progress is not None and progress.host.state in _GONE
        finding = Finding(
            kind="crash" if gone else "noncommunication_hang",
            layer="undetermined" if gone else layer,
            suspects=((Suspect(rank=rank),),),
            victims=tuple(sorted(waiting - set(halted))),
            confidence=0.97,
            evidence=(*why, *found[0].evidence[:3]),
            next_probe=f"who stopped the process of rank {rank}: a signal, a debugger, the kernel?",
        )
        yield Verdict(key=f"hang:{rank}", since=watch.history.done + 1, hard=hard and not gone, finding=finding)


def _origins(watch: Watch, finding: Finding, *, now: float, limit: float) -> Iterator[Verdict]:
    """One verdict for an origin: what it does decides whether it is hung."""
    ranks = _suspected(watch, finding)
    states = {rank: watch.seen[rank] for rank in ranks if rank in watch.seen}
    if not states:
        return
    key = "hang:" + ",".join(map(str, ranks[:8]))
    held = held_by_links(watch, finding, ranks=ranks)
    if held is not None:
        dead = _dead(watch, held, now=now, limit=limit)
        yield Verdict(key=key, finding=held, since=watch.history.done + 1, hard=dead)
        return
    calm = [rank for rank, seen in states.items() if _excuse(watch, seen, now=now, limit=limit)]
    if calm:
        rank = calm[0]
        excuse = _excuse(watch, states[rank], now=now, limit=limit)
        busy = Finding(
            kind="imbalance",
            layer="storage" if "saves" in excuse else "application",
            victims=finding.victims,
            confidence=0.8,
            evidence=(f"rank {rank} {excuse}; {counted(finding.victims)} for it", *finding.evidence[:3]),
            next_probe=f"nothing yet: stacks of rank {rank}, if it lasts",
        )
        yield Verdict(key="busy:" + key, since=watch.history.done + 1, finding=busy)
        return
    layer, why, hard = _cause(states, now, limit=limit)
    yield Verdict(
        key=key,
        since=watch.history.done + 1,
        hard=hard and len(ranks) == 1 and now - watch.advanced > _SURE_TIMES * watch.plan.hang_s,
        finding=msgspec.structs.replace(
            finding,
            layer=layer,
            confidence=min(0.97, finding.confidence + (0.05 if hard else 0.0)),
            evidence=(*why, *finding.evidence),
        ),
    )


def _suspected(watch: Watch, finding: Finding) -> list[int]:
    """The ranks that a finding suspects, those of a node and both ends of a path included."""
    suspects = [one for group in finding.suspects for one in group]
    nodes = {one.node for one in suspects if one.node}
    there = {rank for rank, seen in watch.seen.items() if seen.node in nodes}
    ends = {rank for one in suspects for rank in (one.rank, one.source, one.destination, *(one.link or ()))}
    return sorted({rank for rank in ends if rank is not None} | there)


def _excuse(watch: Watch, seen: Seen, *, now: float, limit: float) -> str:
    """What a rank that is waited for does instead, if that is no fault (yet); "" if it has no excuse."""
    progress = seen.progress
    if progress is None or progress.host.state in _STOPPED or progress.span == SpanKind.DATA:
        return ""
    age = progress.span_us / 1e6 + max(0.0, now - seen.told)
    longest = max(_AT_LEAST_S, _FAR_LONGER * limit)
    if progress.span == SpanKind.CHECKPOINT and age < longest:
        return f"saves a checkpoint, for {age:.0f} s so far"
    if progress.span == 0 and progress.step >= 0 and age < longest:
        return f"is between two steps (validating, saving or logging), for {age:.0f} s so far"
    compiling = watch.history.done < 1 or progress.span == SpanKind.SETUP
    if compiling and now - watch.advanced < longest:
        return "is in the first step of its job, which compiles and loads"
    if now - seen.busy_at < _BUSY_S + 0.5 and seen.busy_at > 0 and now - watch.advanced < longest:
        return "computes: its CPU time grows"
    if seen.stack and now - seen.stack_at < 1.5 and now - watch.advanced < longest:
        return "is at work: its stacks change"
    return ""


def _cause(states: dict[int, Seen], now: float, *, limit: float) -> tuple[Layer, list[str], bool]:
    """(layer, evidence, whether nothing suggests that it will move again) for ranks that stand still."""
    rank, seen = next(iter(states.items()))
    progress = seen.progress
    if progress is None:
        return "undetermined", [f"rank {rank} says nothing"], False
    if progress.host.state in _STOPPED:
        return "host_cpu", [f"the process of rank {rank} is in state {progress.host.state}: stopped or gone"], True
    if progress.span == SpanKind.DATA:
        age = progress.span_us / 1e6
        return "dataloader", [f"rank {rank} waits for its data loader, for {age:.1f} s so far"], False
    flat = now - max(seen.busy_at, seen.moved) > _BUSY_S
    still = seen.stack != 0 and now - seen.stack_at > 1.0
    why = [f"rank {rank} is in step {progress.step} and in no collective, for {progress.idle_us / 1e6:.1f} s so far"]
    if flat:
        why.append("its CPU time does not grow" + (" and its Python stacks do not change" if still else ""))
    return "application", why, flat and still


def _links(watch: Watch, finding: Finding, *, now: float, limit: float) -> Iterator[Verdict]:
    """A call that all have entered and nobody finishes: the links that pass no bytes, where they can be seen."""
    stuck, moving = slow_pairs(watch)
    if moving:
        return
    if stuck:
        finding = dead_links(watch, finding, stuck=stuck, involved={*_suspected(watch, finding), *finding.victims})
        key = "hang:link:" + ",".join(f"{a}>{b}" for a, b in stuck[:4])
    else:
        key = f"hang:{finding.group or 'transfer'}"
        receivers = [one.destination for group in finding.suspects for one in group if one.destination is not None]
        if finding.group and receivers:
            finding = held_by_links(watch, finding, ranks=receivers) or finding
    dead = _dead(watch, finding, now=now, limit=limit)
    yield Verdict(key=key, finding=finding, since=watch.history.done + 1, hard=dead)


def _dead(watch: Watch, finding: Finding, *, now: float, limit: float) -> bool:
    """Whether links have passed nothing for so long that they will not, and who waits for them is inside a call.

    Messages that ranks wait for in a circle may just not have been sent.
    """
    links = {one.link for group in finding.suspects for one in group if one.link is not None}
    circle = finding.group is None and len(links) > 1
    waits = finding.layer == "hardware_link" or waited_for(watch, ends_of(finding))
    return bool(waits) and not circle and now - watch.advanced > max(_DEAD_S, _DEAD_TIMES * limit)
