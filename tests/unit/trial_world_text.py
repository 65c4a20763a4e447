"""Traces of a made-up job under trial: what every rank would write down if nothing is wrong."""

from __future__ import annotations

from msgspec.structs import replace

from keepstep.records.trial import CallKept, GroupAsked, Joined, SiteSeen, StepBegun, Trace, TrialEnded, WaitKept

WORLD_SITE, FIRST_GROUP_SITE, CALL_SITE = 0, 10, 100
_FLOAT32, _INT64 = 10, 4


class MadeWorld:
    """`world` ranks; groups of `sizes` over neighbours; each step every rank runs `program` in its groups.

    The program is a list of (group number within the rank's own groups, operation, elements); 0 is the whole world.
    With `pairs` each even rank sends to the next one.
    """

    def __init__(self, world: int, sizes: list[int], program: list[tuple[int, int, int]], *, pairs: bool) -> None:
        self.world, self.sizes, self.program, self.pairs = world, sizes, program, pairs
        self.groups = [list(range(first, first + size)) for size in sizes for first in range(0, world, size)]
        self.traces = {rank: self._trace(rank) for rank in range(world)}

    def all(self) -> list[Trace]:
        return list(self.traces.values())

    def change(self, rank: int, **fields: object) -> list[Trace]:
        """The traces with `fields` of one rank replaced."""
        self.traces[rank] = replace(self.traces[rank], **fields)
        return self.all()

    def calls(self, rank: int, *, collective: bool = True) -> list[int]:
        """Where in the events of `rank` its calls are."""
        events = self.traces[rank].events
        return [i for i, e in enumerate(events) if isinstance(e, CallKept) and (e.op < 10) == collective]

    def change_call(self, rank: int, index: int, **fields: object) -> list[Trace]:
        events = list(self.traces[rank].events)
        events[index] = replace(events[index], **fields)
        return self.change(rank, events=tuple(events))

    def drop_call(self, rank: int, index: int) -> list[Trace]:
        number = self.traces[rank].events[index].number
        kept = tuple(event for event in self.traces[rank].events if event.number != number)
        return self.change(rank, events=kept)

    def _trace(self, rank: int) -> Trace:
        groups = [GroupAsked((), True, False, "default group", WORLD_SITE)]
        own = [0]
        for number, ranks in enumerate(self.groups, 1):
            whole = tuple(ranks) if len(ranks) < self.world else ()
            groups.append(GroupAsked(whole, rank in ranks, False, "", FIRST_GROUP_SITE + len(ranks)))
            if rank in ranks:
                own.append(number)
        events: list[CallKept | WaitKept] = []
        for step in range(2):
            for place, (group, op, elements) in enumerate(self.program):
                events += self._call(len(events), own[group % len(own)], op=op, size=elements, place=place, step=step)
            if self.pairs:
                events += self._transfer(rank, len(events), step=step)
        return Trace(
            rank=rank,
            sites={n: SiteSeen(n, "job.py", n, "main") for n in (*range(40), *range(CALL_SITE, CALL_SITE + 40))},
            groups=tuple(groups),
            events=tuple(events),
            steps=2,
            joined=(Joined("join", -1, -1, WORLD_SITE),),
            ended=TrialEnded("steps", "", "", "", -1, 2, 100, 200, 50),
        )

    def _call(self, number: int, group: int, *, op: int, size: int, place: int, step: int) -> list[CallKept | WaitKept]:
        reduction = 0 if op in (1, 2, 5) else -1
        root = 0 if op in (2, 3, 7, 8) else -1
        site, nbytes = CALL_SITE + place, 4 * size
        call = CallKept(
            number, group, op, _FLOAT32, reduction, root, -1, 0, nbytes, nbytes, True, False, 0, (), site, step
        )  # fmt: skip
        return [call, WaitKept(number)]

    def _transfer(self, rank: int, number: int, *, step: int) -> list[CallKept | WaitKept]:
        peer = rank + 1 if rank % 2 == 0 else rank - 1
        if peer >= self.world:
            return []
        op = 10 if rank < peer else 11
        sent, got = (64, 0) if op == 10 else (0, 64)
        call = CallKept(
            number, 0, op, _FLOAT32, -1, -1, peer, 0, sent, got, True, False, 0, (), CALL_SITE + 30 + op - 10, step
        )  # fmt: skip
        return [call, WaitKept(number)]


def exchange(number: int, step: int, value: int) -> CallKept:
    """An all-reduce of one integer in the whole world."""
    return CallKept(number, 0, 1, _INT64, 3, -1, -1, 0, 8, 8, True, False, value, (), CALL_SITE + 20, step)


def records_of_a_step() -> list[object]:
    return [SiteSeen(0, "job.py", 3, "main"), StepBegun(0), StepBegun(1)]
