"""Which ranks send to which in a collective, and how many bytes in a step: rings, trees, pairs and pipeline edges.

Ranks of one host talk inside it. Between hosts, as many parallel channels run as the group has ranks on a host (one NIC
each), and every channel carries its share. A ring all_reduce of B bytes over n ranks sends 2 (n-1)/n B over each edge,
reduce_scatter and all_gather half of that (Patarasuk and Yuan 2009); a tree sends B to and from every parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, Seat

__all__ = ["Edge", "edges_of"]

Edge = tuple[int, int, float]
"""(from rank, to rank, bytes in a step)."""

_RING_FACTOR = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0}


def edges_of(use: CollectiveUse, seats: Mapping[int, Seat], *, job: str = "") -> Iterator[Edge]:
    """The edges of `use` between hosts. Raises TrafficError if it names a rank without a seat or pairs do not pair."""
    absent = [rank for rank in use.ranks if rank not in seats]
    absent += [rank for a, b, _ in use.measured_bytes for rank in (a, b) if rank not in seats]
    if absent:
        known = f"the job has {len(seats)} ranks" if seats else "no rank has one"
        raise TrafficError(f"{use.name} of job {job!r} names rank {absent[0]}, which has no seat; {known}")
    if use.measured_bytes:
        yield from ((a, b, nbytes) for a, b, nbytes in use.measured_bytes if seats[a].host != seats[b].host)
    elif use.operation == "send":
        yield from _sends(use, seats, job=job)
    elif use.operation == "all_to_all":
        yield from _pairs(use, seats)
    elif use.operation in ("broadcast", "reduce") or use.algorithm == "tree":
        yield from _tree(use, seats)
    else:
        yield from _ring(use, seats)


def _sends(use: CollectiveUse, seats: Mapping[int, Seat], *, job: str) -> Iterator[Edge]:
    if len(use.ranks) % 2:
        raise TrafficError(f"{use.name} of job {job!r} is a send with {len(use.ranks)} ranks; they come in pairs")
    for a, b in zip(use.ranks[::2], use.ranks[1::2], strict=True):
        if seats[a].host != seats[b].host:
            yield a, b, use.nbytes * use.calls


def _pairs(use: CollectiveUse, seats: Mapping[int, Seat]) -> Iterator[Edge]:
    nbytes = use.nbytes * use.calls / len(use.ranks)
    for a in use.ranks:
        yield from ((a, b, nbytes) for b in use.ranks if seats[a].host != seats[b].host)


def _by_host(use: CollectiveUse, seats: Mapping[int, Seat]) -> list[list[int]]:
    """The group's ranks host by host, hosts in order of their first rank in the group."""
    hosts: dict[str, list[int]] = {}
    for rank in use.ranks:
        hosts.setdefault(seats[rank].host, []).append(rank)
    return list(hosts.values())


def _channels(here: list[int], there: list[int], *, nbytes: float) -> Iterator[Edge]:
    """The parallel channels from one host to another."""
    count = max(len(here), len(there))
    for number in range(count):
        yield here[number % len(here)], there[number % len(there)], nbytes / count


def _ring(use: CollectiveUse, seats: Mapping[int, Seat]) -> Iterator[Edge]:
    hosts = _by_host(use, seats)
    if len(hosts) < 2:
        return
    ranks = len(use.ranks)
    nbytes = _RING_FACTOR[use.operation] * (ranks - 1) / ranks * use.nbytes * use.calls
    for number, here in enumerate(hosts):
        yield from _channels(here, hosts[(number + 1) % len(hosts)], nbytes=nbytes)


def _tree(use: CollectiveUse, seats: Mapping[int, Seat]) -> Iterator[Edge]:
    """A binary tree over hosts, the first host its root."""
    hosts = _by_host(use, seats)
    nbytes = use.nbytes * use.calls
    for number in range(1, len(hosts)):
        parent, child = hosts[(number - 1) // 2], hosts[number]
        if use.operation != "broadcast" and use.operation != "all_gather":
            yield from _channels(child, parent, nbytes=nbytes)
        if use.operation != "reduce" and use.operation != "reduce_scatter":
            yield from _channels(parent, child, nbytes=nbytes)
