"""Operations that a rank gave to the library as one batch: torch keeps only the closing entry of a batch up to date.

Inside `batch_isend_irecv` and other coalesced calls each operation has an entry that stays `scheduled` for ever. All
of a batch have one sequence number, and the last one, `coalesced` (or `ALLGATHER_coalesced` and the like), is the
only one whose state is set. See `torch/distributed/flight_recorder/components/utils.py`, find_coalesced_group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from keepstep.intake.flight_entry import Entry

__all__ = ["batches_joined", "closes_batch"]

_CLOSING = re.compile(r"(?:[A-Z]+_)*coalesced")
"""Names of closing entries. `allreduce_coalesced` and others in lower case are operations of their own."""


def closes_batch(entry: Entry) -> bool:
    """Whether the entry stands for a whole batch."""
    return entry.signature.op.endswith("coalesced") and _CLOSING.fullmatch(entry.signature.op) is not None


def batches_joined(entries: Sequence[Entry], *, lanes: bool) -> list[Entry]:
    """The entries without those that only close a batch; the operations of a batch share its state and its time.

    `lanes`: transfers and collectives are numbered apart. Where a batch of several operations has no closing entry
    (other libraries than NCCL, captured graphs), it is over if a later operation of the same group and lane is.
    """
    closing: dict[tuple[str, bool, int], Entry] = {}
    members: dict[tuple[str, bool, int], list[int]] = {}
    newest: dict[tuple[str, bool], int] = {}
    for index, entry in enumerate(entries):
        lane = lanes and entry.point_to_point
        if closes_batch(entry):
            closing[(entry.group, lane, entry.sequence)] = entry
        else:
            members.setdefault((entry.group, lane, entry.sequence), []).append(index)
        if entry.finished:
            newest[(entry.group, lane)] = max(newest.get((entry.group, lane), -1), entry.sequence)
    shared: dict[int, Entry] = {}
    for key, indices in members.items():
        end = closing.get(key)
        pending = [index for index in indices if not entries[index].finished]
        if pending and (end is not None or len(pending) > 1):
            over = end.finished if end is not None else newest.get(key[:2], -1) > key[2]
            shared.update(_shared(entries, pending, over=over, begun=end is not None and end.started))
    return [
        shared.get(index, entry)
        for index, entry in enumerate(entries)
        if not (closes_batch(entry) and (entry.group, lanes and entry.point_to_point, entry.sequence) in members)
    ]


def _shared(entries: Sequence[Entry], indices: list[int], *, over: bool, begun: bool) -> dict[int, Entry]:
    """The unfinished operations of a batch, by their index, with what is known of all of it."""
    since = min((queued for index in indices if (queued := entries[index].queued) is not None), default=None)
    return {
        index: replace(
            entries[index],
            finished=over,
            started=entries[index].started or begun,
            queued=since,
            stack=() if over else entries[index].stack,
        )
        for index in indices
    }
