"""Call logs of NCCL (`AllReduce: opCount ...`) by communicator: who called what, as far as that can be compared.

The pointer of a communicator and the number in brackets (a device) mean something inside one process or node only; the
lines of the start say which communicator that is, and which rank of it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from keepstep.diagnosis.log_case import LogCase
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Suspect

__all__ = ["Calls", "calls_by_communicator"]

Calls = dict[Suspect, dict[str, LogEvent]]
"""By caller: its calls, by their number."""

_PAIRWISE = frozenset({"send", "recv"})
"""The two ends of a transfer call different things, and count them with the collectives."""

_Process = tuple[str | None, int | None]


class _Place(NamedTuple):
    """A communicator, its size, and the rank of one process in it."""

    name: str
    size: int
    rank: int


def calls_by_communicator(case: LogCase) -> list[Calls]:
    """The calls of each communicator, by a rank or a process. Calls that nothing tells apart are left out."""
    events = [event for event in case.of("nccl_call") if event.fields["op"].lower() not in _PAIRWISE]
    places = _places(case)
    ranks = _world_ranks(places)
    unlinked: dict[object, set[str]] = defaultdict(set)
    found: dict[str, Calls] = defaultdict(lambda: defaultdict(dict))
    one_node = len({event.node for event in events}) == 1
    for event in events:
        comm = event.fields.get("comm", "")
        place = places.get((event.node, event.pid), {}).get(comm)
        caller = _caller(event, ranks.get((event.node, event.pid)), one_node=one_node)
        if caller is None:
            continue
        if place is None:
            unlinked[caller].add(comm)
        found[place.name if place else ""][caller][event.fields["count"]] = event
    if not _of_one_communicator(found.get("", {}), unlinked):
        found.pop("", None)
    return list(found.values())


def _places(case: LogCase) -> dict[_Process, dict[str, _Place]]:
    """By process and pointer: the communicators whose start was logged."""
    found: dict[_Process, dict[str, _Place]] = defaultdict(dict)
    for event in case.of("nccl_init", claims=False):
        if event.pid is not None and event.fields.get("id"):
            place = _Place(event.fields["id"], int(event.fields["nranks"]), int(event.fields["rank"]))
            found[event.node, event.pid][event.fields["comm"]] = place
    return found


def _world_ranks(places: dict[_Process, dict[str, _Place]]) -> dict[_Process, int]:
    """The rank of each process in the largest communicator, where it is in that."""
    world = max((place.size for mine in places.values() for place in mine.values()), default=0)
    return {process: place.rank for process, mine in places.items() for place in mine.values() if place.size == world}


def _caller(event: LogEvent, rank: int | None, *, one_node: bool) -> Suspect | None:
    """Who made a call: the rank, else (of several nodes) the process; None if nothing tells."""
    rank = event.rank if event.rank is not None else rank
    local = event.fields.get("local", "")
    if rank is None and one_node and local.isdecimal():
        rank = int(local)
    if rank is not None:
        return Suspect(rank=rank)
    return Suspect(node=event.node, pid=event.pid) if event.node is not None and event.pid is not None else None


def _of_one_communicator(calls: Calls, pointers: dict[object, set[str]]) -> bool:
    """Whether calls of communicators whose start was not logged can be of one: each caller uses one, and all fit in."""
    sizes = {event.fields["nranks"] for said in calls.values() for event in said.values() if "nranks" in event.fields}
    return (
        all(len(some) == 1 for some in pointers.values())
        and len(sizes) < 2
        and all(len(calls) <= int(size) for size in sizes)
    )
