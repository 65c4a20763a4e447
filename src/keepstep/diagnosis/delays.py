"""Slow links: cells of the delay matrix where the sender's wire and the receiver's wait grew together.

Either alone is not enough. A rank that enters late makes its peers wait for its data, but its own sending is quick;
one that takes data late fills its senders' credit, but does not wait for them. Only a link (or a side) that moves bytes
slowly shows both, at the same cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from keepstep.diagnosis.live_state import Verdict, Watch
from keepstep.diagnosis.matrix import Cells, explain
from keepstep.diagnosis.pair_history import PAIR_COLUMNS, PairHistory
from keepstep.diagnosis.slowness import STEPS, cpu_noise
from keepstep.diagnosis.windows import Numbers
from keepstep.records.finding import Finding, Suspect

__all__ = ["hold_cells", "link_verdicts"]

_SHARE = 0.03
_SCATTER = 4.5
_REFRESH = 8
_OUTLIER = 3.0
_LONG_STEPS = 4 * STEPS
_MOST_OUTLIERS = 3
_ENOUGH_CELLS = 4
_ALIKE = 0.25
_FAR = 5.0
_FAR_WAIT = 1.5
_FEW = 4
_MOST_FINDINGS = 32

_Fault: TypeAlias = tuple[tuple[Suspect, ...], list[int]]
"""What cannot be told apart, and the slow cells that it explains."""


def link_verdicts(watch: Watch, step: int) -> Iterator[Verdict]:
    """One verdict for each slow link, side or node at `step`."""
    pairs = watch.pairs
    if not len(pairs.keys) or step < STEPS:
        return
    normal = _usual(watch, step)
    if normal is None:
        return
    each = np.median(watch.history.of("duration_us", step, count=STEPS), axis=0)
    if each.max() > _OUTLIER * np.median(each):  # a single step that stood still is in the mean of its window
        yield from _as_before(watch, step)
        return
    lasted = max(float(np.median(each)), 1.0)
    excess, margin = _excess(watch, step, normal=normal, lasted=lasted)
    yield from _verdicts(watch, excess, step=step, lasted=lasted, margin=margin)


def _as_before(watch: Watch, step: int) -> Iterator[Verdict]:
    """What is open stands, unless steps that stand still have become usual: one of them shows nothing either way."""
    lasted = np.median(watch.history.of("duration_us", step, count=_LONG_STEPS), axis=0)
    if np.count_nonzero(lasted > _OUTLIER * np.median(lasted)) > _MOST_OUTLIERS:
        return
    for key, known in watch.findings.items():
        if key.startswith("link:"):
            yield Verdict(key=key, finding=known.finding, since=known.began_step)


def _excess(
    watch: Watch, step: int, *, normal: tuple[Numbers, Numbers, Numbers, Numbers], lasted: float
) -> tuple[Numbers, float]:
    """(how much longer than usual each cell takes at both its ends, us a step, 0 where it is not slow; margin)."""
    pairs = watch.pairs
    send_usual, send_scatter, receive_usual, receive_scatter = normal
    excess = np.zeros(len(pairs.keys))
    steps = np.arange(step - STEPS + 1, step + 1)
    at = steps % PAIR_COLUMNS
    limit = np.maximum(_SHARE * lasted, _SCATTER * 1.25 / np.sqrt(STEPS) * send_scatter)
    newest = pairs.values["send"][:, at[-1]] - send_usual
    maybe = np.flatnonzero((newest > limit / 2) & (pairs.reverse >= 0))
    if not len(maybe):
        return excess, 0.0
    back = pairs.reverse[maybe]
    told = (pairs.stamp[maybe][:, at] == steps).all(axis=1) & (pairs.stamp[back][:, at] == steps).all(axis=1)
    send = pairs.values["send"][maybe][:, at] - send_usual[maybe, None]
    receive = pairs.values["receive"][back][:, at] - receive_usual[back, None]
    limits = np.maximum(limit[maybe], _SCATTER * 1.25 / np.sqrt(STEPS) * receive_scatter[back])
    both = np.minimum(send, receive)
    middle = np.median(both, axis=1)
    noise = cpu_noise(watch, step)
    limits = np.maximum(limits, np.maximum(noise[pairs.ranks[maybe]], noise[pairs.peers[maybe]]))
    often = np.count_nonzero(both > limits[:, None] / 2, axis=1) >= STEPS - 1
    slow = told & often & (middle > limits)
    excess[maybe[slow]] = middle[slow]
    return excess, float((middle / limits)[slow].max()) if slow.any() else 0.0


def hold_cells(watch: Watch, finding: Finding, *, step: int) -> None:
    """What is usual at the cells of an open finding is not measured anew until the fault has left the memory.

    That of a link is both its cell and the one back: there its destination waits.
    """
    ranks, peers = watch.pairs.ranks, watch.pairs.peers
    for suspect in (one for group in finding.suspects for one in group):
        if suspect.link is not None:
            a, b = suspect.link
            held = np.flatnonzero(((ranks == a) & (peers == b)) | ((ranks == b) & (peers == a)))
        elif suspect.node is not None:
            there = [rank for rank, seen in watch.seen.items() if seen.node == suspect.node]
            held = np.flatnonzero(np.isin(ranks, there) | np.isin(peers, there))
        else:
            ends_of = {suspect.rank, suspect.source, suspect.destination} - {None}
            held = np.flatnonzero(np.isin(ranks, list(ends_of)) | np.isin(peers, list(ends_of)))
        for cell in held.tolist():
            watch.held[int(watch.pairs.keys[cell])] = step + PAIR_COLUMNS


def _usual(watch: Watch, step: int) -> tuple[Numbers, Numbers, Numbers, Numbers] | None:
    """(median, scatter) of sending and of receiving of every cell in the past; None while there is too little of it."""
    pairs, known = watch.pairs, watch.pair_usual
    if known is not None and len(known[0]) == len(pairs.keys) and step < watch.pair_measured + _REFRESH:
        return known
    past = np.arange(max(0, step - PAIR_COLUMNS + 1), step - STEPS + 1)
    past = past[(pairs.stamp[:, past % PAIR_COLUMNS] == past).mean(axis=0) > 0.9] if len(past) else past
    if len(past) < _FEW:
        return None
    fresh: list[Numbers] = []
    for name in ("send", "receive"):
        values = pairs.values[name][:, past % PAIR_COLUMNS]
        middle = np.median(values, axis=1)
        scatter = 1.4826 * np.median(np.abs(values - middle[:, None]), axis=1)
        fresh += [middle, np.maximum(scatter, 0.5 * float(np.median(scatter)))]
    if known is None:
        _as_their_peers(pairs, fresh)
    if known is not None and len(known[0]) == len(pairs.keys):
        held = [cell for key, until in watch.held.items() if until > step for cell in _cell_of(pairs.keys, key)]
        for old, new in zip(known, fresh, strict=True):
            new[held] = old[held]
    watch.held = {key: until for key, until in watch.held.items() if until > step}
    watch.pair_usual, watch.pair_measured = (fresh[0], fresh[1], fresh[2], fresh[3]), step
    return watch.pair_usual


def _as_their_peers(pairs: PairHistory, fresh: list[Numbers]) -> None:
    """A cell that was far slower than those with as many bytes from the start has no usual time: theirs counts.

    At both its ends, so that one who merely waits for a late peer keeps its own.
    """
    sent = pairs.values["sent"].max(axis=1)
    for lane in (False, True):
        mine = np.flatnonzero((pairs.messages == lane) & (pairs.reverse >= 0) & (sent > 0))
        if len(mine) < _ENOUGH_CELLS:
            continue
        alike = mine[sent[mine] >= _ALIKE * float(sent[mine].max())]
        send, receive = (float(np.median(fresh[number][alike])) for number in (0, 2))
        back = pairs.reverse[alike]
        far = (fresh[0][alike] > _FAR * send) & (fresh[2][back] > _FAR_WAIT * receive)
        if np.count_nonzero(far) <= len(alike) // 3:
            fresh[0][alike[far]], fresh[2][back[far]] = send, receive


def _cell_of(keys: Numbers, key: int) -> list[int]:
    at = int(np.searchsorted(keys, np.uint64(key)))
    return [at] if at < len(keys) and int(keys[at]) == key else []


def _verdicts(watch: Watch, excess: Numbers, *, step: int, lasted: float, margin: float) -> Iterator[Verdict]:
    if not excess.any():
        return
    pairs = watch.pairs
    nodes = {rank: seen.node for rank, seen in watch.seen.items()}
    cells = Cells(pairs.ranks, pairs.peers, excess, pairs.values["sent"].max(axis=1))
    confidence = round(float(0.97 - 0.35 * np.exp(-max(margin - 1.0, 0.0))), 2)
    faults, wider = _not_within_wider(watch, list(explain(cells, nodes))[:_MOST_FINDINGS], nodes=nodes)
    for key in wider:
        known = watch.findings[key]
        yield Verdict(key=key, finding=known.finding, since=known.began_step)
    for suspects, slow in _ripe(watch, faults, step=step, nodes=nodes):
        worst = max(slow, key=lambda cell: float(excess[cell]))
        pair = f"{pairs.ranks[worst]} -> {pairs.peers[worst]}"
        extra = float(excess[worst])
        evidence = [
            f"rank {pairs.ranks[worst]} spends {extra / 1e3:.1f} ms a step more than usual on sending to "
            f"rank {pairs.peers[worst]}, which waits for it as much longer ({STEPS} steps up to step {step})",
            f"{len(slow)} of {len(excess)} directed pairs show it" if len(slow) > 1 else f"only {pair} shows it",
        ]
        finding = Finding(
            kind="communication_slow",
            layer="hardware_link",
            suspects=(suspects,),
            confidence=confidence if len(suspects) == 1 else round(confidence - 0.05, 2),
            evidence=tuple(evidence),
            next_probe=_probe(suspects, int(pairs.ranks[worst]), destination=int(pairs.peers[worst])),
            cost=min(extra, lasted) * 1e-6 * watch.plan.world,
        )
        yield Verdict(key="link:" + _name(suspects), finding=finding, since=step - STEPS + 1)


def _not_within_wider(
    watch: Watch, faults: list[_Fault], *, nodes: Mapping[int, str]
) -> tuple[list[_Fault], list[str]]:
    """The faults that are not part of a wider one, and the keys of open ones of which only parts are slow now.

    Of a slow node not every link is slow in every step: what else is slow of it is no other fault. One link that alone
    stays slow of an open one is.
    """
    keys = ["link:" + _name(suspects) for suspects, _ in faults]
    wide = {key: suspects for key, (suspects, _) in zip(keys, faults, strict=True) if suspects[0].node is not None}
    wide |= {
        key: live.finding.suspects[0]
        for key, live in watch.findings.items()
        if key.startswith("link:") and key not in keys and live.finding.suspects[0][0].link is None
    }
    taken: set[int] = set()
    parts_of: list[str] = []
    for key, suspects in wide.items():
        cells = _cells_of(watch, suspects, nodes=nodes)
        parts = [number for number, (_, slow) in enumerate(faults) if keys[number] != key and cells.issuperset(slow)]
        if key not in keys and sum(len(faults[number][1]) for number in parts) < 2:
            continue
        taken.update(parts)
        parts_of += [] if key in keys else [key]
    return [fault for number, fault in enumerate(faults) if number not in taken], parts_of


def _ripe(watch: Watch, faults: list[_Fault], *, step: int, nodes: Mapping[int, str]) -> list[_Fault]:
    """The faults without links that have just become slow together with others of one node: it may be the node.

    Not all links of a slow node show it in the same step. Links that stay the only ones for some steps are named.
    """
    touching: dict[str, list[int]] = defaultdict(list)
    for number, (suspects, _) in enumerate(faults):
        ends = suspects[0].link or ()
        there = {nodes.get(rank, "") for rank in ends}
        for node in there if len(there) > 1 else ():
            touching[node].append(number)
    crowded = {node: numbers for node, numbers in touching.items() if len(numbers) > 1}
    watch.crowded = {node: watch.crowded.get(node, step) for node in crowded}
    waiting = {number for node in crowded if step - watch.crowded[node] < STEPS for number in crowded[node]}
    return [
        fault
        for number, fault in enumerate(faults)
        if number not in waiting or "link:" + _name(fault[0]) in watch.findings
    ]


def _cells_of(watch: Watch, suspects: tuple[Suspect, ...], *, nodes: Mapping[int, str]) -> set[int]:
    """The cells of nodes, ranks and sides."""
    pairs = watch.pairs
    sources, destinations = pairs.ranks, pairs.peers
    found = np.zeros(len(pairs.keys), bool)
    for one in suspects:
        if one.node is not None:
            there = [rank for rank, node in nodes.items() if node == one.node]
            found |= np.isin(sources, there) != np.isin(destinations, there)
        elif one.rank is not None:
            found |= (sources == one.rank) | (destinations == one.rank)
        elif one.source is not None:
            found |= sources == one.source
        elif one.destination is not None:
            found |= destinations == one.destination
    return set(np.flatnonzero(found).tolist())


def _name(suspects: tuple[Suspect, ...]) -> str:
    first = suspects[0]
    if first.node is not None:
        return f"node {first.node}"
    if first.link is not None:
        return f"{first.link[0]}>{first.link[1]}"
    if first.rank is not None:
        return f"rank {first.rank}"
    return f"from {first.source}" if first.source is not None else f"to {first.destination}"


def _probe(suspects: tuple[Suspect, ...], source: int, *, destination: int) -> str:
    if len(suspects) == 1 and suspects[0].link is not None:
        return f"bandwidth of {source} -> {destination} and back, and the port counters of the path"
    if len(suspects) == 1:
        return "port counters and error counts of the adapter and its cable"
    return f"bandwidth from rank {source} to another peer, and from another rank to rank {destination}"
