"""How a transcript writes what a machine did: one line for each change of state, order, milestone and record."""

from __future__ import annotations

from itertools import groupby

import msgspec

from keepstep.control.job_state import Decision, Directed, JobState
from keepstep.control.member import MemberState
from keepstep.records.incident import PHASES, Incident
from keepstep.records.messages import Address
from keepstep.records.mirror_messages import PlaceMirror
from keepstep.records.moves import MOVE_MARKS

HIDDEN = {"epoch", "why", "secret", "environment", "world", "attempt", "type", "replicas", "drill", "failed"}
SAID_IF_SET = {"renew", "anew", "move", "leaver"}


def shown(thing) -> str:
    """A value, short: rosters as 0:m0, tuples as 1,2, bytes as text."""
    if isinstance(thing, bytes):
        return thing.decode() or "-"
    if isinstance(thing, Address):
        return thing.member
    if isinstance(thing, dict):
        return ",".join(f"{key}:{shown(item)}" for key, item in thing.items()) or "-"
    if isinstance(thing, (tuple, frozenset)):
        return ",".join(shown(item) for item in thing) or "-"
    if isinstance(thing, bool):
        return str(thing).lower()
    if isinstance(thing, float):
        return f"{thing:g}"
    if isinstance(thing, msgspec.Struct):
        return f"({worded(thing)})"
    return str(thing)


def worded(struct: msgspec.Struct) -> str:
    """A struct as `Name field=value ...`."""
    names = [field.name for field in msgspec.structs.fields(struct) if field.name not in HIDDEN]
    names = [name for name in names if name not in SAID_IF_SET or getattr(struct, name)]
    words = [type(struct).__name__, *(f"{name}={shown(getattr(struct, name))}" for name in names)]
    return " ".join(words)


def members_changed(before: JobState, after: JobState) -> list[str]:
    lines = []
    for name, member in after.members.items():
        old = before.members.get(name)
        if old is None:
            role = f"rank {member.rank}" if member.rank >= 0 else "standby"
            lines.append(f"{name} is {member.status.value} on {member.node}: {role}")
        elif (old.status, old.rank) != (member.status, member.rank):
            role = f" as rank {member.rank}" if old.rank != member.rank else ""
            lines.append(f"{name} {old.status.value} -> {member.status.value}{role}")
    return lines


def order_lines(orders: tuple[Directed, ...], because: str) -> list[str]:
    """Equal orders to several members are one line; a reason that is in `because` is not said again."""
    lines = []
    orders = tuple(one for one in orders if not isinstance(one.order, PlaceMirror))  # to all, at every change
    for (words, reason), group in groupby(orders, key=lambda d: (worded(d.order), d.reason)):
        targets = ",".join(d.member or d.node for d in group)
        known = reason in because or reason in words
        lines.append(f"order {targets}: {words}" + ("" if known else f" ({reason})"))
    return lines


def record_lines(decision: Decision) -> list[str]:
    lines = []
    for (number, rank), group in groupby(decision.milestones, key=lambda m: (m.incident, m.rank)):
        lines.append(f"milestone of incident {number}, rank {rank}: {', '.join(m.name for m in group)}")
    for move in decision.moves:
        marks = " ".join(f"{name}={getattr(move, name + '_s'):g}" for name in MOVE_MARKS if getattr(move, f"{name}_s"))
        lines.append(f"record of move {move.number}: {move.outcome} refused={move.refused} {marks}".rstrip())
    for finding in decision.findings:
        lines.append(f"finding {finding.kind} rank={finding.rank} step={finding.step}: {finding.evidence[0]}")
    for one in decision.incidents:
        phases = " ".join(f"{name}={getattr(one, name):g}" for name in PHASES if getattr(one, name) is not None)
        lines.append(
            f"incident {one.number} {one.kind} {_whom(one)} step={one.step} "
            f"recomputed={one.steps_recomputed} changed={one.members_changed} {phases}"
            + (f" from={one.source}" if one.source not in ("", "replica") else "")
            + (f" note: {one.note}" if one.note else "")
        )
    return lines


def _whom(incident: Incident) -> str:
    """Who was lost: one member, or several ranks as one."""
    if incident.ranks:
        return f"ranks={','.join(map(str, incident.ranks))} domain={incident.domain.replace('=', ':')}"
    return f"rank={incident.rank} member={incident.member}"


def lines_of(before: JobState, decision: Decision) -> list[str]:
    """Everything that came of one event."""
    after = decision.state
    lines = [f"because {reason}" for reason in (decision.reason,) if reason]
    if before.phase != after.phase:
        code = f" (exit code {after.exit_code})" if after.exit_code is not None else ""
        lines.append(f"phase {before.phase} -> {after.phase}{code}")
    lines += members_changed(before, after)
    return lines + order_lines(decision.orders, decision.reason) + record_lines(decision)


def lines_of_machine(before: MemberState, after: MemberState, act: msgspec.Struct | None) -> list[str]:
    """What a member's machine does, and what it knows now that it did not."""
    lines = [] if act is None else [worded(act)]
    for field in msgspec.structs.fields(after):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new:
            lines.append(f"{field.name} {shown(old)} -> {shown(new)}")
    return lines
