"""Where a job stands still: the origin of a hang in nested groups, from sequence numbers.

A rank that waits because another group is stuck is a victim and never blamed. The origin is where the graph of waiting
ends: a rank that is not there while others wait for it (`noncommunication_hang`), an operation that everybody has
reached and nobody finishes (`communication_hang`), ranks that wait for each other in a circle
(`collective_mismatch`), or a rank that said nothing (`reporter_silent`). Two ends are two findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keepstep.diagnosis.group_progress import merged, with_failed_open
from keepstep.diagnosis.hang_words import about, counted, listed, title
from keepstep.diagnosis.mismatch import mismatches
from keepstep.diagnosis.silent_ranks import silent_findings
from keepstep.diagnosis.waiting import Blocker, WaitGraph, is_lost_between_two, wait_graph
from keepstep.records.evidence import GroupProgress, Place, Reporter, Transfer, TransferCount
from keepstep.records.finding import Finding, Suspect

__all__ = ["diagnose_hang"]

_MOST_ORIGINS = 8
"""More origins than this (and more than a quarter of the ranks): the data do not single anybody out."""
_SURE_BESIDE_FAILURES = 0.8
_SURE_OF_A_PROCESS = 0.6
"""At most, where a process and not a device should have worked off what it queued."""


def diagnose_hang(
    groups: Iterable[GroupProgress],
    transfers: Iterable[Transfer] = (),
    *,
    counts: Iterable[TransferCount] = (),
    reporters: Iterable[Reporter] = (),
    places: Iterable[Place] = (),
) -> tuple[Finding, ...]:
    """Findings about a job that stands still; none if no rank waits for anything.

    `transfers` are point-to-point operations that are not finished, `counts` say how many are. `reporters` add evidence
    about ranks that were empty or absent; `places` let several ranks of one node become one finding.
    """
    joined, failed = with_failed_open(merged(groups))
    graph = wait_graph(joined, transfers, counts=counts)
    notes = {reporter.rank: reporter for reporter in reporters if reporter.rank is not None}
    wrong = mismatches(joined)
    findings = list(wrong)
    covered = {finding.group for finding in wrong}
    origins: list[int] = []
    silent: list[int] = []
    for ranks, blockers in graph.ends:
        if any(_is_of(graph.blockers[index], covered) for index in blockers):
            continue
        if len(ranks) == 1 and not blockers:
            origins += [] if wrong and _waited_only_in(graph, ranks[0], names=covered) else ranks
        elif not ranks and graph.blockers[blockers[0]].silent:
            silent.append(blockers[0])
        elif not ranks:
            findings.append(
                _end_at_operation(graph, blockers[0]) if len(blockers) == 1 else _end_in_batch(graph, blockers)
            )
        else:
            findings.append(_circle(graph, ranks, blockers=blockers))
    findings += _origins(graph, origins, notes=notes, places=list(places))
    findings += silent_findings(graph, silent, notes=notes, others=bool(findings))
    findings = [_with_failures(finding, failed) for finding in findings]
    return tuple(sorted(findings, key=lambda finding: -finding.confidence))


def _with_failures(finding: Finding, failed: Mapping[int, str]) -> Finding:
    """The finding with what is said of operations that look finished and failed."""
    if not failed:
        return finding
    groups = ", ".join(sorted(set(failed.values())))
    said = (
        f"the newest operation of {listed(failed)} in group {groups} counts as finished in the dump and has failed: "
        "Gloo takes back both, and not all members called it"
    )
    return msgspec.structs.replace(
        finding, confidence=min(finding.confidence, _SURE_BESIDE_FAILURES), evidence=(*finding.evidence, said)
    )


def _is_of(blocker: Blocker, names: set[str | None]) -> bool:
    return blocker.group is not None and blocker.group.group in names


def _waited_only_in(graph: WaitGraph, rank: int, *, names: set[str | None]) -> bool:
    """Whether everybody who waits for `rank` does so in one of the groups."""
    return rank not in graph.stuck and all(
        _is_of(blocker, names) for blocker in graph.blockers if rank in blocker.missing
    )


def _origins(
    graph: WaitGraph, origins: list[int], *, notes: dict[int, Reporter], places: Sequence[Place]
) -> list[Finding]:
    """Findings for ranks at which the graph ends."""
    ahead = _ahead_of_all(graph, origins)
    if ahead is not None:
        return [ahead]
    if len(origins) > max(_MOST_ORIGINS, len(graph.heard) // 4):
        return [_nobody(graph, origins)]
    node_of = {place.rank: place.node for place in places if place.node is not None}
    if not graph.heard <= node_of.keys():
        node_of = {}  # who else runs on a node is not known
    found = []
    for ranks in _by_node(origins, node_of):
        found.append(_origin(graph, ranks, notes=notes, node=node_of[ranks[0]] if len(ranks) > 1 else None))
    return found


def _by_node(origins: list[int], node_of: dict[int, str]) -> list[list[int]]:
    """Origins alone, except where all ranks of one node (two at least) are origins: these together."""
    whole: dict[str, set[int]] = {}
    for rank, node in node_of.items():
        whole.setdefault(node, set()).add(rank)
    together = [sorted(ranks) for ranks in whole.values() if len(ranks) > 1 and ranks <= set(origins)]
    taken = {rank for ranks in together for rank in ranks}
    return together + [[rank] for rank in origins if rank not in taken]


def _origin(graph: WaitGraph, ranks: list[int], *, notes: dict[int, Reporter], node: str | None) -> Finding:
    stuck = [graph.blockers[graph.stuck[rank]] for rank in ranks if rank in graph.stuck]
    needed = [blocker for blocker in graph.blockers if set(ranks) & set(blocker.missing)]
    victims = graph.victims_of(ranks)
    cut = any(rank in notes and notes[rank].state == "truncated" for rank in ranks)
    device = any(blocker.group is None or blocker.group.by_device for blocker in stuck)
    evidence = [about(blocker, ranks) for blocker in needed[:3]]
    for rank in ranks:
        if rank in graph.stuck:
            blocker = graph.blockers[graph.stuck[rank]]
            evidence.append(
                f"{title(blocker)}: {listed(blocker.passed)} finished it, rank {rank} queued it too and has not: "
                f"its {'device' if device else 'process'} stopped working it off"
            )
        else:
            evidence.append(f"rank {rank} waits for nothing that these data show")
        if rank in notes and notes[rank].state != "present":
            evidence.append(
                f"the report of rank {rank} is {notes[rank].state}. {notes[rank].detail}".rstrip(". ") + "."
            )
    evidence.append(f"{counted(victims)} for it, directly or through other groups: {listed(victims)}")
    doubt = 0.15 if any(blocker.silent for blocker in graph.blockers) else 0.0
    if needed and all(set(ranks) & set(blocker.perhaps) for blocker in needed):
        doubt += 0.15
        evidence.append(
            "it has finished transfers like this one, and the dumps do not go back to the first: whether this one is "
            "among them they do not say"
        )
    doubt += 0.15 if cut else 0.0
    if any(blocker.group is not None and blocker.group.snapshot for blocker in needed):
        doubt += 0.25
        evidence.append("counts of one moment: whether they still move tells a slow rank from one that stands still")
    return Finding(
        kind="noncommunication_hang",
        layer="hardware_gpu" if device and not cut else "undetermined",
        suspects=((Suspect(node=node),),) if node is not None else tuple((Suspect(rank=rank),) for rank in ranks),
        victims=victims,
        confidence=min(0.9 if needed else 0.65, _SURE_OF_A_PROCESS if stuck and not device else 1.0) - doubt,
        evidence=tuple(evidence),
        next_probe=(
            f"stack of {listed(ranks)} (py-spy dump), and the state, Xid messages and utilisation of its device"
            if device
            else f"stack of {listed(ranks)} (py-spy dump): what does it do instead of the collective?"
        ),
    )


def _end_at_operation(graph: WaitGraph, index: int) -> Finding:
    """Everybody who reported has reached the operation, and it does not finish."""
    blocker = graph.blockers[index]
    if is_lost_between_two(blocker) or (blocker.transfer is not None and blocker.passed):
        return _lost_between_two(graph, index)
    victims = graph.victims_of((), (index,))
    involved = sorted({*blocker.waiters, *blocker.elsewhere})
    suspects: tuple[Suspect, ...] = tuple(Suspect(rank=rank) for rank in involved)
    if blocker.transfer is not None:
        suspects = _ways(blocker.transfer.source, blocker.transfer.destination)
    unsure = blocker.group is not None and not blocker.group.ranks
    sure = blocker.group is None or (bool(blocker.group.ranks) and blocker.group.members_known)
    if unsure and len(involved) < 2:
        return Finding(
            kind="undetermined",
            confidence=0.2,
            evidence=(f"{title(blocker)}: {listed(involved)} waits in it, and nothing is known of the other members",),
            next_probe="the reports of the other members of this group",
        )
    return Finding(
        kind="communication_hang",
        layer="undetermined",
        group=None if blocker.group is None else blocker.group.group,
        suspects=(suspects,),
        victims=tuple(rank for rank in victims if rank not in involved),
        confidence=0.4 if unsure else 0.6 if sure else 0.5,
        evidence=(
            f"{title(blocker)}: all {'' if sure else 'known '}members have queued it, "
            f"{len(blocker.waiters)} {'waits' if len(blocker.waiters) == 1 else 'wait'} in it, "
            + (f"only {listed(blocker.passed)} finished it" if blocker.passed else "none has finished it"),
            *(() if sure else ("the data do not name its members: one without a report may be missing",)),
            "no rank is behind another one: sequence numbers cannot tell its members and their links apart",
        ),
        next_probe="network and device counters of these ranks, or a transfer between each pair of them",
    )


def _lost_between_two(graph: WaitGraph, index: int) -> Finding:
    """One of two ends has finished, the other waits: what the first one sent did not arrive, or is not worked off."""
    blocker = graph.blockers[index]
    (done,), (waiting,) = blocker.passed, blocker.waiters
    transfer = blocker.transfer
    source, destination = (done, waiting) if transfer is None else (transfer.source, transfer.destination)
    received = done == destination
    worker = "device" if blocker.group is None or blocker.group.by_device else "process"
    return Finding(
        kind="communication_hang",
        layer="undetermined",
        group=None if blocker.group is None else blocker.group.group,
        sequence=None if blocker.group is None else blocker.sequence,
        suspects=((Suspect(rank=waiting),) if received else _ways(source, destination),),
        victims=tuple(rank for rank in graph.victims_of((), (index,)) if rank not in (source, destination)),
        confidence=0.6,
        evidence=(
            f"{title(blocker)}: rank {done} has finished it{', and no later one' if transfer is None else ''}; "
            f"rank {waiting} waits in it",
            f"rank {done} has all of it: the {worker} of rank {waiting} stopped working it off"
            if received
            else f"what rank {source} sent did not reach the call of rank {destination}: its sending, the link, or the "
            f"receiving (a {worker} that stopped would look the same)",
        ),
        next_probe=f"transfer from rank {source} to rank {destination}; stack of rank {waiting}, counters of both",
    )


def _ways(source: int, destination: int) -> tuple[Suspect, ...]:
    """What may hold up bytes from one rank to another."""
    return (Suspect(source=source), Suspect(destination=destination), Suspect(link=(source, destination)))


def _end_in_batch(graph: WaitGraph, indices: list[int]) -> Finding:
    """Transfers of one batch to which all ends came, and which do not finish."""
    pairs = [(one.source, one.destination) for index in indices if (one := graph.blockers[index].transfer) is not None]
    involved = {rank for pair in pairs for rank in pair}
    suspects = [one for source, destination in pairs for one in _ways(source, destination)]
    shown = ", ".join(f"{source} to {destination}" for source, destination in pairs[:8])
    shown += ", ..." if len(pairs) > 8 else ""
    return Finding(
        kind="communication_hang",
        layer="undetermined",
        suspects=(tuple(dict.fromkeys(suspects)),),
        victims=tuple(rank for rank in graph.victims_of((), indices) if rank not in involved),
        confidence=0.5,
        evidence=(
            f"transfers {shown}: both ends have queued each of them, and no end waits for one that did not come",
            "they were queued as one batch, which ends as a whole: which of them holds it these data do not show",
        ),
        next_probe="network and device counters of these ranks, or a transfer between each pair of them",
    )


def _circle(graph: WaitGraph, ranks: list[int], *, blockers: list[int]) -> Finding:
    """Ranks that wait for each other: they called the collectives in different orders, or a message was lost."""
    lost = _awaited(graph, blockers)
    if len(lost) == len(blockers):
        return _circle_of_messages(graph, ranks, blockers=blockers, lost=lost)
    certain = all(graph.blockers[index].missing for index in blockers)
    evidence = [about(graph.blockers[index], ranks) for index in blockers[:4]]
    return Finding(
        kind="collective_mismatch",
        layer="application",
        suspects=(tuple(Suspect(rank=rank) for rank in sorted(ranks)),),
        victims=graph.victims_of(ranks),
        confidence=0.8 if certain and not lost else 0.5,
        evidence=(
            f"{listed(sorted(ranks))} wait for each other in a circle",
            *evidence,
            *(f"or the message from rank {a} to rank {b} was sent and did not arrive" for a, b in lost[:4]),
        ),
        next_probe="the Python stacks of these ranks: in which order does each call the collectives of its groups?",
    )


def _awaited(graph: WaitGraph, blockers: list[int]) -> list[tuple[int, int]]:
    """The messages among the operations that only their receiver waits for: their sender may have sent them."""
    transfers = [(graph.blockers[index], graph.blockers[index].transfer) for index in blockers]
    return [
        (one.source, one.destination)
        for blocker, one in transfers
        if one is not None and blocker.waiters == [one.destination] and blocker.missing == [one.source]
    ]


def _circle_of_messages(
    graph: WaitGraph, ranks: list[int], *, blockers: list[int], lost: list[tuple[int, int]]
) -> Finding:
    """Each waits for a message of the next: one of them was lost on its way, or each waits before it sends."""
    ends = {rank for pair in lost for rank in pair}
    return Finding(
        kind="communication_hang",
        layer="undetermined",
        suspects=(tuple(Suspect(link=pair) for pair in lost),),
        victims=tuple(rank for rank in graph.victims_of(ranks) if rank not in ends),
        confidence=0.5 if len(lost) == 2 else 0.4,
        evidence=(
            f"{listed(sorted(ranks))} wait for each other's messages in a circle",
            *(about(graph.blockers[index], ranks) for index in blockers[:4]),
            "one of these messages was sent and did not arrive; or all of them wait for a message before they send",
        ),
        next_probe="; ".join(f"transfer from rank {a} to rank {b}" for a, b in lost[:4])
        + "; the Python stacks of these ranks: does each receive before it sends?",
    )


def _ahead_of_all(graph: WaitGraph, origins: list[int]) -> Finding | None:
    """A single rank that waits for members who all have nothing to do: it called a collective that nobody else did."""
    waiters = {rank for blocker in graph.blockers for rank in blocker.waiters}
    if len(waiters) != 1 or len(origins) < 2 or len(graph.blockers) != 1 or graph.stuck:
        return None
    blocker, (rank,) = graph.blockers[0], waiters
    if blocker.group is None or len(blocker.missing) != len(blocker.group.positions) - 1:
        return None
    reached = {position.queued for position in blocker.group.positions if position.rank != rank}
    if reached != {blocker.sequence - 1}:
        return None
    return Finding(
        kind="collective_mismatch",
        layer="application",
        group=blocker.group.group,
        sequence=blocker.sequence,
        suspects=((Suspect(rank=rank),),),
        confidence=0.6,
        evidence=(
            f"{title(blocker)}: rank {rank} alone has called it",
            f"{len(origins)} other members have finished {blocker.sequence - 1} and wait for nothing",
            "one call too many on this rank fits; all others being held up outside the collectives fits too",
        ),
        next_probe="the Python stacks of this rank and of one other",
    )


def _nobody(graph: WaitGraph, origins: list[int]) -> Finding:
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(
            f"{len(origins)} of {len(graph.heard)} ranks have not reached collectives that others wait in: "
            "these data do not single anybody out",
        ),
        next_probe="dumps of all ranks, taken together some seconds after progress stopped; stacks of all ranks",
    )
