"""Findings that need no analysis: a process is stopped, does nothing by two looks at it, or was ended by a signal."""

from __future__ import annotations

import signal as signals

from keepstep.control.exits import SELF_INFLICTED
from keepstep.records.events import Finding, Suspect
from keepstep.records.messages import MemberExited, MemberStopped
from keepstep.records.watch_messages import MemberHung

__all__ = ["ended_by_signal", "stands_still"]


def stands_still(node: str, fact: MemberStopped | MemberHung) -> Finding:
    """The member of `fact` on `node` is alive and does nothing."""
    stopped = isinstance(fact, MemberStopped)
    return Finding(
        kind="noncommunication_hang",
        layer="host_cpu" if stopped else "undetermined",
        rank=fact.rank,
        node=node,
        member=fact.member,
        suspects=((Suspect(rank=fact.rank),),),
        evidence=("its process is in state T: stopped by a signal" if stopped else "its stack does not move",),
        next_probe="who stopped the process: a debugger, the host's memory guard, a person?" if stopped else "",
    )


def ended_by_signal(node: str, fact: MemberExited) -> Finding:
    """The member of `fact` on `node` was ended by a signal of its own doing, or of somebody else's."""
    own = fact.signal in SELF_INFLICTED
    try:
        name = signals.Signals(fact.signal).name
    except ValueError:
        name = f"signal {fact.signal}"
    whose = (
        "which a program causes itself" if own else "which comes from outside: a person, the memory guard, a job system"
    )
    return Finding(
        kind="crash",
        layer="application" if own else "undetermined",
        rank=fact.rank,
        node=node,
        member=fact.member,
        suspects=((Suspect(rank=fact.rank),),),
        evidence=(f"the process of rank {fact.rank} on {node} was ended by {name}, {whose}",),
        next_probe="its log and core file" if own else f"the kernel's log of {node} at that moment (out of memory?)",
    )
