"""Findings that need no analysis: a process is stopped, does nothing by two looks at it, or was ended by a signal."""

from __future__ import annotations

import re
import signal as signals
import statistics

from keepstep.control.exits import SELF_INFLICTED
from keepstep.records.domain_messages import NodeLost, StateTaken
from keepstep.records.events import Finding, Suspect
from keepstep.records.messages import MemberExited, MemberStopped
from keepstep.records.watch_messages import MemberHung, MismatchSaid

__all__ = ["corrupt_checkpoint", "ended_by_signal", "mismatch_said", "node_gone", "slow_source", "stands_still"]


_MOST_CHARACTERS = 300
_MUCH_LESS = 3
_TELLING_BYTES = 16 << 20
"""What the usual source must have given at least: eight units."""


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


def node_gone(fact: NodeLost, ranks: tuple[int, ...]) -> Finding:
    """The agent of a node is gone, and with it the members of `ranks`."""
    with_it = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank"
    return Finding(
        kind="crash",
        node=fact.node,
        suspects=((Suspect(node=fact.node),),),
        evidence=(f"node {fact.node} is lost with {with_it}: {fact.why}",),
        next_probe=f"is {fact.node} reachable, and are its neighbours in the same rack or feed?",
    )


def corrupt_checkpoint(rank: int, skipped: str) -> Finding | None:
    """Member `rank` skips a checkpoint with the words `skipped`: a finding if its bytes are not those written."""
    if "corrupt" not in skipped:
        return None
    part = re.search(r"rank-(\d{1,8})", skipped)
    return Finding(
        kind="state_divergence",
        layer="storage",
        suspects=((Suspect(rank=int(part[1]) if part else rank),),),
        evidence=(f"a checkpoint is not used: {skipped[:_MOST_CHARACTERS]}",),
        next_probe="the disk or file system that holds it: its own checks, its log",
    )


def slow_source(fact: StateTaken) -> Finding | None:
    """The source that gave far less than the others, of several that were asked for as much as they could give.

    None where the state was too small to tell, or all gave alike. Sources share one queue of units of 2 MiB.
    """
    given = sorted(fact.by_source.items(), key=lambda item: item[1])
    if len(given) < 2:
        return None
    rank, least = given[0]
    usual = statistics.median(nbytes for _, nbytes in given[1:])
    if usual < _TELLING_BYTES or least * _MUCH_LESS > usual:
        return None
    return Finding(
        kind="communication_slow",
        suspects=((Suspect(source=rank), Suspect(link=(rank, fact.rank))),),
        victims=(fact.rank,),
        confidence=0.8,
        evidence=(
            f"while rank {fact.rank} took its state, rank {rank} gave {least / 1e6:.1f} MB, "
            f"the others {usual / 1e6:.1f} MB each in the same time",
        ),
        next_probe=f"bandwidth from rank {rank} to rank {fact.rank} and to another rank",
    )


def mismatch_said(node: str, fact: MismatchSaid) -> Finding:
    """A library in the member of `fact` on `node` got what does not fit its call: whose call is the odd one is open."""
    return Finding(
        kind="collective_mismatch",
        layer="application",
        node=node,
        victims=(fact.rank,),
        confidence=0.9,
        evidence=(f"rank {fact.rank} says: {fact.said}", "its call is another one than the others', or a peer's is"),
        next_probe="run again with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then compares the calls of all ranks",
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
