"""What the agent says of one member: its recorder ring in, windows of whole steps and its progress out.

Runs beside training, never in it. Cost: a few numpy passes over the slots of a window, some hundred microseconds.
"""

from __future__ import annotations

import msgspec
import numpy as np

from keepstep.diagnosis.summarise_progress import progress_of_slots
from keepstep.diagnosis.summarise_slots import Ring, Slots, Table, read_slots
from keepstep.diagnosis.summarise_steps import Steps, cut_steps, step_rows
from keepstep.diagnosis.summarise_waits import group_rows, merged_rows, peer_rows
from keepstep.records.ring import RingHeader, read_header
from keepstep.records.summary import (
    BYTES_PER_S,
    GroupEntry,
    HostSample,
    MemberProfile,
    MemberProgress,
    MemberSummary,
)
from keepstep.records.summary_rows import packed

__all__ = ["Drained", "Summariser"]

_PROGRESS_S = 0.45
"""A member of which no step ended for so long gets its progress told."""

_LOOK_BACK = 2048
"""Slots that progress looks at, at least: what a member used to call tells whether its newest call is unusual."""

_GROUPS_S = 30.0
"""How often the group table goes up again, for an analysis that began later. A window that carries it is longer, and
the next one waits for that; so it goes up at once only where a group is new."""


class Drained(msgspec.Struct, frozen=True):
    """What is to be sent now; each part is None where nothing is due."""

    profile: MemberProfile | None = None
    window: MemberSummary | None = None
    progress: MemberProgress | None = None


class Summariser:
    """Reads one member's ring from where it stopped. One for each process; `shortest_s` is the least time between
    two messages, which grows with their size so that `BYTES_PER_S` is kept."""

    def __init__(self, *, shortest_s: float = 0.1) -> None:
        self._shortest_ns = int(shortest_s * 1e9)
        self._cursor = 0
        self._generation = -1
        self._last_step = -1
        self._last_end = 0
        self._due_ns = 0
        self._spoke_ns: int | None = None
        self._before = HostSample()
        self._before_ns = 0
        self._groups: tuple[GroupEntry, ...] = ()
        self._lost = 0
        self._tallies: Table | None = None
        self._tallied_ns = 0
        self._told: set[tuple[int, int]] = set()

    @property
    def due_ns(self) -> int:
        """From when on `drain` may have something to say (monotonic clock of the host)."""
        return self._due_ns

    def due(self, now_ns: int) -> bool:
        """Whether `drain` may have something to say; before that there is no need to read the host's counters."""
        return now_ns >= self._due_ns

    def drain(self, ring: Ring, host: HostSample, *, now_ns: int) -> Drained:
        """What is new at `now_ns` (monotonic clock of the host), by the ring and the kernel's word on the process.

        Raises RecordError and SchemaTooNew where the memory is no ring that this version reads.
        """
        if not self.due(now_ns):
            return Drained()
        header = read_header(ring)
        if header.rank < 0:
            return Drained()
        profile = self._profile(header)
        slots = read_slots(ring, self._cursor, head=header.head, capacity=header.capacity)
        self._lost += slots.overtaken
        steps = cut_steps(slots, header.generation, after=self._last_step, last_end=self._last_end)
        window = progress = None
        if len(steps.numbers):
            window = self._window(header, slots, steps=steps, host=host, now_ns=now_ns)
            self._spent(len(msgspec.msgpack.encode(window)), now_ns)
        elif self._spoke_ns is None or now_ns - self._spoke_ns >= _PROGRESS_S * 1e9:
            first = max(0, min(self._cursor, header.head - _LOOK_BACK))
            more = read_slots(ring, first, head=header.head, capacity=header.capacity)
            progress = progress_of_slots(header, more, host=host, now_ns=now_ns)
            self._spent(len(msgspec.msgpack.encode(progress)), now_ns)
        return Drained(profile, window, progress)

    def _spent(self, nbytes: int, now_ns: int) -> None:
        self._spoke_ns = now_ns
        self._due_ns = now_ns + max(self._shortest_ns, int(nbytes / BYTES_PER_S * 1e9))

    def _profile(self, header: RingHeader) -> MemberProfile | None:
        """The member's groups, where they are others than last time. A new generation starts its steps afresh."""
        entries = tuple(GroupEntry(g.name, g.hash, g.lane, g.size, g.group_rank) for g in header.groups)
        if header.generation == self._generation and entries == self._groups:
            return None
        if header.generation != self._generation:
            self._generation, self._last_step, self._last_end = header.generation, -1, 0
            self._tallies, self._told = None, set()
        self._groups = entries
        return MemberProfile(rank=header.rank, generation=header.generation, groups=entries)

    def _window(
        self, header: RingHeader, slots: Slots, *, steps: Steps, host: HostSample, now_ns: int
    ) -> MemberSummary:
        rows = step_rows(slots, steps)
        groups, peers = group_rows(slots, steps, entries=self._groups)
        self._tallies = merged_rows(self._tallies, groups)
        known = set(self._tallies[["hash", "lane"]].tolist())
        told = not known <= self._told or now_ns - self._tallied_ns >= _GROUPS_S * 1e9
        window = MemberSummary(
            rank=header.rank,
            generation=header.generation,
            first_step=int(steps.numbers[0]),
            last_step=int(steps.numbers[-1]),
            ended_ns=int(steps.ends[-1]),
            span_us=(now_ns - self._before_ns) // 1000 if self._before_ns else 0,
            cpu_us=max(0, host.cpu_us - self._before.cpu_us) if self._before_ns else 0,
            run_delay_us=max(0, host.run_delay_us - self._before.run_delay_us) if self._before_ns else 0,
            lost=self._lost,
            steps=packed(rows),
            groups=packed(self._tallies) if told else b"",
            peers=packed(peer_rows(peers)),
        )
        if told:
            self._tallies, self._tallied_ns = None, now_ns
            self._told |= known
        self._before, self._before_ns, self._lost = host, now_ns, 0
        self._last_step, self._last_end = window.last_step, window.ended_ns
        self._cursor = _next_cursor(slots, window.last_step, cursor=self._cursor)
        return window


def _next_cursor(slots: Slots, last_step: int, *, cursor: int) -> int:
    """The first slot that a later window may need."""
    later = [
        int(table["mark"][rows].min()) - 1
        for table in (slots.operations, slots.spans)
        if len(table) and np.any(rows := table["step"] > last_step)
    ]
    if later:
        return max(cursor, min(later))
    behind = [int((table["mark"] + table["npeers"]).max()) for table in (slots.operations, slots.spans) if len(table)]
    return max([cursor, *behind])
