"""The delay matrix of the last steps: for each rank and each peer it has, what sending and receiving waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.diagnosis.windows import Numbers, expanded
from keepstep.records.summary import MemberSummary
from keepstep.records.summary_rows import PEER_ROW, unpacked

__all__ = ["PAIR_COLUMNS", "PairHistory"]

PAIR_COLUMNS = 32
"""Steps that are remembered of each pair."""

_SHIFT = 32
_FIELDS = (("send", ("credit_us", "wire_us")), ("receive", ("peer_us",)), ("sent", ("sent",)))


@dataclass
class PairHistory:
    """Populated cells in order of (rank, peer): `keys` is rank << 32 | peer; all groups of a pair are one cell.

    `values[name][cell, step % PAIR_COLUMNS]`, per step: `send` is wait for credit and time on the wire, `receive` the
    wait for the peer's data (us), `sent` bytes. `reverse` is the cell of (peer, rank), -1 if nobody told it. Cells of
    message lanes are marked in `messages`.
    """

    keys: Numbers
    values: dict[str, Numbers]
    stamp: Numbers
    reverse: Numbers
    messages: Numbers

    @classmethod
    def empty(cls) -> PairHistory:
        """No cell is populated."""
        none = np.zeros((0, PAIR_COLUMNS), np.float32)
        return cls(
            keys=np.zeros(0, np.uint64),
            values={name: none.copy() for name, _ in _FIELDS},
            stamp=np.zeros((0, PAIR_COLUMNS), np.int64),
            reverse=np.zeros(0, np.int64),
            messages=np.zeros(0, bool),
        )

    @property
    def ranks(self) -> Numbers:
        """The rank of every cell."""
        return (self.keys >> _SHIFT).astype(np.int64)

    @property
    def peers(self) -> Numbers:
        """The peer of every cell."""
        return (self.keys & 0xFFFFFFFF).astype(np.int64)

    def take(self, windows: Sequence[MemberSummary], world: int) -> None:
        """Remember the peer tables of `windows`; what lies outside `world` is passed over."""
        windows = [window for window in windows if 0 <= window.rank < world and window.peers]
        if not windows:
            return
        rows = unpacked([window.peers for window in windows], PEER_ROW)
        of_row = np.repeat(np.arange(len(windows)), [len(window.peers) // PEER_ROW.itemsize for window in windows])
        rows, of_row = rows[rows["peer"] < world], of_row[rows["peer"] < world]
        ranks = np.array([window.rank for window in windows], np.uint64)
        keys, cell = np.unique(ranks[of_row] << _SHIFT | rows["peer"].astype(np.uint64), return_inverse=True)
        at = self._cells(keys)[cell]
        self.messages[at] |= rows["lane"] == 1
        sums = {
            name: np.bincount(cell, sum(rows[field].astype(np.float64) for field in fields), len(keys))
            for name, fields in _FIELDS
        }
        window = np.zeros(len(keys), np.int64)
        window[cell] = of_row
        firsts = np.array([one.first_step for one in windows], np.int64)[window]
        lasts = np.array([one.last_step for one in windows], np.int64)[window]
        self._spread(self._cells(keys), sums, firsts=firsts, lasts=lasts)

    def _spread(self, cells: Numbers, sums: dict[str, Numbers], *, firsts: Numbers, lasts: Numbers) -> None:
        """Share the sums of each cell out over the steps of its window."""
        steps, source = expanded(lasts, np.ones(len(cells), np.int64), firsts=firsts)
        where = (cells[source], steps % PAIR_COLUMNS)
        self.stamp[where] = steps
        per_step = 1.0 / np.maximum(lasts - firsts + 1, 1)
        for name, total in sums.items():
            self.values[name][where] = (total * per_step)[source]

    def _cells(self, keys: Numbers) -> Numbers:
        """Where the cells `keys` (sorted) are; new ones are made."""
        at = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), bool)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == keys[inside]
        if known.all():
            return at
        self._grow(keys[~known])
        return np.searchsorted(self.keys, keys)

    def _grow(self, fresh: Numbers) -> None:
        order = np.argsort(np.concatenate([self.keys, fresh]), kind="stable")
        self.keys = np.concatenate([self.keys, fresh])[order]
        more = (len(fresh), PAIR_COLUMNS)
        for name, table in self.values.items():
            self.values[name] = np.concatenate([table, np.zeros(more, np.float32)])[order]
        self.stamp = np.concatenate([self.stamp, np.full(more, -1, np.int64)])[order]
        self.messages = np.concatenate([self.messages, np.zeros(len(fresh), bool)])[order]
        back = (self.keys & 0xFFFFFFFF) << _SHIFT | self.keys >> _SHIFT
        at = np.minimum(np.searchsorted(self.keys, back), len(self.keys) - 1)
        self.reverse = np.where(self.keys[at] == back, at, -1)

    def forget(self) -> None:
        """A new membership: what was told before does not line up with what comes."""
        self.stamp[:] = -1
