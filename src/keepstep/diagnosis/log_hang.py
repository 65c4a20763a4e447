"""Findings about a job that stands still, from logs: who did not come, what it did instead, who only waits."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.diagnosis.early_end import early_end, early_end_finding, with_early_end
from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation, words
from keepstep.diagnosis.log_phases import Activity, activity_of, claimed_activity, unfinished_bars
from keepstep.diagnosis.log_progress import HangReport, hang_report
from keepstep.diagnosis.stack_places import main_threads
from keepstep.diagnosis.stack_verdict import stack_layer
from keepstep.diagnosis.wavefront import diagnose_hang
from keepstep.records.evidence import LogEvent, StackSample
from keepstep.records.finding import Finding, Suspect

__all__ = ["explained_by_logs", "hang_findings", "startup_findings"]

_STACKS = "stacks of the ranks that did not come (py-spy dump --pid), Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000)"


def hang_findings(case: LogCase) -> list[Finding]:
    """Findings about waiting ranks; none if no line tells of waiting."""
    report = hang_report(case)
    if report.named_missing:
        found = [_named(case, report)]
    elif (early := early_end(case, report.waiting)) is not None:
        found = [early_end_finding(early, report.waiting, speakers=case.speakers())]
    elif case.has("training_ended") and (late := _called_too_many(case, report)):
        return [late]
    else:
        found = list(diagnose_hang(report.groups)) if _compares(report, case.world()[0]) else []
        told = {event.rank for event in case.of("group_status")}
        found = [_without_status(finding, told) for finding in _with_quotes(_of_known_groups(found, case), report)]
        if not any(finding.kind != "undetermined" for finding in found):
            found = _without_numbers(case, report) or found
    return _merged([_explained(case, finding, report=report) for finding in found])


def explained_by_logs(
    findings: Iterable[Finding], events: Iterable[LogEvent], *, stacks: Iterable[StackSample]
) -> list[Finding]:
    """Findings of dumps about ranks that did not come, with what logs and stacks of these ranks say they did."""
    case = LogCase(events, stacks)
    report = hang_report(case)
    return [_explained(case, finding, report=report) for finding in findings]


def _compares(report: HangReport, world: int | None) -> bool:
    """Whether ranks of one group are at different places, or all of a world whose size is known are heard."""
    for group in report.groups:
        places = {
            (item.queued, item.finished, *((number, what.op, what.count) for number, what in item.signatures.items()))
            for item in group.positions
        }
        if len(places) > 1 or len(group.positions) == world:
            return True
    return False


def _of_known_groups(findings: list[Finding], case: LogCase) -> list[Finding]:
    """Without hangs of groups of which only some lines speak, if another group shows who did not come: logs do not name
    the members of a group, so a silent one may be the same that did not come."""
    origins = [finding for finding in findings if finding.kind in ("noncommunication_hang", "collective_mismatch")]
    whole = {"0"} if case.world()[0] is not None else set()
    return [
        finding
        for finding in findings
        if finding.kind != "communication_hang" or not origins or (finding.group or "") in whole
    ]


def _without_status(finding: Finding, told: set[int | None]) -> Finding:
    """Time-outs alone say what a rank waits in, not what it has finished: a device that stopped is only one reading."""
    ranks = {suspect.rank for group in finding.suspects for suspect in group}
    if finding.layer != "hardware_gpu":
        return finding
    if ranks <= told:
        return msgspec.structs.replace(
            finding,
            confidence=min(finding.confidence, 0.7),
            evidence=(*finding.evidence, "or its call of this number is another one than that of the others"),
        )
    return msgspec.structs.replace(
        finding,
        layer="undetermined",
        confidence=min(finding.confidence, 0.6),
        evidence=(
            *finding.evidence,
            "or it made fewer calls than the others: what it has finished is not in these lines",
        ),
    )


def _with_quotes(findings: list[Finding], report: HangReport) -> list[Finding]:
    """The lines behind the numbers, for those who wait and for the first failure."""
    lines = [quotation(event) for event in list(report.waiting.values())[:2]]
    return [msgspec.structs.replace(finding, evidence=(*finding.evidence, *lines)) for finding in findings]


def _named(case: LogCase, report: HangReport) -> Finding:
    """torch itself names ranks that did not come (monitored barrier, desync report)."""
    ranks = sorted(report.named_missing)
    reached = {int(event.fields["rank"]) for event in case.of("barrier_reached")} | set(report.waiting)
    event = report.named_missing[ranks[0]]
    return Finding(
        kind="noncommunication_hang",
        suspects=tuple((Suspect(rank=rank),) for rank in ranks),
        victims=tuple(sorted(reached - set(ranks))),
        confidence=0.85,
        evidence=(
            f"{listed(ranks)} did not "
            + ("finish what the others have finished" if event.kind == "desync_waiting" else "come")
            + ", as torch's own report says",
            quotation(event),
        ),
        next_probe=_STACKS,
    )


def _called_too_many(case: LogCase, report: HangReport) -> Finding | None:
    """After the end of training, a minority waits in a collective that nobody else calls any more."""
    world, claimed = case.world()
    waiting = sorted(report.waiting)
    last_end = max(case.of("training_ended"), key=lambda event: (event.path, event.line))
    begun = [
        item
        for item in case.of("step_progress", claims=False)
        if item.path == last_end.path and item.line > last_end.line
    ]
    if not waiting or begun or (world is not None and len(waiting) * 2 > world):
        return None
    events = [report.waiting[rank] for rank in waiting]
    barrier = all(event.fields.get("numel_in") == "1" or "BARRIER" in event.fields.get("op", "") for event in events)
    return Finding(
        kind="collective_mismatch",
        layer="application",
        suspects=tuple((Suspect(rank=rank),) for rank in waiting),
        confidence=(0.75 if barrier else 0.6) - (0.05 if claimed or world is None else 0.0),
        evidence=(
            f"training had ended: {quotation(last_end)}",
            f"after it only {listed(waiting)} waits in a collective"
            + (" of one element, as a barrier is" if barrier else "")
            + (f"; the job has {world} ranks" + (" (as its user says)" if claimed else "") if world else ""),
            *(quotation(event) for event in events[:3]),
            "one call too many on this side; nothing points to hardware or network",
        ),
        next_probe="code that runs only on this rank after training: a barrier, a save or a log call that synchronises",
    )


def _without_numbers(case: LogCase, report: HangReport) -> list[Finding]:
    """Time-outs without numbers to compare: who waits is known; who is missing is one who speaks, but not of waiting.

    Several ranks of whom there is no line at all are not suspected: their logs may just be missing.
    """
    waiting = sorted(report.waiting)
    if not waiting:
        return []
    world, claimed = case.world()
    others = [rank for rank in range(world or 0) if rank not in report.waiting] if (world or 0) <= 100_000 else []
    evidence = [f"{listed(waiting)} waited in a collective until the time-out"]
    evidence += [quotation(event) for event in list(report.waiting.values())[:3]]
    bars = unfinished_bars(case)
    if bars:
        return [_prepares(bars[0], waiting, others=others, evidence=evidence)]
    heard = sorted(case.speakers() & set(others))
    named = heard or (others if len(others) == 1 else [])
    if named and len(others) <= len(waiting):
        evidence.append(
            f"nothing was heard of the time-out from {listed(others)}"
            + (", if the number of ranks given is right" if claimed else "")
        )
        return [
            Finding(
                kind="noncommunication_hang",
                suspects=(tuple(Suspect(rank=rank) for rank in named),),
                victims=tuple(waiting),
                confidence=0.5 - (0.1 if claimed or len(named) < len(others) else 0.0),
                evidence=tuple(evidence),
                next_probe=_STACKS,
            )
        ]
    everybody = world is not None and not others
    evidence.append(
        "all ranks wait in it: network, devices and a call that differs cannot be told apart from these lines"
        if everybody
        else f"who did not come cannot be told: nothing of it is here from {listed(others) if others else 'others'}"
    )
    return [
        Finding(
            kind="undetermined",
            victims=tuple(waiting),
            confidence=0.3,
            evidence=tuple(evidence),
            next_probe=f"logs of {listed(others) if others else 'all ranks'}; {_STACKS}",
        )
    ]


def _prepares(activity: Activity, waiting: list[int], *, others: list[int], evidence: list[str]) -> Finding:
    """Somebody still prepares data, loads or evaluates while others wait already."""
    rank = activity.event.rank
    suspects: tuple[tuple[Suspect, ...], ...] = ()
    if rank is not None and rank not in waiting:
        suspects = ((Suspect(rank=rank),),)
    elif others:
        suspects = (tuple(Suspect(rank=one) for one in others),)
    return Finding(
        kind="noncommunication_hang",
        layer=activity.layer,
        suspects=suspects,
        victims=tuple(waiting),
        confidence=activity.confidence,
        evidence=(
            f"somebody {activity.does}, while others wait: the network is not involved",
            quotation(activity.event),
            *evidence,
        ),
        next_probe=(
            "which ranks still show the bar; do this work before the process group is made, once, or "
            "with a longer time-out"
        ),
    )


def _explained(case: LogCase, finding: Finding, *, report: HangReport) -> Finding:
    """A rank that did not come, with what its own lines say it did instead."""
    ranks = [suspect.rank for group in finding.suspects for suspect in group if suspect.rank is not None]
    silent = finding.kind == "reporter_silent"
    if not (silent or finding.kind == "noncommunication_hang") or finding.layer != "undetermined" or not ranks:
        return finding
    early = early_end(case, finding.victims)
    if early is not None and early.ends.keys() == set(ranks):
        return with_early_end(finding, early)
    if silent:
        return finding
    by_stack = {stack.rank: stack_layer(stack) for stack in main_threads(case.stacks) if stack.rank in ranks}
    layers = {layer for layer in by_stack.values() if layer != "undetermined"}
    if len(layers) == 1:
        return msgspec.structs.replace(finding, layer=layers.pop(), confidence=0.9)
    elsewhere = [event for event in case.of("peer_closed", "gloo_timeout") if event.rank in ranks and _gloo(event.text)]
    if elsewhere and {event.rank for event in elsewhere} == set(ranks):
        return _went_elsewhere(finding, ranks, quotes=[quotation(event) for event in elsewhere], idle=report.idle)
    activities = [found for rank in ranks if (found := activity_of(case, rank)) is not None]
    activities = activities or [found for whom, found in claimed_activity(case) if set(whom) & set(ranks)]
    activities = activities or [found for found in unfinished_bars(case) if found.event.rank is None]
    if activities:
        best = max(activities, key=lambda activity: activity.confidence)
        return msgspec.structs.replace(
            finding, layer=best.layer, evidence=(*finding.evidence, f"it {best.does}", quotation(best.event))
        )
    return finding


def _gloo(text: str) -> bool:
    return "gloo" in text.lower() or "unbound_buffer" in text or "monitoredBarrier" in text


def _went_elsewhere(finding: Finding, ranks: list[int], *, quotes: list[str], idle: frozenset[int]) -> Finding:
    """Ranks that did not come are alive in a collective of another backend: they took another way in the program."""
    alive = " and answered with nothing unfinished" if set(ranks) <= idle else ""
    return msgspec.structs.replace(
        finding,
        kind="collective_mismatch",
        layer="application",
        confidence=0.8,
        evidence=(
            *finding.evidence,
            f"meanwhile {listed(ranks)} was alive{alive}, in a collective of another backend: the number of "
            "collectives depends on the rank",
            *quotes[:3],
            "ranks that ended by the watchdog's own abort, and the other ends of closed connections, are victims",
        ),
        next_probe="the branch of the program that decides, by rank, whether this collective is called",
    )


def _merged(findings: list[Finding]) -> list[Finding]:
    """Ranks that did not come to one collective for the same reason are one fault."""
    merged: list[Finding] = []
    for finding in findings:
        same = next((item for item in merged if _alike(item, finding)), None)
        if same is None:
            merged.append(finding)
            continue
        merged[merged.index(same)] = msgspec.structs.replace(
            same,
            suspects=(*same.suspects, *finding.suspects),
            victims=tuple(sorted(set(same.victims) & set(finding.victims))),
            evidence=tuple(dict.fromkeys((*same.evidence, *finding.evidence))),
        )
    return merged


def _alike(first: Finding, second: Finding) -> bool:
    mismatch = first.kind == second.kind == "collective_mismatch" and first.layer == second.layer == "application"
    absent = first.kind == second.kind == "noncommunication_hang" and first.layer == second.layer
    return (mismatch or absent) and (first.group, first.sequence) == (second.group, second.sequence)


def startup_findings(case: LogCase) -> list[Finding]:
    """A start at which somebody did not arrive, or arrived with another idea of the job."""
    events = case.of("store_timeout", claims=False)
    if events:
        event = events[-1]
        world, joined = int(event.fields["world"]), int(event.fields["joined"])
        present = {item.rank for item in events if item.rank is not None} | case.speakers()
        absent = [rank for rank in range(min(world, 100_000)) if rank not in present]
        exact = len(absent) == world - joined and bool(absent)
        return [
            Finding(
                kind="startup_never_arrived",
                suspects=tuple((Suspect(rank=rank),) for rank in absent) if exact else (),
                victims=tuple(sorted(present)) if exact else (),
                confidence=0.8,
                evidence=(f"{joined} of {world} ranks came to the store at the start", quotation(event)),
                next_probe=""
                if exact
                else "logs of all ranks: those that wrote nothing are the ones that did not arrive",
            )
        ]
    return [*_unreachable(case), *_half_initialised(case)]


def _unreachable(case: LogCase) -> list[Finding]:
    events = case.of("store_unreachable", claims=False)
    if not events or case.has("step_progress", claims=False):
        return []
    host = next((event.fields["host"] for event in events if event.fields.get("host")), None)
    return [
        Finding(
            kind="startup_never_arrived",
            layer="undetermined",
            suspects=((Suspect(node=host),),) if host else (),
            victims=tuple(sorted({event.rank for event in events if event.rank is not None})),
            confidence=0.6,
            evidence=("ranks could not reach the store of the job", quotation(events[0])),
            next_probe="does the process on that host listen, under a name and port that other nodes can reach?",
        )
    ]


def _half_initialised(case: LogCase) -> list[Finding]:
    """NCCL: ranks of the largest communicator that began and did not complete, or that disagree about its size.

    If it is complete on one rank, all its ranks have come: those without a line did not log. Nor is a majority without
    a line suspected.
    """
    inits = case.of("nccl_init", claims=False)
    sizes: dict[str, set[str]] = {}
    for event in inits:
        sizes.setdefault(event.fields.get("id") or "?", set()).add(event.fields["nranks"])
    wrong = [identity for identity, found in sizes.items() if identity != "?" and len(found) > 1]
    if wrong:
        return [_sizes_disagree(case, wrong[0])]
    world = max((int(event.fields["nranks"]) for event in inits), default=0)
    whole = [event for event in inits if int(event.fields["nranks"]) == world]
    began, ended = (
        {int(event.fields["rank"]) for event in whole if event.fields["state"].upper() == state}
        for state in ("START", "COMPLETE")
    )
    if (
        not began
        or not (ended or case.has("watchdog_timeout", "peer_closed", "nccl_connect_failed"))
        or case.has("step_progress")
    ):
        return []
    late = sorted(began - ended) if ended else []
    never = [] if ended else [rank for rank in range(min(world, 100_000)) if rank not in began]
    if not late and (not never or (len(never) > len(began) and not case.speakers() & set(never))):
        return []
    return [
        Finding(
            kind="startup_never_arrived",
            suspects=tuple((Suspect(rank=rank),) for rank in (never or late)[:16]),
            victims=tuple(sorted(began - set(never or late))),
            confidence=0.65 if never else 0.55,
            evidence=(
                f"{len(began)} of {world} ranks began to initialise NCCL, {len(ended)} completed",
                quotation(whole[0]),
            ),
            next_probe="the logs of these ranks before this point; can their nodes reach the address of rank 0?",
        )
    ]


def _sizes_disagree(case: LogCase, identity: str) -> Finding:
    events = [event for event in case.of("nccl_init") if event.fields.get("id") == identity]
    counts = {event.fields["nranks"]: event for event in events}
    return Finding(
        kind="startup_disagrees",
        layer="configuration",
        confidence=0.85,
        evidence=(
            f"ranks disagree about the size of one communicator: {words(sorted(counts))}",
            *(quotation(event) for event in counts.values()),
        ),
        next_probe="number of nodes and processes a node in the start command of every node",
    )
