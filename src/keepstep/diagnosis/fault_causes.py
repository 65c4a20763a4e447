"""Findings from lines that name a cause themselves; what follows from a cause is told apart from the cause."""

from __future__ import annotations

import re
from collections import defaultdict

import msgspec

from keepstep.diagnosis.caught import FAILURES, Caught
from keepstep.diagnosis.fault_lines import is_consequence, meaning_of
from keepstep.diagnosis.fault_meaning import FaultLine, Strength
from keepstep.diagnosis.log_case import LogCase, is_claim, quotation, rank_list, suspect_of, words
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, Suspect

__all__ = ["causes_of", "named_events", "symptoms_of"]

_SHOWN = 4
_SAID_BY_PERSON = 0.6
_HARDWARE = ("hardware_gpu", "hardware_link")
_OURS = re.compile(r"python|torch|train|pt_|data|worker|ray|mpi|srun|bash|sh$", re.IGNORECASE)
"""What the processes of a training job are called."""


def named_events(case: LogCase, strength: Strength) -> list[tuple[LogEvent, FaultLine]]:
    """Events of one strength with what they mean, in order; exceptions that only pass something on are left out."""
    told = [(event, meaning) for event in case.events if (meaning := meaning_of(event)) is not None]
    better = {(event.path, event.line) for event, meaning in told if event.kind != "exception" and _own_cause(meaning)}
    return [
        (event, meaning)
        for event, meaning in told
        if meaning.strength == strength
        and not is_consequence(event)
        and (event.kind != "exception" or (event.path, event.line) not in better)
    ]


def _own_cause(meaning: FaultLine) -> bool:
    return meaning.strength != "symptom"


def causes_of(case: LogCase) -> list[Finding]:
    """One finding for each cause that the logs name. With hard evidence, other errors are its consequences.

    Among causes that are not hard the first in the log counts; later ones are told as what followed.
    """
    hard = [pair for pair in named_events(case, "hard") if not _recovered(case, pair[0])]
    if hard:
        return _by_layer(case, hard)
    caught = Caught(case)
    causes = [pair for pair in named_events(case, "cause") if not is_claim(pair[0]) and pair[0] not in caught]
    if not causes:
        return [_weaker(finding) for finding in _by_layer(case, _claims(case))]
    return [_first_of(case, causes)]


def symptoms_of(case: LogCase) -> list[Finding]:
    """What the logs show where no line names a cause: one `undetermined` finding (or a weak guess that says so)."""
    caught = Caught(case)
    seen = [pair for pair in named_events(case, "symptom") if _counts(case, pair[0]) and pair[0] not in caught]
    if not seen:
        return []
    killed = [event for event, _ in seen if event.fields.get("signal") in ("SIGKILL", "SIGSEGV", "SIGBUS")]
    if killed:
        return [_killed(case, max(killed, key=_tells), number=len(seen))]
    event, meaning = max(seen, key=lambda pair: pair[1].confidence)
    same = [item for item, other in seen if other is meaning]
    return [
        Finding(
            suspects=_ends(same) if event.kind == "ib_completion" and meaning.kind != "undetermined" else (),
            kind=meaning.kind,
            layer=meaning.layer if meaning.kind != "undetermined" else "undetermined",
            victims=tuple(sorted({item.rank for item, _ in seen if item.rank is not None})),
            confidence=min(meaning.confidence, 0.5),
            evidence=(
                f"{meaning.says}: a symptom, the cause is not in these logs",
                *_quotes([item for item, _ in seen]),
            ),
            next_probe=f"{meaning.then}; logs of all ranks from the first error on, dmesg of the nodes",
        )
    ]


def _ends(events: list[LogEvent]) -> tuple[tuple[Suspect, ...], ...]:
    """The ends of transfers that were not acknowledged: one set of both, or the one end that all of several share."""
    ways = {
        (Suspect(node=event.node, device=event.fields.get("device")), Suspect(node=event.fields["peer"]))
        for event in events
        if event.node is not None and event.fields.get("peer")
    }
    if not ways:
        return ()
    near, far = {way[0] for way in ways}, {way[1] for way in ways}
    if len(near) > 2 and len(far) == 1:
        return (tuple(far),)
    if len(far) > 2 and len(near) == 1:
        return (tuple(near),)
    return (tuple(sorted(near | far, key=str)),) if len(near | far) <= 2 * _SHOWN else ()


def _tells(event: LogEvent) -> tuple[bool, bool]:
    """How much a line tells of the process that ended."""
    return event.kind == "first_failure", event.rank is not None or "ranks" in event.fields


def _claims(case: LogCase) -> list[tuple[LogEvent, FaultLine]]:
    return [pair for pair in named_events(case, "cause") if is_claim(pair[0])]


def _counts(case: LogCase, event: LogEvent) -> bool:
    """Not an end without an error, nor a warning of a device after which training went on."""
    if event.kind == "process_ended":
        return event.fields.get("code", "1") != "0"
    if event.kind in ("peer_closed", "store_wait"):
        return not _after_the_end(case, event)
    return event.kind != "xid" or not case.has("step_progress", claims=False)


def _after_the_end(case: LogCase, event: LogEvent) -> bool:
    """Connections that close when training has ended and nothing failed: processes leave one after the other."""
    if case.has("watchdog_timeout", "exception", "first_failure", "crashed", "teardown", "nccl_error", "gloo_timeout"):
        return False
    return any(
        end.line < event.line if end.path == event.path else end.rank == event.rank
        for end in case.of("training_ended", claims=False)
    )


def _passed(case: LogCase, event: LogEvent) -> bool:
    """Whether a file server answers again, or the process that the kernel ended is none of the job's, by its name."""
    steps = case.of("step_progress", claims=False)
    if not steps or case.has(*FAILURES, "exception", claims=False):
        return False
    if event.kind == "oom_killed":
        command = event.fields.get("command", "")
        after = any(item.path == event.path and item.line > event.line for item in steps)
        return after and bool(command) and _OURS.search(command) is None
    return any(
        item.path == event.path and item.line > event.line and item.fields.get("server") == event.fields.get("server")
        for item in case.of("storage_back")
    )


def _recovered(case: LogCase, event: LogEvent) -> bool:
    """A port that came back, in a log that goes on training after it, is no fault any more; nor is a file server that
    answers again, or the end of a process of somebody else, where training goes on and nothing failed."""
    if event.kind in ("storage_server", "oom_killed"):
        return _passed(case, event)
    if event.kind not in ("ib_event", "nic_down") or case.has("watchdog_timeout", "ib_completion", "nccl_error"):
        return False
    later = [item for item in case.of("nic_up", "ib_event") if item.path == event.path and item.line > event.line]
    back = any(item.kind == "nic_up" or "active" in item.fields.get("event", "") for item in later)
    return back and any(item.path == event.path and item.line > event.line for item in case.of("step_progress"))


def _by_layer(case: LogCase, pairs: list[tuple[LogEvent, FaultLine]]) -> list[Finding]:
    """Hard evidence of one layer is one fault, unless it names different nodes or devices."""
    layers: dict[str, list[tuple[LogEvent, FaultLine]]] = defaultdict(list)
    workers = any(event.kind == "oom_killed" and meaning.layer == "dataloader" for event, meaning in pairs)
    for pair in pairs:
        if workers and pair[0].kind == "oom_killed" and pair[1].layer != "dataloader":
            continue
        layers[pair[1].layer].append(pair)
    return [_finding(case, same) for same in layers.values()]


def _first_of(case: LogCase, pairs: list[tuple[LogEvent, FaultLine]]) -> Finding:
    """The finding of the first cause; clocks decide if all have them, else the order in the logs."""
    timed = all(event.wall is not None for event, _ in pairs)
    event, meaning = min(pairs, key=lambda pair: pair[0].wall or 0.0) if timed else pairs[0]
    same = [pair for pair in pairs if pair[1] is meaning]
    followed = [pair[0] for pair in pairs if pair[1] is not meaning and pair[1].event != "exception"]
    finding = _finding(case, same)
    if not finding.suspects:
        placed = [pair[0] for pair in pairs if pair[1].layer == meaning.layer and pair[1].event != "exception"]
        finding = msgspec.structs.replace(finding, suspects=_suspects(placed)[:1])
    everywhere = {pair[0].rank for pair in same if pair[0].rank is not None}
    if len(everywhere) > 2 and len(everywhere) >= (case.world()[0] or len(everywhere)):
        finding = msgspec.structs.replace(
            finding, suspects=(), evidence=("every rank fails in the same way", *finding.evidence)
        )
    if followed:
        finding = msgspec.structs.replace(
            finding, evidence=(*finding.evidence, *(f"later: {quotation(item)}" for item in followed[:2]))
        )
    return finding


def _finding(case: LogCase, pairs: list[tuple[LogEvent, FaultLine]]) -> Finding:
    """One finding out of events that mean the same; the first of them leads."""
    event, meaning = pairs[0]
    suspects = _suspects([pair[0] for pair in pairs])
    blamed = {suspect.rank for group in suspects for suspect in group}
    victims = sorted(rank for rank in _waiting(case) if rank not in blamed)
    stands = case.has("watchdog_timeout") and meaning.layer == "hardware_link"
    evidence = [meaning.says, *_quotes([pair[0] for pair in pairs])]
    if meaning.layer == "hardware_gpu" and case.has("gpu_memory"):
        evidence.append(f"after it, likely on the same device: {quotation(case.of('gpu_memory')[0])}")
    if not suspects and meaning.layer in (*_HARDWARE, "storage", "host_cpu"):
        evidence.append("which node it was cannot be told from these lines: no host stands in front of them")
    return Finding(
        kind="communication_hang" if stands else meaning.kind,
        layer=meaning.layer,
        suspects=suspects,
        victims=tuple(victims),
        confidence=meaning.confidence,
        evidence=tuple(evidence),
        next_probe=meaning.then if suspects else _where(meaning),
        node=suspects[0][0].node if suspects else None,
    )


def _where(meaning: FaultLine) -> str:
    if meaning.layer in _HARDWARE:
        return (
            f"logs with the host's name in each line; where the fault came twice, intersect the node "
            f"lists of both jobs "
            f"and exclude what they share before the next start; {meaning.then}"
        )
    return meaning.then


def _suspects(events: list[LogEvent]) -> tuple[tuple[Suspect, ...], ...]:
    """Each place that is named, the first first, as a set of its own; two ranks that clash are one set."""
    if not events:
        return ()
    if "first" in events[0].fields and "second" in events[0].fields:
        both = sorted({int(events[0].fields["first"]), int(events[0].fields["second"])})
        return (tuple(Suspect(rank=rank) for rank in both),)
    found: dict[tuple[object, ...], Suspect] = {}
    about = sorted({rank for event in events for rank in rank_list(event.fields.get("about", ""))})
    if about:
        return tuple((Suspect(rank=rank),) for rank in about[: 2 * _SHOWN])
    for event in events:
        suspect = suspect_of(event)
        if suspect is not None:
            known = found.setdefault(_place(suspect), suspect)
            if known.device is None and suspect.device is not None:
                found[_place(suspect)] = suspect
    places = list(found.values())
    if events[0].kind == "nccl_connect_failed":
        return ()  # who could not reach the other says it, not who is at fault
    if any(place.rank is not None for place in places):
        places = [place for place in places if place.rank is not None]
    return tuple((place,) for place in places[: 2 * _SHOWN])


def _place(suspect: Suspect) -> tuple[object, ...]:
    """What makes two events speak of one place; a device counts only where nothing else is known."""
    if suspect.rank is None and suspect.node is None:
        return (suspect.device,)
    return (suspect.rank, suspect.node, suspect.pid)


def _quotes(events: list[LogEvent]) -> list[str]:
    lines = list(dict.fromkeys(quotation(event) for event in events[:_SHOWN]))
    return [*lines, f"and {len(events) - _SHOWN} more lines of this kind"] if len(events) > _SHOWN else lines


def _waiting(case: LogCase) -> set[int]:
    return {
        event.rank for event in case.of("watchdog_timeout", "peer_closed", "gloo_timeout") if event.rank is not None
    }


def _weaker(finding: Finding) -> Finding:
    return msgspec.structs.replace(
        finding,
        confidence=finding.confidence * _SAID_BY_PERSON,
        evidence=("only a person's description says so", *finding.evidence),
    )


def _killed(case: LogCase, event: LogEvent, *, number: int) -> Finding:
    """A process that a signal ended, without a line that says why."""
    signal = event.fields["signal"]
    suspect = suspect_of(event, device=False)
    ranks = event.fields.get("ranks", "")
    suspects = tuple((Suspect(rank=int(rank), node=event.node),) for rank in ranks.split(",") if rank.strip().isdigit())
    return Finding(
        kind="crash",
        layer="software_library" if signal == "SIGSEGV" else "undetermined",
        suspects=suspects or (((suspect,),) if suspect is not None else ()),
        victims=tuple(sorted(rank for rank in _waiting(case) if rank != event.rank)),
        confidence=0.5,
        evidence=(f"{signal} ended a process; {words([number])} lines tell of its end, none why", quotation(event)),
        next_probe=(
            "dmesg of the node (was it the kernel, for memory?), the scheduler's log (was it told to?), a core dump"
        ),
    )
