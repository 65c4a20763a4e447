"""A finding in plain words, for the person whose job it was: what, who first, who only waited, whose, what next."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from keepstep.diagnosis.hang_words import listed
from keepstep.records.evidence import Unread
from keepstep.records.finding import Finding, FindingKind, Layer, Suspect
from keepstep.records.finding_words import suspect_words

__all__ = ["failure_report", "how_sure", "owner_of"]

_WIDTH = 118
_LABEL = 22
_SHOWN = 8
_LONGEST = 400

_HAPPENED: dict[FindingKind, str] = {
    "noncommunication_hang": "The job stood still: not all ranks came to a collective that the others were waiting in.",
    "communication_hang": "The job stood still inside communication: ranks had come, and the transfer did not end.",
    "compute_slow": "The job was slow because of the time spent outside communication.",
    "communication_slow": "The job was slow because of its communication.",
    "startup_never_arrived": "The job did not start: not all ranks arrived.",
    "startup_died": "The job did not start: a rank arrived and died.",
    "startup_disagrees": "The job did not start: ranks disagreed about what they share.",
    "collective_mismatch": "Ranks did not call the same collectives: they could only wait for each other.",
    "imbalance": "The job was slowed by uneven work. No member is at fault.",
    "state_divergence": "Replicas that should be equal held different state.",
    "crash": "A process of the job failed; the others could not go on without it.",
    "reporter_silent": "A rank said nothing where all others reported.",
    "healthy": "Nothing is wrong.",
    "undetermined": "What was given does not show the cause.",
}
_ALARM = "A check failed, and not for a fault of the hardware: a false alarm."
_OWNERS: dict[Layer, str] = {
    "hardware_gpu": "the owner of the hardware: a device of a node",
    "hardware_link": "the cluster's network: a port, cable or link",
    "host_cpu": "whoever sets up the hosts: processor, memory or binding of a node",
    "storage": "the owner of the storage",
    "dataloader": "the job: its data loading (and the storage it reads, if that is slow)",
    "application": "the job: its own code",
    "software_library": "a library: its version or a defect in it",
    "configuration": "whoever set up the job or the node: a setting",
    "undetermined": "not known yet",
}


_WORDS = ((0.9, "almost certain"), (0.75, "very likely"), (0.55, "likely"), (0.35, "possible"), (0.15, "a weak hint"))


def owner_of(finding: Finding) -> str:
    """Whose problem a finding is, in words."""
    return "nobody" if finding.kind == "healthy" and finding.layer == "undetermined" else _OWNERS[finding.layer]


def how_sure(confidence: float) -> str:
    """A word and the number: `almost certain (95 %)`."""
    word = next((name for least, name in _WORDS if confidence >= least), "no basis for a verdict")
    return f"{word} ({confidence:.0%})"


def failure_report(findings: Sequence[Finding], unread: Sequence[Unread] = (), *, read: int = 0) -> str:
    """The whole text: one section for each finding, then what could not be read."""
    lines = [_summary(findings, read=read, unread=len(unread)), ""]
    several = len({finding.job for finding in findings}) > 1
    for number, finding in enumerate(findings, 1):
        lines += _section(finding, f"{number}. " if len(findings) > 1 else "", job=finding.job if several else "")
        lines.append("")
    if unread:
        lines.append("Not read")
        lines += [_cut(f"  {item.path}: {item.why}") for item in unread[: 4 * _SHOWN]]
        lines += [f"  and {len(unread) - 4 * _SHOWN} more"] if len(unread) > 4 * _SHOWN else []
    return ("\n".join(lines).rstrip() + "\n").encode("utf-8", "replace").decode()


def _summary(findings: Sequence[Finding], *, read: int, unread: int) -> str:
    wrong = [finding for finding in findings if finding.kind != "healthy"]
    known = [finding for finding in wrong if finding.kind != "undetermined"]
    files = f"{read} {'input' if read == 1 else 'inputs'} read" + (f", {unread} not" if unread else "")
    if not wrong:
        setting = any(finding.layer == "configuration" for finding in findings)
        return f"{'No fault, but a setting to correct' if setting else 'Nothing wrong was found'} ({files})."
    if not known:
        return f"The cause cannot be determined from what was given ({files})."
    jobs = len({finding.job for finding in findings})
    found = f"{len(known)} {'fault' if len(known) == 1 else 'faults'} found"
    return f"{found} in the files of {jobs} jobs ({files})." if jobs > 1 else f"{found} ({files})."


def _section(finding: Finding, number: str, *, job: str) -> list[str]:
    alarm = finding.kind == "healthy" and finding.layer == "configuration"
    lines = _field(f"{number}What happened", _ALARM if alarm else _HAPPENED[finding.kind])
    lines += _field("Job", job) if job else []
    if finding.suspects:
        lines += _field("First out of pattern", _who(finding.suspects))
    elif finding.kind not in ("healthy", "imbalance", "undetermined"):
        lines += _field("First out of pattern", "no rank or node can be named from what was given")
    lines += _why(finding.evidence)
    if finding.victims:
        lines += _field("Only waited", listed(finding.victims))
    lines += _field("Whose problem", owner_of(finding))
    lines += _field("How sure", how_sure(finding.confidence))
    if finding.cost is not None:
        lines += _field("Cost", f"{finding.cost:.3g} GPU-seconds per step")
    lines += _field("What to do next", _next(finding))
    if finding.next_probe and finding.kind not in ("undetermined", "healthy"):
        lines += _field("To be certain", finding.next_probe)
    return lines


def _who(suspects: Sequence[Sequence[Suspect]]) -> str:
    """Sets joined by `and`, members of a set that cannot be told apart by `or`."""
    sets = [_set(group) for group in suspects[:_SHOWN]]
    return " and ".join(sets) + (f" and {len(suspects) - _SHOWN} more" if len(suspects) > _SHOWN else "")


def _set(group: Sequence[Suspect]) -> str:
    text = " or ".join(_named(suspect) for suspect in group[:_SHOWN])
    more = f" or {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
    return f"one of: {text}{more} (cannot be told apart)" if len(group) > 1 else text


def _named(suspect: Suspect) -> str:
    process = f"process {suspect.pid} on " if suspect.pid is not None and suspect.node is not None else ""
    return process + (f"node {suspect.node}" if process else suspect_words(suspect))


def _why(evidence: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for index, item in enumerate(evidence[: 2 * _SHOWN]):
        lines += _field("Why" if index == 0 else "", f"- {_cut(item)}")
    if len(evidence) > 2 * _SHOWN:
        lines += _field("", f"- and {len(evidence) - 2 * _SHOWN} more")
    return lines


def _next(finding: Finding) -> str:
    if finding.kind == "undetermined":
        return f"collect: {finding.next_probe}" if finding.next_probe else "collect logs and stacks of all ranks"
    if finding.kind == "healthy":
        if finding.layer == "undetermined":
            return f"nothing; to be certain: {finding.next_probe}" if finding.next_probe else "nothing"
        return finding.next_probe or "nothing"
    return _ADVICE[finding.layer] if finding.kind != "imbalance" else "spread the work more evenly; exclude no node"


_ADVICE: dict[Layer, str] = {
    "hardware_gpu": "exclude the node before the job starts again, and hand it to the owner of the hardware with "
    "these lines",
    "hardware_link": "hand these lines to the network team; start again without the node of the first event",
    "host_cpu": "look at memory, binding and load of the host; start again with the setting corrected",
    "storage": "ask the owner of the storage about this time; start again when it answers",
    "dataloader": "look at the loader of the ranks named; the network and the other ranks are not involved",
    "application": "look at the code at the place quoted; a new start alone would fail in the same way, no node "
    "has to be excluded",
    "software_library": "compare the version with its known defects; try another version, or without the feature named",
    "configuration": "correct the setting and start again; no node has to be drained",
    "undetermined": "do what makes it certain, below, before any node is excluded",
}


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _field(label: str, text: str) -> list[str]:
    """A label and its text beside it, wrapped."""
    indent = "  " if text.startswith("- ") else ""
    body = textwrap.wrap(text, _WIDTH - _LABEL, subsequent_indent=indent)
    return [f"{label if index == 0 else '':<{_LABEL}}{line}" for index, line in enumerate(body or [""])]
