"""A small job in nested groups that is run until nothing moves any more, for tests of the wavefront.

Every rank has a list of collectives (and transfers between pipeline stages). It queues them ahead of its device, which
works them off in order; a collective ends when all members have it in front. Faults stop the queueing or the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.records.evidence import GroupProgress, Position, Signature, Transfer


@dataclass
class Layout:
    tp: int
    pp: int
    dp: int

    @property
    def world(self):
        return self.tp * self.pp * self.dp

    def groups(self):
        """Name to members: tp fastest, then dp, then pp, as Megatron counts."""
        found = {"world": tuple(range(self.world))}
        for pp in range(self.pp):
            for dp in range(self.dp):
                found[f"tp-{pp}-{dp}"] = tuple(self.rank(tp, dp, pp) for tp in range(self.tp))
            for tp in range(self.tp):
                found[f"dp-{pp}-{tp}"] = tuple(self.rank(tp, dp, pp) for dp in range(self.dp))
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    def rank(self, tp, dp, pp):
        return tp + self.tp * (dp + self.dp * pp)


@dataclass
class Job:
    layout: Layout
    steps: int = 3
    ahead: int = 4
    """Operations a rank queues ahead of its device."""
    stops_queueing: dict = field(default_factory=dict)
    """Rank to the number of operations it queues before it stops."""
    device_stops: dict = field(default_factory=dict)
    """Rank to the number of operations its device finishes before it stops."""

    def program(self, rank):
        tp = rank % self.layout.tp
        dp = rank // self.layout.tp % self.layout.dp
        pp = rank // (self.layout.tp * self.layout.dp)
        wanted = []
        for _ in range(self.steps):
            if pp > 0:
                wanted.append(("move", self.layout.rank(tp, dp, pp - 1), rank))
            wanted += [("all", f"tp-{pp}-{dp}")] * 2
            if pp + 1 < self.layout.pp:
                wanted.append(("move", rank, self.layout.rank(tp, dp, pp + 1)))
            wanted += [("all", f"tp-{pp}-{dp}"), ("all", f"dp-{pp}-{tp}"), ("all", "world")]
        groups = self.layout.groups()
        return [item for item in wanted if item[0] == "move" or item[1] in groups]

    def stand_still(self):
        """(groups, transfers) as reports of all ranks would have them."""
        groups = self.layout.groups()
        programs = {rank: self._numbered(rank) for rank in range(self.layout.world)}
        done = dict.fromkeys(programs, 0)
        moved = True
        while moved:
            moved = False
            queued = {rank: self._queued(rank, done, programs) for rank in programs}
            for rank, program in programs.items():
                if done[rank] < queued[rank] and done[rank] < self.device_stops.get(rank, 1 << 60):
                    item = program[done[rank]]
                    members = groups[item[1]] if item[0] == "all" else item[1:3]
                    if all(self._in_front(other, item, done, queued, programs) for other in members):
                        for other in members:
                            done[other] += 1
                        moved = True
        return self._reports(programs, done)

    def _numbered(self, rank):
        counts = {}
        numbered = []
        for item in self.program(rank):
            key = item[:2] if item[0] == "all" else item
            counts[key] = counts.get(key, 0) + 1
            numbered.append((*item, counts[key]))
        return numbered

    def _queued(self, rank, done, programs):
        return min(len(programs[rank]), done[rank] + self.ahead, self.stops_queueing.get(rank, 1 << 60))

    def _in_front(self, rank, item, done, queued, programs):
        if done[rank] >= queued[rank] or done[rank] >= self.device_stops.get(rank, 1 << 60):
            return False
        return programs[rank][done[rank]] == item

    def _reports(self, programs, done):
        positions, transfers = {}, []
        for rank, program in programs.items():
            queued = self._queued(rank, done, programs)
            for group, members in self.layout.groups().items():
                if rank in members:
                    mine = [(at, item[2]) for at, item in enumerate(program) if item[:2] == ("all", group)]
                    waiting = [at for at, _ in mine if done[rank] <= at < queued]
                    positions.setdefault(group, []).append(
                        Position(
                            rank=rank,
                            queued=max((number for at, number in mine if at < queued), default=0),
                            finished=max((number for at, number in mine if at < done[rank]), default=0),
                            signatures={number: Signature(op="all_reduce") for at, number in mine if at < queued},
                            waiting_since=1e9 * (rank % 3) + waiting[0] if waiting else None,
                        )
                    )
            for at, item in enumerate(program[:queued]):
                if item[0] == "move" and at >= done[rank]:
                    transfers.append(
                        Transfer(rank=rank, source=item[1], destination=item[2], queued=1e9 * (rank % 3) + at)
                    )
        groups = self.layout.groups()
        reports = [
            GroupProgress(group=group, ranks=groups[group], positions=(position,))
            for group, mine in positions.items()
            for position in mine
        ]
        return reports, transfers
