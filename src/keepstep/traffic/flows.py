"""From a job's demand to flows between NIC ports: rails, both ports of a NIC, and which collectives are planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, Demand, Flow, Seat
from keepstep.records.topology import Port
from keepstep.traffic.edges import edges_of
from keepstep.traffic.network import Network

__all__ = ["MAX_FLOWS", "PortChooser", "flows_of"]

MAX_FLOWS = 1_000_000
"""Flows of one job; an all_to_all over more ranks than this allows is spread, not planned."""


class PortChooser:
    """Finds the ports that a rank's bytes leave and enter by."""

    def __init__(self, network: Network) -> None:
        self._hosts = network.of_host
        self._chosen: dict[tuple[str, int, int, int | None], list[Port]] = {}
        self._part = {leaf: number for number, part in enumerate(network.parts) for leaf in part}

    def seat_problem(self, demand: Demand) -> str:
        """What is wrong with the job's seats; empty if nothing is."""
        ranks: set[int] = set()
        for seat in demand.seats:
            if seat.host not in self._hosts:
                return (
                    f"rank {seat.rank} of job {demand.job!r} sits on host {seat.host!r}, which is not in the topology"
                )
            if seat.rank in ranks:
                return f"rank {seat.rank} of job {demand.job!r} has two seats"
            if not 0 <= seat.local < seat.slots:
                return f"rank {seat.rank} of job {demand.job!r} is number {seat.local} of {seat.slots} on its host"
            ranks.add(seat.rank)
        return ""

    def pairs(self, source: Seat, destination: Seat) -> list[tuple[Port, Port]]:
        """The port pairs that share the bytes between two ranks: left to left, right to right.

        The sender uses the NIC of its own rail; where that cannot reach the receiver's, the NIC of the receiver's
        rail (NCCL's PXN). Raises TrafficError where nothing can.
        """
        there = self._ports(destination)
        for here in (self._ports(source), self._ports(source, rail=there[0].rail)):
            same = [(a, b) for a in here for b in there if a.side == b.side and self._joined(a, b)]
            found = same or [(a, b) for a in here for b in there if self._joined(a, b)][:1]
            if found:
                return found
        raise TrafficError(f"no way from host {source.host!r} to host {destination.host!r}")

    def _ports(self, seat: Seat, rail: int | None = None) -> list[Port]:
        key = (seat.host, seat.local, seat.slots, rail)
        found = self._chosen.get(key)
        if found is None:
            ports = self._hosts[seat.host]
            rails = sorted({port.rail for port in ports})
            chosen = rails[seat.local * len(rails) // seat.slots] if rail not in rails else rail
            found = self._chosen[key] = [port for port in ports if port.rail == chosen]
        return found

    def _joined(self, a: Port, b: Port) -> bool:
        return bool(a.leaf) and self._part.get(a.leaf) == self._part.get(b.leaf)


def flows_of(
    demand: Demand, network: Network, *, uses: Iterable[CollectiveUse] | None = None, parts: int = 1
) -> list[Flow]:
    """The flows of `demand` (of some of its `uses`), each edge split over `parts` connections and both NIC ports.

    Raises TrafficError for absent hosts or ranks, hosts without a way between them, and more than MAX_FLOWS flows.
    """
    chooser = PortChooser(network)
    problem = chooser.seat_problem(demand)
    if problem:
        raise TrafficError(problem)
    if parts < 1:
        raise TrafficError(f"{parts} connections for each edge; at least 1 is needed")
    seats = {seat.rank: seat for seat in demand.seats}
    found: list[Flow] = []
    for use in demand.uses if uses is None else uses:
        for flow in _of_use(use, demand, seats=seats, chooser=chooser, parts=parts):
            found.append(flow)
            if len(found) > MAX_FLOWS:
                raise TrafficError(f"job {demand.job!r} has more than {MAX_FLOWS} flows", remedy="leave out all_to_all")
    return found


def _of_use(
    use: CollectiveUse, demand: Demand, *, seats: Mapping[int, Seat], chooser: PortChooser, parts: int
) -> Iterator[Flow]:
    sums: dict[tuple[str, str], float] = {}
    cache: dict[tuple[int, int], list[tuple[Port, Port]]] = {}
    for a, b, nbytes in edges_of(use, seats, job=demand.job):
        pairs = cache.get((a, b))
        if pairs is None:
            pairs = cache[a, b] = chooser.pairs(seats[a], seats[b])
        for here, there in pairs:
            key = (here.name, there.name)
            sums[key] = sums.get(key, 0.0) + nbytes / len(pairs)
    for (source, destination), nbytes in sums.items():
        for part in range(parts):
            yield Flow(demand.job, use.name, source, destination, nbytes / parts, use.start_s, use.end_s, part)
