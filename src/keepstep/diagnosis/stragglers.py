"""Slow members in tables of step and phase times, and what only looks like one.

A culprit is late against its peers of the same role for many steps, or late against its own past for a while (a burst).
A straggler that changes from step to step, a heavy stage, or many members that are equally late are imbalance. What
stays within the noise of the table is no finding.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from keepstep.diagnosis.lateness import Lateness, lateness_of, runs_of
from keepstep.diagnosis.odd_times import in_one_unit, pauses_of, share_of
from keepstep.diagnosis.slow_nodes import nodes_of, slow_node
from keepstep.diagnosis.straggler_words import (
    Slow,
    common_stall,
    imbalance,
    slow_finding,
    too_little,
    with_doubles_said,
)
from keepstep.records.evidence import StepTiming
from keepstep.records.finding import Finding
from keepstep.records.timing_table import TimingTable, tables_of

__all__ = ["diagnose_tables", "diagnose_timings"]

_LEAST = 1.08
"""A single member is called slow from this ratio on, or five noises, whichever is more."""
_LEAST_OF_MANY = 1.15
"""Several equally late members are spoken of from this ratio on."""
_LEAST_BURST = 1.2
_SHORTEST_SPELL = 20
_SPIKE = 1.25
_FEWEST_STEPS = 5
_STALL = 1.5
_UNEVEN = 0.08
"""A noise above this, with no member that stands out: steps are uneven work."""
_BY_CHANCE = 0.01
_MOST_PAUSES = 6
_SURE_OF_UNITS = 0.6
_SURE_OF_WHOLE_STEPS = 0.5
_WHOLE_STEPS = "whole steps only: in synchronous training all members show the slowest, so that this table hides it"
_PHASES = "times of the phases of each member: forward, backward, data, communication"

_ORDER = ("compute", "forward", "backward", "data", "checkpoint", "optimizer", "gc", "validation")
"""Phases that a member spends by itself, in which it cannot be held up by others; these decide first."""
_SHARED = ("communication",)


def diagnose_timings(timings: Iterable[StepTiming]) -> tuple[Finding, ...]:
    """Findings from single timings; see diagnose_tables."""
    return diagnose_tables(tables_of(timings))


def diagnose_tables(tables: Iterable[TimingTable]) -> tuple[Finding, ...]:
    """Findings from tables of the phases of one job; a `healthy` one if they show nothing, none without tables.

    Phases that are a member's own decide before the time of the whole step, in which all members of a synchronous job
    show the slowest; time in communication counts only where nothing else is known, and then the other way round:
    who waits least is late.
    """
    united, other_units = in_one_unit(list(tables))
    known = [(table, lateness) for table in united if (lateness := _usable(table)) is not None]
    if not known:
        return (too_little(),) if united else ()
    found: list[Finding] = []
    own = [pair for pair in known if pair[0].phase not in ("step", *_SHARED)]
    for table, lateness in sorted(own, key=_rank_of_phase):
        found += _of_phase(table, lateness, share=share_of(table, known))
    if not _names_somebody(found):
        for table, lateness in known:
            if table.phase == "step":
                found += _of_phase(table, lateness)
            elif table.phase in _SHARED and not _names_somebody(found):
                found += _least_waiting(table, lateness)
    named = _strongest(found) or [_healthy(known)]
    return with_doubles_said([_with_units_said(finding, other_units) for finding in named], known)


def _with_units_said(finding: Finding, notes: tuple[str, ...]) -> Finding:
    """The finding with what was said of units; the times behind it may then be others than they seem."""
    if not notes:
        return finding
    sure = min(finding.confidence, _SURE_OF_UNITS)
    return msgspec.structs.replace(finding, confidence=sure, evidence=(*finding.evidence, *notes))


def _usable(table: TimingTable) -> Lateness | None:
    lateness = lateness_of(table)
    if lateness is None or len(lateness.steps) < _FEWEST_STEPS:
        return None
    return lateness


def _rank_of_phase(pair: tuple[TimingTable, Lateness]) -> int:
    return _ORDER.index(pair[0].phase) if pair[0].phase in _ORDER else len(_ORDER)


def _names_somebody(findings: list[Finding]) -> bool:
    return any(finding.suspects for finding in findings)


def _strongest(findings: list[Finding]) -> list[Finding]:
    """One finding for each suspect and layer (the most certain), before those that suspect nobody."""
    kept: dict[object, Finding] = {}
    for finding in sorted(findings, key=lambda item: -item.confidence):
        kept.setdefault((finding.suspects, finding.layer if finding.suspects else finding.kind), finding)
    named = [finding for finding in kept.values() if finding.suspects]
    return named + [finding for finding in kept.values() if not finding.suspects]


def _of_phase(table: TimingTable, lateness: Lateness, *, share: float = 1.0) -> list[Finding]:
    """Findings of one phase: nodes that are slow as a whole, then members. `share`: of the step that it takes."""
    if _share_of_step(table, lateness) < 0.01:
        return []
    found, there = _of_nodes(table, lateness)
    slow = [item for item in _slow(lateness) if item.row not in there]
    if len(slow) > max(2, len(lateness.members) // 4) or _alike(lateness, slow):
        return [*found, *([imbalance(table, lateness, slow=slow)] if _worth(slow) else [])]
    if slow or found:
        chance = _rotation(lateness)
        return [*found, *(slow_finding(table, lateness, item=item, by_chance=chance) for item in slow)]
    stall = common_stall(table, lateness, least=_STALL)
    if stall is not None:
        return [stall]
    if _rotation(lateness, share) > 0.2 or lateness.noise * share > _UNEVEN:
        return [imbalance(table, lateness, slow=[])]
    return [imbalance(table, lateness, slow=heavy)] if (heavy := _heavy_role(lateness)) else []


def _of_nodes(table: TimingTable, lateness: Lateness) -> tuple[list[Finding], set[int]]:
    """Findings about nodes all of whose members are late, and the rows of these members."""
    nodes = nodes_of(table, lateness)
    slow = [] if nodes is None else _slow(nodes.lateness)
    if nodes is None or len(slow) > max(1, len(nodes.names) // 4) or _alike(nodes.lateness, slow):
        return [], set()
    found: list[Finding] = []
    there: set[int] = set()
    for item in slow:
        finding = slow_node(table, lateness, nodes=nodes, item=item)
        if finding is not None:
            found.append(finding)
            there.update(nodes.rows[item.row].tolist())
    return found, there


def _slow(lateness: Lateness) -> list[Slow]:
    """Rows that are late in most of the steps, or for a while."""
    slow = _persistent(lateness)
    known = {item.row for item in slow}
    return [*slow, *_one_of_each(_bursts(lateness, known), _spells(lateness, known))]


def _persistent(lateness: Lateness) -> list[Slow]:
    """Members that are late in most of the steps."""
    least = max(_LEAST, 1 + 6 * lateness.noise / np.sqrt(len(lateness.steps)))  # nearly 5 deviations of a median
    usual = np.nanmedian(np.where(np.isfinite(lateness.ratio), lateness.ratio, np.nan), axis=1)
    spread = _spread(usual)
    found = []
    for row in np.flatnonzero(usual >= max(least, 1 + 4 * spread)):
        late = lateness.ratio[row] > (1 + usual[row]) / 2
        share = float(np.nanmean(np.where(np.isfinite(lateness.ratio[row]), late, np.nan)))
        others = np.sort(np.delete(usual, row))[-1] - 1
        alone = usual[row] >= _LEAST_OF_MANY or usual[row] - 1 > 2 * others
        if share >= 0.6 and alone:
            found.append(Slow(int(row), float(usual[row]), 0, len(lateness.steps) - 1, share))
    return found


def _spread(usual: np.ndarray) -> float:
    """Robust spread of what is usual on the members, without the upper quarter (that may be the slow ones)."""
    lower = np.sort(usual)[: max(1, int(len(usual) * 0.75))]
    return 1.4826 * float(np.nanmedian(np.abs(lower - np.nanmedian(lower))))


def _bursts(lateness: Lateness, known: set[int]) -> list[Slow]:
    """Members that are late against their own past for a while: several samples close together."""
    usual = np.nanmedian(lateness.ratio, axis=1)
    own = lateness.ratio / np.maximum(usual, 1e-12)[:, None]
    least = max(_LEAST_BURST, 1 + 6 * lateness.noise)
    fewest = _fewest_late(own > least)
    found = []
    for row in range(len(lateness.members)):
        if row in known:
            continue
        high = own[row] > least
        for first, last in runs_of(high, gap=3):
            inside = own[row, first : last + 1]
            count = int(high[first : last + 1].sum())
            if count >= fewest and count * 2 >= last - first + 1:
                rank = float(np.nanmedian(inside[high[first : last + 1]])) * float(usual[row])
                found.append(Slow(row, rank, first, last, count / (last - first + 1)))
    return found


def _spells(lateness: Lateness, known: set[int]) -> list[Slow]:
    """Members that become a little slower and stay so for long: seen in medians of many steps, not in single ones."""
    steps = len(lateness.steps)
    width = max(_SHORTEST_SPELL, steps // 10)
    if steps < 3 * width or np.isnan(lateness.ratio).any():
        return []
    middle = np.median(np.lib.stride_tricks.sliding_window_view(lateness.ratio, width, axis=1), axis=2)
    before = np.percentile(middle, 25, axis=1)
    least = max(1.1, 1 + 8 * lateness.noise / np.sqrt(width))
    rise = middle / np.maximum(before, 1e-12)[:, None]
    found = []
    for row in np.flatnonzero(rise.max(axis=1) > least):
        if int(row) in known or np.count_nonzero(rise.max(axis=1) > least) > max(1, len(rise) // 8):
            continue
        high = np.flatnonzero(rise[row] > least)
        first = int(high[0]) + width // 2
        last = steps - 1 if high[-1] == rise.shape[1] - 1 else int(high[-1]) + width // 2
        if len(high) >= width and len(high) == high[-1] - high[0] + 1:
            inside = lateness.ratio[row, first : last + 1]
            late = inside > (1 + np.median(inside)) / 2
            if late.mean() >= 0.8:
                found.append(Slow(int(row), float(np.median(inside)), first, last, float(late.mean())))
    return found


def _one_of_each(bursts: list[Slow], spells: list[Slow]) -> list[Slow]:
    """Bursts and spells of other members; a burst that is a part of a spell and no stronger is left to the spell."""
    parts = [
        (burst, spell)
        for spell in spells
        for burst in bursts
        if burst.row == spell.row and spell.first <= burst.first and burst.last <= spell.last
    ]
    weak = {id(burst) for burst, spell in parts if burst.ratio < 1.15 * spell.ratio}
    kept = [burst for burst in bursts if id(burst) not in weak]
    rows = {burst.row for burst in kept}
    return [*kept, *(spell for spell in spells if spell.row not in rows)]


def _fewest_late(high: np.ndarray) -> int:
    """How many late samples close together are hardly ever chance, given how often samples are late at all."""
    rows = np.sort(high.mean(axis=1))
    often = float(rows[: max(1, len(rows) - 1)].mean())
    one_more = min(0.9, 4 * often + 1e-3)
    return max(4, int(np.ceil(np.log(_BY_CHANCE / high.size) / np.log(one_more))))


def _alike(lateness: Lateness, slow: list[Slow]) -> bool:
    """Whether several members are late by the same factor from the start: a role that has more to do."""
    steady = [item for item in slow if item.first == 0 and item.last == len(lateness.steps) - 1]
    if lateness.by_role or len(steady) < 2 or len(steady) != len(slow):
        return False
    ratios = [item.ratio for item in steady]
    rows = sorted(item.row for item in steady)
    together = rows[-1] - rows[0] == len(rows) - 1
    return together and max(ratios) / min(ratios) < 1.1


def _worth(slow: list[Slow]) -> bool:
    return any(item.ratio >= _LEAST_OF_MANY for item in slow)


def _rotation(lateness: Lateness, share: float = 1.0) -> float:
    """Share of steps in which somebody is far behind the median, if no single member is it in most of them.

    Where a phase takes only a `share` of the step, being behind in it has to cost something of the step.
    """
    filled = np.where(np.isfinite(lateness.ratio), lateness.ratio, 0.0)
    worst = filled.argmax(axis=0)
    spiking = filled.max(axis=0) > max(_SPIKE, 1 + 5 * lateness.noise, 1 + _UNEVEN / max(share, 1e-6))
    if not spiking.any():
        return 0.0
    counts = np.bincount(worst[spiking], minlength=len(lateness.members))
    if counts.max() > 0.5 * spiking.sum():
        return 0.0
    return float(spiking.mean())


def _heavy_role(lateness: Lateness) -> list[Slow]:
    """The members of a stage that takes longer than the other stages, where stages are known."""
    if not lateness.by_role or len(set(lateness.stage.tolist())) < 2:
        return []
    usual = np.nanmedian(lateness.seconds, axis=1)
    stages = np.unique(lateness.stage)
    levels = np.array([np.median(usual[lateness.stage == stage]) for stage in stages])
    ratio = levels / np.median(levels)
    if ratio.max() < _LEAST_OF_MANY:
        return []
    rows = np.flatnonzero(lateness.stage == stages[ratio.argmax()])
    return [Slow(int(row), float(ratio.max()), 0, len(lateness.steps) - 1, 1.0) for row in rows]


def _share_of_step(table: TimingTable, lateness: Lateness) -> float:
    """A crude share of this phase: 1 for steps; phases that are always next to nothing are left out."""
    return 1.0 if table.phase == "step" or not table.unit_known else float(np.nanmax(lateness.seconds) > 1e-3)


def _least_waiting(table: TimingTable, lateness: Lateness) -> list[Finding]:
    """Who waits least in communication is who the others wait for."""
    usual = np.nanmedian(lateness.ratio, axis=1)
    spread = max(_spread(-usual), 0.02)
    row = int(np.nanargmin(usual))
    others = np.delete(usual, row)
    if usual[row] > 1 - max(0.15, 5 * spread) or usual[row] > 0.9 * np.nanmin(others):
        return []
    item = Slow(row, float(usual[row]), 0, len(lateness.steps) - 1, 1.0)
    return [slow_finding(table, lateness, item=item, by_chance=0.0)]


def _healthy(known: list[tuple[TimingTable, Lateness]]) -> Finding:
    table, lateness = known[0]
    worst = float(np.nanmax(np.nanmedian(lateness.ratio, axis=1)))
    whole = all(one.phase == "step" for one, _ in known)
    pauses = [line for one, times in known for line in pauses_of(one, times, share=share_of(one, known))]
    return Finding(
        kind="healthy",
        confidence=_SURE_OF_WHOLE_STEPS if whole else 0.75,
        evidence=(
            f"{len(lateness.members)} members, {len(lateness.steps)} steps, phase {table.phase}: "
            f"the slowest member is usually {worst:.2f} times its peers, the noise of one step is {lateness.noise:.2f}",
            *pauses[:_MOST_PAUSES],
            *((_WHOLE_STEPS,) if whole else ()),
        ),
        next_probe=_PHASES if whole else "",
    )
