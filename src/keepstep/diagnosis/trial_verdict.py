"""All that trials of the kinds of rank of one job show, put together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.trial_calls import call_findings
from keepstep.diagnosis.trial_faults import fault_findings, world_findings
from keepstep.diagnosis.trial_groups import agreed_groups, group_findings
from keepstep.diagnosis.trial_order import order_findings
from keepstep.diagnosis.trial_pairs import pair_findings
from keepstep.records.operations import COLLECTIVES
from keepstep.records.trial import CallKept, Trace, TrialFinding

__all__ = ["NodeMemory", "memory_finding", "node_memory", "not_looked_at", "trial_findings"]

_BEFORE_CALLS = ("world_fixed", "rank_fixed")


class NodeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a node with `local` ranks, in bytes. `measured_bytes` is the largest peak of one trial (of `rank`), of
    which `shared_bytes` are libraries that all ranks of a node share; `modelled_bytes` is what `local` ranks take."""

    rank: int
    local: int
    measured_bytes: int
    shared_bytes: int
    modelled_bytes: int
    node_bytes: int


def trial_findings(traces: Sequence[Trace], world: int) -> list[TrialFinding]:
    """Everything that would fail, causes first. Ranks that did not come to their end take part as far as they came."""
    found = [*world_findings(traces, world), *fault_findings(traces)]
    if any(one.kind in _BEFORE_CALLS for one in found):
        return found  # everything else follows from it
    apart = group_findings(traces)
    if apart:
        return [*found, *apart]  # calls in groups that are not the same cannot be compared
    groups = agreed_groups(traces)
    calls = [*call_findings(traces, groups), *pair_findings(traces)]
    return [*found, *(calls or order_findings(traces, groups))]


def node_memory(traces: Sequence[Trace], local: int, *, node_bytes: int) -> NodeMemory | None:
    """What the largest trial came to, and what a node of such ranks would take; None if no trial came to its end."""
    ends = [(trace.rank, trace.ended) for trace in traces if trace.ended is not None]
    if not ends:
        return None
    rank, end = max(ends, key=lambda one: one[1].peak_bytes)
    shared = min(end.shared_bytes, end.peak_bytes)
    return NodeMemory(
        rank=rank,
        local=local,
        measured_bytes=end.peak_bytes,
        shared_bytes=shared,
        modelled_bytes=shared + local * (end.peak_bytes - shared),
        node_bytes=node_bytes,
    )


def memory_finding(memory: NodeMemory) -> list[TrialFinding]:
    """A finding if a node has too little."""
    if memory.modelled_bytes <= memory.node_bytes:
        return []
    gib = 1 << 30
    return [
        TrialFinding(
            kind="memory",
            ranks=(memory.rank,),
            sites=(),
            what=f"{memory.local} ranks on a node take {memory.modelled_bytes / gib:.1f} GiB (modelled from a peak of "
            f"{memory.measured_bytes / gib:.2f} GiB measured on rank {memory.rank}); a node has "
            f"{memory.node_bytes / gib:.1f} GiB",
            remedy="fewer ranks on a node, smaller batches, or shard what each rank holds",
        )
    ]


def not_looked_at(traces: Sequence[Trace], *, left: Sequence[int]) -> list[str]:
    """What the trials say nothing about. `left` are ranks that were worth a trial and had none."""
    said = []
    if left:
        said.append(f"{listed(left)}: no trial, the bound of trials or of time was reached")
    cut = [trace.rank for trace in traces if not trace.whole]
    if cut:
        said.append(f"what {listed(cut)} would do behind the place where the trial ended")
    guessed = [trace.rank for trace in traces if trace.guessed and not trace.whole]
    if guessed:
        said.append(f"{listed(guessed)}: they need objects of ranks that had no trial, and failed on others")
    if group_findings(traces):
        said.append("the order of calls: the groups have to agree first")
    lone = [trace for trace in traces if not trace.joined]
    if lone:
        said.append("the script neither calls keepstep.join() nor init_process_group(): its ranks do not communicate")
    elif traces and all(trace.joined[0].how != "join" for trace in traces):
        said.append("the script does not call keepstep.join(): after a loss it would be started again as a whole")
    if traces and not any(trace.steps for trace in traces) and not lone:
        said.append("training steps: none was begun")
    asked = [trace for trace in traces if any(data.kind == "stream" and data.batches < 0 for data in trace.data)]
    if asked:
        said.append("how many batches there are: the source does not say")
    if not any(isinstance(e, CallKept) and e.op in COLLECTIVES for trace in traces for e in trace.events) and not lone:
        said.append("collectives: none was called")
    said.append("devices other than the CPU, and the network")
    return said
