"""Ranks that disagree about what to do together: reports of torch, call logs of NCCL, models of different shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from keepstep.diagnosis.call_groups import Calls, calls_by_communicator
from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation, rank_list, words
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, Suspect
from keepstep.records.finding_words import suspect_words

__all__ = ["calls_that_differ", "fingerprint_findings", "models_that_differ"]

_CLAIM = 0.9
_LATEST_CALLS = 64


def fingerprint_findings(case: LogCase) -> list[Finding]:
    """Findings of `Detected mismatch between collectives` reports: who ran what. One of two cannot be blamed alone."""
    said: dict[int, dict[str, str]] = {}
    reports = case.of("mismatch_ranks")
    for event in reports:
        for fields in _sides(event.fields.get("report", "")):
            said[int(fields["rank"])] = fields
    if len(said) < 2:
        events = case.of("mismatch_report")
        return [_torn_report(events)] if events else []
    return [_by_opinion({rank: _what(fields) for rank, fields in said.items()}, reports=reports, said=said)]


def _torn_report(events: list[LogEvent]) -> Finding:
    return Finding(
        kind="collective_mismatch",
        layer="application",
        confidence=0.7,
        evidence=("torch found that ranks called different collectives; the report is cut off", quotation(events[0])),
        next_probe="the whole message: it names both ranks and what each called",
    )


_SIDE = re.compile(r"\bRank (?P<rank>\d+)\b(?P<rest>.*?)(?=\bRank \d+\b|$)", re.DOTALL)
_FORMS: dict[str, tuple[re.Pattern[str], ...]] = {
    "op": (
        re.compile(r"OpType=(\w+)"),
        re.compile(r"running:? (?:collective:? )?(?![Cc]ollective|[Ss]equence)([A-Za-z_]\w+)"),
        re.compile(r"[:,]\s*(_?[A-Z][A-Z_]{3,})\b"),
    ),
    "shape": (
        re.compile(r"TensorShape\s*=?\s*\[([\d, ]*)\]"),
        re.compile(r"shapes?\s*=?\s*[\[(]([\d, ]*)[\])]"),
    ),
    "sequence": (re.compile(r"SequenceNumber=(\d+)"),),
    "dtype": (re.compile(r"TensorDtypes=(\w+)"),),
}


def _sides(report: str) -> list[dict[str, str]]:
    """rank, op, shape, sequence and dtype of each side of a report, as far as they are printed."""
    found = []
    for match in _SIDE.finditer(report.split("collectives on ranks", 1)[-1]):
        fields = {"rank": match["rank"]}
        for name, forms in _FORMS.items():
            inner = next((hit for form in forms if (hit := form.search(match["rest"]))), None)
            if inner is not None:
                fields[name] = inner[1]
        if len(fields) > 1:
            found.append(fields)
    return found


def _what(fields: dict[str, str]) -> tuple[str, ...]:
    return tuple(fields.get(name, "").lower().strip("_") for name in ("op", "shape", "sequence", "dtype"))


def _by_opinion(
    opinions: dict[int, tuple[str, ...]], *, reports: list[LogEvent], said: dict[int, dict[str, str]]
) -> Finding:
    counts = Counter(opinions.values())
    usual, most = counts.most_common(1)[0]
    minority = sorted(rank for rank, what in opinions.items() if what != usual)
    clear = most > len(opinions) - most and most >= 2
    names = {name for what in opinions.values() for name in (_differences(what, usual))}
    suspects = (
        tuple((Suspect(rank=rank),) for rank in minority)
        if clear
        else (tuple(Suspect(rank=rank) for rank in sorted(opinions)),)
    )
    return Finding(
        kind="collective_mismatch",
        layer="application",
        suspects=suspects,
        victims=tuple(sorted(rank for rank, what in opinions.items() if clear and what == usual)),
        confidence=0.95,
        evidence=(
            f"{listed(opinions)} called different collectives; what differs: {words(sorted(names))}",
            *(_tell(rank, said[rank]) for rank in sorted(said)[:8]),
            *_shape_words(said),
            quotation(reports[0]),
        ),
        next_probe="the Python stacks of both ranks at this call, and the lengths that led to these shapes",
    )


def _differences(what: tuple[str, ...], usual: tuple[str, ...]) -> list[str]:
    names = ("operation", "shape", "number of calls so far", "element type")
    return [name for name, mine, theirs in zip(names, what, usual, strict=True) if mine != theirs]


def _tell(rank: int, fields: dict[str, str]) -> str:
    parts = [f"{name} {fields[name]}" for name in ("op", "shape", "sequence", "dtype") if name in fields]
    return f"rank {rank}: {', '.join(parts)}"


def _shape_words(said: dict[int, dict[str, str]]) -> list[str]:
    """Same operation, same order, and shapes that differ in one dimension: a length that does not divide evenly."""
    if len({(fields.get("op"), fields.get("sequence")) for fields in said.values()}) != 1:
        return []
    shapes = {
        tuple(part.strip() for part in fields["shape"].split(",")) for fields in said.values() if "shape" in fields
    }
    if len(shapes) != 2 or len({len(shape) for shape in shapes}) != 1:
        return []
    first, second = sorted(shapes)
    odd = [(mine, other) for mine, other in zip(first, second, strict=True) if mine != other]
    if len(odd) != 1:
        return []
    return [
        f"same operation in the same order, one dimension differs ({odd[0][0]} and {odd[0][1]}): shards are uneven, "
        "as where a length is not divisible by the size of the group"
    ]


def calls_that_differ(case: LogCase) -> list[Finding]:
    """Findings of call logs (`AllReduce: opCount ...`): ranks whose call of one number is another operation or size."""
    told = [calls for calls in calls_by_communicator(case) if len(calls) > 1]
    for look in (_call_that_differs, _behind_in_calls):
        for calls in told:
            if found := look(case, calls):
                return found
    return []


def _call_that_differs(case: LogCase, calls: Calls) -> list[Finding]:
    """The first call of one communicator that is not the same on all who made it."""
    alike = _said_alike(case, {caller.rank for caller in calls})
    for count in sorted({count for said in calls.values() for count in said}, key=lambda text: int(text, 16)):
        here = {caller: said[count] for caller, said in calls.items() if count in said}
        opinions = {
            caller: (event.fields["op"], event.fields["numel"], event.fields["dtype"]) for caller, event in here.items()
        }
        said_so = {Suspect(rank=rank): opinions.get(Suspect(rank=like)) for rank, like in alike.items()}
        opinions |= {caller: what for caller, what in said_so.items() if what is not None}
        if len({what[:1] for what in opinions.values()}) > 1 or _sizes_differ(opinions):
            return [_call_finding(opinions, here, count=count, claimed=sorted(alike))]
    return []


def _behind_in_calls(case: LogCase, calls: Calls) -> list[Finding]:
    """Ranks whose newest call is an earlier one than that of the others."""
    newest = {caller: max(said, key=lambda text: int(text, 16)) for caller, said in calls.items()}
    top = max(newest.values(), key=lambda text: int(text, 16))
    behind = _in_order(caller for caller, count in newest.items() if count != top)
    if not behind or len(behind) * 2 >= len(newest):
        return []
    return [
        Finding(
            kind="noncommunication_hang",
            suspects=tuple((caller,) for caller in behind),
            victims=_ranks(set(newest) - set(behind)),
            confidence=0.6,
            evidence=(
                f"the others have called {top}, {words([suspect_words(one) for one in behind])} only up to "
                f"{newest[behind[0]]}",
                quotation(calls[behind[0]][newest[behind[0]]]),
            ),
            next_probe="stacks of these ranks (py-spy dump): what do they do instead?",
        )
    ]


def _in_order(callers: Iterable[Suspect]) -> list[Suspect]:
    return sorted(callers, key=lambda one: (one.rank is None, one.rank or 0, one.node or "", one.pid or 0))


def _ranks(callers: Iterable[Suspect]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in callers if one.rank is not None))


def _sizes_differ(opinions: dict[Suspect, tuple[str, str, str]]) -> bool:
    return {what[0] for what in opinions.values()} <= {"AllReduce", "Broadcast", "Bcast", "Reduce"} and len(
        set(opinions.values())
    ) > 1


def _said_alike(case: LogCase, known: set[int | None]) -> dict[int, int]:
    """Ranks of which a person says that they called the same as another."""
    found = {}
    for event in case.of("note_same"):
        like = int(event.fields["like"])
        found.update({rank: like for rank in rank_list(event.fields["ranks"]) if rank not in known})
    return found


def _call_finding(
    opinions: dict[Suspect, tuple[str, str, str]], here: dict[Suspect, LogEvent], *, count: str, claimed: list[int]
) -> Finding:
    counts = Counter(opinions.values())
    usual, most = counts.most_common(1)[0]
    minority = _in_order(caller for caller, what in opinions.items() if what != usual)
    clear = most > len(minority)
    everybody = _in_order(opinions)
    evidence = [f"call {count}: {words([f'{suspect_words(one)} {opinions[one][0]}' for one in everybody])}"]
    evidence += [quotation(event) for event in list(here.values())[:4]]
    streams = {event.fields["stream"] for event in here.values() if "stream" in event.fields}
    if len(streams) > 1:
        evidence.append(f"on different streams: {words(sorted(streams))}")
    if claimed:
        evidence.append(f"that {listed(claimed)} called the same as another one is a person's word, not in the log")
    return Finding(
        kind="collective_mismatch",
        layer="application",
        suspects=tuple((one,) for one in minority) if clear else (tuple(everybody),),
        victims=_ranks(set(opinions) - set(minority)) if clear else (),
        confidence=0.9 * (_CLAIM if claimed else 1.0) if clear else 0.7,
        evidence=tuple(evidence),
        next_probe="the Python stack of the rank that differs: which branch did it take?",
    )


def models_that_differ(case: LogCase) -> list[Finding]:
    """A rank whose model has other parameters than the others."""
    events = [event for event in case.of("model_differs") if event.fields.get("second")]
    if not events:
        return []
    seconds = {int(event.fields["second"]) for event in events}
    firsts = {int(event.fields["first"]) for event in events if event.fields.get("first")}
    both = tuple(Suspect(rank=rank) for rank in sorted(firsts | seconds))
    return [
        Finding(
            kind="startup_disagrees",
            layer="application",
            suspects=(both,),
            confidence=0.9,
            evidence=("ranks built different models", *(quotation(event) for event in events[:3])),
            next_probe="names and shapes of all parameters on both ranks, compared",
        )
    ]
