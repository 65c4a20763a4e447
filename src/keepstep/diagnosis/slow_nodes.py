"""Nodes in tables of times: members that are late together because the host they share is slow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepstep.diagnosis.lateness import Lateness
from keepstep.diagnosis.straggler_words import Slow, extra_seconds, layer_of, probe_of
from keepstep.records.finding import Finding, Suspect
from keepstep.records.timing_table import TimingTable

__all__ = ["NodeRows", "nodes_of", "slow_node"]

_FEWEST_NODES = 2
_FEWEST_MEMBERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class NodeRows:
    """The nodes of a table that hold several members each, and how late each is as a whole."""

    names: tuple[str, ...]
    rows: tuple[np.ndarray, ...]
    """Rows of the members of each node."""
    lateness: Lateness
    """A row for each node: the middle of its members."""


def nodes_of(table: TimingTable, lateness: Lateness) -> NodeRows | None:
    """The nodes, or None where fewer than two are known to have several members."""
    by_name: dict[str, list[int]] = {}
    for row, member in enumerate(lateness.members.tolist()):
        if (name := table.nodes.get(member)) is not None:
            by_name.setdefault(name, []).append(row)
    several = {name: np.array(rows) for name, rows in by_name.items() if len(rows) >= _FEWEST_MEMBERS}
    if len(several) < _FEWEST_NODES:
        return None
    ratio, seconds = (
        np.stack([_middle(values[rows]) for rows in several.values()]) for values in (lateness.ratio, lateness.seconds)
    )
    deviation = np.abs(ratio - _middle(ratio.T)[:, None])
    noise = 1.4826 * float(np.nanmedian(deviation)) if np.isfinite(deviation).any() else 0.0
    count = len(several)
    whole = Lateness(
        members=np.arange(count),
        steps=lateness.steps,
        seconds=seconds,
        ratio=ratio,
        role=np.zeros(count, dtype=np.int64),
        by_role=lateness.by_role,
        stage=np.full(count, -1),
        noise=noise,
    )
    return NodeRows(tuple(several), tuple(several.values()), whole)


def slow_node(table: TimingTable, lateness: Lateness, *, nodes: NodeRows, item: Slow) -> Finding | None:
    """The finding that a node is slow; None if not all its members are.

    A table that does not tell the stages, or has two nodes only, cannot tell a node that was slow from the first step
    on from a stage that fills it.
    """
    rows = nodes.rows[item.row]
    part = slice(item.first, item.last + 1)
    usual = _middle(lateness.ratio[rows, part].T)
    if not (usual >= (1 + item.ratio) / 2).all():
        return None
    name = nodes.names[item.row]
    first, last = int(lateness.steps[item.first]), int(lateness.steps[item.last])
    always = item.first == 0
    staged = lateness.by_role and "stage" in table.coordinates
    doubt = always and (len(nodes.names) == _FEWEST_NODES or not staged)
    peers = "their peers of the same role" if lateness.by_role else "the members of other nodes"
    evidence = [
        f"node {name}: all its {len(rows)} members take {item.ratio:.2f} times as long as {peers} in phase "
        f"{table.phase}, "
        + (f"in {item.share:.0%} of {len(lateness.steps)} steps" if always else f"steps {first} to {last}"),
        "ranks " + ", ".join(str(int(member)) for member in lateness.members[rows][:16]) + " run there",
    ]
    if doubt:
        evidence.append("or a stage that has more to do fills this node: the table does not tell the stages apart")
    extra = extra_seconds(nodes.lateness, item) if table.unit_known else None
    there = set(rows.tolist())
    return Finding(
        kind="compute_slow",
        layer=layer_of(table.phase),
        suspects=((Suspect(node=name),),),
        victims=tuple(int(member) for row, member in enumerate(lateness.members) if row not in there),
        confidence=0.6 if doubt else 0.85 if always else 0.75,
        evidence=tuple(evidence),
        next_probe=f"{probe_of(table.phase)}; what else runs on {name}, and its clocks, memory and cooling",
        cost=None if extra is None else extra * len(lateness.members),
    )


def _middle(values: np.ndarray) -> np.ndarray:
    """Median of each column without NaN; NaN where there is nothing."""
    empty = ~np.isfinite(values).any(axis=0)
    return np.asarray(np.where(empty, np.nan, np.nanmedian(np.where(empty, 1.0, values), axis=0)))
