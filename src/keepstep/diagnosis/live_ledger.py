"""The findings that are open: each is told when it begins, when more is known, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from keepstep.diagnosis.live_state import LiveFinding, Verdict, Watch
from keepstep.diagnosis.slowness import STEPS, forget_spell, usual
from keepstep.records.finding import Finding

__all__ = ["end_all", "settle"]

_CONFIRM_S = 0.4
_SURER = 0.15
_DEARER = 1.5
_OF_STEPS = ("slow:", "data:", "link:", "past:", "imbalance")


def _of_steps(key: str) -> bool:
    """Whether a finding is one that is judged step by step."""
    return key.startswith(_OF_STEPS)


def settle(watch: Watch, verdicts: Iterable[Verdict], *, now: float, step: int | None) -> Iterator[LiveFinding]:
    """Compare `verdicts` with what is open. With `step`, those judged by steps; without, those judged by time."""
    said = {verdict.key: verdict for verdict in verdicts}
    for key, verdict in said.items():
        if step is not None:
            watch.clear[key] = step
            yield from _say(watch, verdict, now=now, step=step)
        elif verdict.hard or now - watch.pending.setdefault(key, now) >= _CONFIRM_S:
            yield from _say(watch, verdict, now=now, step=watch.history.done)
    if step is None:
        watch.pending = {key: since for key, since in watch.pending.items() if key in said}
    for key in [key for key in watch.findings if _of_steps(key) == (step is not None) and key not in said]:
        if step is None and not key.startswith("silent:"):
            if watch.stepped > watch.findings[key].finding.wall:  # it stood still, and now it moves
                yield _end(watch, key, step=step)
        elif step is None or step - watch.clear.setdefault(key, step) >= STEPS:
            yield _end(watch, key, step=step)


def end_all(watch: Watch, why: str) -> Iterator[LiveFinding]:
    """End everything that is open, because of `why`."""
    watch.pending.clear()
    for key in list(watch.findings):
        yield _end(watch, key, step=None, why=why)


def _say(watch: Watch, verdict: Verdict, *, now: float, step: int) -> Iterator[LiveFinding]:
    before = watch.findings.get(verdict.key)
    finding = _identified(watch, verdict.finding, now=now, step=step)
    if before is None:
        said = LiveFinding(key=verdict.key, status="new", finding=finding, began_step=verdict.since, hard=verdict.hard)
        _anchor(watch, verdict, step=step)
    elif before.hard != verdict.hard or _more(before.finding, finding):
        said = msgspec.structs.replace(before, status="updated", finding=finding, hard=verdict.hard)
    else:
        return
    watch.findings[verdict.key] = said
    yield said


def _identified(watch: Watch, finding: Finding, *, now: float, step: int) -> Finding:
    return msgspec.structs.replace(
        finding, job=watch.plan.job, generation=max(watch.generation, 0), step=max(step, 0), wall=now
    )


def _more(before: Finding, after: Finding) -> bool:
    """Whether a finding says something else than before, or is much surer, or costs much more."""
    if (before.kind, before.layer, before.suspects) != (after.kind, after.layer, after.suspects):
        return True
    dearer = (after.cost or 0.0) > _DEARER * (before.cost or 0.0) if before.cost else False
    return after.confidence - before.confidence >= _SURER or dearer


def _anchor(watch: Watch, verdict: Verdict, *, step: int) -> None:
    """A fault that lasts must not become usual: keep what was usual before it."""
    kind, _, rank = verdict.key.partition(":")
    if not rank.isdigit():
        return
    history, number = watch.history, int(rank)
    newest = min(max(STEPS, step - (verdict.since or step) + 1), step)
    if kind == "slow":
        ratio, scatter, count = usual(history.ratio, history.judged, last=step, newest=newest)
        extra = usual(history.excess, history.judged, last=step, newest=newest)[0]
        if count:
            watch.anchors[number] = (float(ratio[number]), float(scatter[number]), float(extra[number]))
    elif kind == "data":
        waits = usual(history.extra_data, history.judged, last=step, newest=newest)[0]
        watch.data_anchors[number] = float(waits[number])


def _end(watch: Watch, key: str, *, step: int | None, why: str = "") -> LiveFinding:
    before = watch.findings.pop(key)
    watch.clear.pop(key, None)
    kind, _, rank = key.partition(":")
    if rank.isdigit() and step is not None:
        if kind == "slow":
            since = step if before.began_step is None else before.began_step
            forget_spell(watch, int(rank), since=since, step=step)
        elif kind == "data":
            watch.data_anchors.pop(int(rank), None)
    finding = before.finding
    if why:
        finding = msgspec.structs.replace(finding, evidence=(*finding.evidence, f"ended: {why}"))
    return msgspec.structs.replace(before, status="ended", finding=finding)
