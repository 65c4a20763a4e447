"""Where the bytes of a window's calls waited: by group, and by peer of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keepstep.diagnosis.summarise_slots import FIRST_POINT_TO_POINT, Slots, Table
from keepstep.diagnosis.summarise_steps import Steps
from keepstep.records.summary import MAX_PEER_ROWS, GroupEntry
from keepstep.records.summary_rows import GROUP_ROW, PEER_ROW

__all__ = ["group_rows", "merged_rows", "peer_rows"]

_WAITS = (
    ("own_us", "wait_own_ns"),
    ("credit_us", "wait_credit_ns"),
    ("wire_us", "wire_ns"),
    ("peer_us", "wait_peer_ns"),
)
_OF_OTHERS = _WAITS[1:]
_MOST = 65535
_Numbers: TypeAlias = NDArray[Any]


def group_rows(slots: Slots, steps: Steps, *, entries: Sequence[GroupEntry]) -> tuple[Table, Table]:
    """(a GROUP_ROW for each group and lane with a call in `steps`, the peer slots of these calls).

    Point-to-point messages are a row of their own, lane 1. Size and place come from `entries`, 0 where they lack it.
    """
    calls = slots.operations[(slots.operations["finished_ns"] > 0) & np.isin(slots.operations["step"], steps.numbers)]
    lanes = (calls["op"] >= FIRST_POINT_TO_POINT).astype(np.uint64)
    keys, row_of = np.unique(calls["group_hash"].astype(np.uint64) * 2 + lanes, return_inverse=True)
    rows = np.zeros(len(keys), GROUP_ROW)
    rows["hash"], rows["lane"] = keys >> 1, keys & 1
    known = {entry.hash * 2 + entry.lane: entry for entry in entries}
    for row, key in zip(rows, keys.tolist(), strict=True):
        if key in known:
            row["size"], row["group_rank"] = min(known[key].size, _MOST), max(known[key].group_rank, 0)
    rows["calls"] = np.minimum(np.bincount(row_of, minlength=len(keys)), _MOST)
    rows["nbytes"] = np.bincount(row_of, calls["nbytes"], len(keys))
    lasted = calls["finished_ns"].astype(np.int64) - calls["started_ns"].astype(np.int64)
    rows["busy_us"] = np.bincount(row_of, np.maximum(lasted, 0) / 1e3, len(keys))
    np.bitwise_or.at(rows["ops"], row_of, (1 << np.minimum(calls["op"], 15)).astype(np.uint16))
    peers, group = _of_calls(slots.peers, calls["mark"], row_of=row_of)
    for name, field in _WAITS:
        rows[name] = np.bincount(group, peers[field] / 1e3, len(keys))
    return rows, peers


def _of_calls(peers: Table, marks: _Numbers, *, row_of: _Numbers) -> tuple[Table, _Numbers]:
    """The peer slots whose call is one of `marks` (in order), and the group row of each."""
    if not len(marks) or not len(peers):
        return peers[:0], np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(marks, peers["op_index"] + 1), len(marks) - 1)
    ours = marks[at] == peers["op_index"] + 1
    return peers[ours], row_of[at[ours]]


def merged_rows(before: Table | None, rows: Table) -> Table:
    """The sums of two group tables; `before` is None at first."""
    if before is None or not len(before):
        return rows
    both = np.concatenate([before, rows])
    keys, first, row_of = np.unique(both[["hash", "lane"]], return_index=True, return_inverse=True)
    merged = both[first].copy()
    for name in ("calls", "nbytes", "busy_us", "own_us", "credit_us", "wire_us", "peer_us"):
        total = np.bincount(row_of.ravel(), both[name], len(keys))
        merged[name] = np.minimum(total, _MOST) if name == "calls" else total
    np.bitwise_or.at(merged["ops"], row_of.ravel(), both["ops"])
    return merged


def peer_rows(peers: Table) -> Table:
    """A PEER_ROW for each peer and lane; of more than `MAX_PEER_ROWS` those that waited most are kept."""
    peers = peers[peers["peer"] >= 0]
    lanes = (peers["op"] >= FIRST_POINT_TO_POINT).astype(np.uint64)
    keys, row_of = np.unique(lanes << 32 | peers["peer"].astype(np.uint64), return_inverse=True)
    rows = np.zeros(len(keys), PEER_ROW)
    rows["lane"], rows["peer"] = keys >> 32, keys & 0xFFFFFFFF
    rows["sent"] = np.bincount(row_of, peers["bytes_sent"], len(keys))
    for name, field in _OF_OTHERS:
        rows[name] = np.bincount(row_of, peers[field] / 1e3, len(keys))
    if len(rows) <= MAX_PEER_ROWS:
        return rows
    waited = rows["credit_us"] + rows["wire_us"] + rows["peer_us"]
    return rows[np.sort(np.argsort(-waited, kind="stable")[:MAX_PEER_ROWS])]
