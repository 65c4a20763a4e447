"""A plan as far as NCCL takes it: which HCAs and rails, how many queue pairs, which traffic class.

Nothing here was run: there is no RDMA network where keepstep is tested. What NCCL cannot be told is listed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.errors import TrafficError
from keepstep.records.plan import Route
from keepstep.records.topology import Port
from keepstep.traffic.network import Network

__all__ = ["NOT_EXPORTABLE", "NcclSettings", "nccl_settings"]

NOT_EXPORTABLE = (
    "the UDP source port of each RoCE queue pair, which chooses the spine: needs a net plugin that sets it "
    "(flow label of the address handle, or a vendor call for the UDP source port)",
    "the spine of each connection, and moving it while the job runs: needs the same plugin",
    "shares of bytes among queue pairs that follow their speed: NCCL shares equally or takes turns",
    "which port of a bonded NIC receives: the switches' hash decides unless each port is a device of its own",
)
_MOST_QPS = 16


class NcclSettings(msgspec.Struct, frozen=True):
    """Environment variables of one job, with the reason of each; `tested` says that nobody has run them yet."""

    job: str
    environment: dict[str, str]
    reasons: dict[str, str]
    not_exportable: tuple[str, ...] = NOT_EXPORTABLE
    tested: str = "not run here"

    def text(self) -> str:
        """Lines for a shell, reasons as comments."""
        lines = [f"# keepstep traffic plan of job {_one_line(self.job)}: {self.tested}"]
        for name, value in self.environment.items():
            lines += [f"# {self.reasons[name]}", f"export {name}={_quoted(value)}"]
        lines += ["# Not exportable:"] + [f"#  - {what}" for what in self.not_exportable]
        return "\n".join(lines)


def _one_line(name: str) -> str:
    """A name as it can stand in a comment."""
    return name if name.isprintable() else ascii(name)


def _quoted(value: str) -> str:
    """One word for a shell, whatever is in it."""
    inside = value.replace("'", """'"'"'""")
    return f"'{inside}'"


def nccl_settings(
    job: str, hosts: Sequence[str], *, network: Network, routes: Sequence[Route], traffic_class: int | None = None
) -> NcclSettings:
    """What to set for a job on `hosts`. Raises TrafficError if the hosts differ in their NICs (one setting serves all)
    or the traffic class is not 0 to 255."""
    if traffic_class is not None and not 0 <= traffic_class <= 255:
        raise TrafficError(f"traffic class {traffic_class} is not one of 0 to 255")
    devices = {host: _devices(network.of_host.get(host, [])) for host in hosts}
    kinds = set(devices.values())
    if len(kinds) != 1 or not next(iter(kinds)):
        odd = next((host for host in hosts if devices[host] != devices[hosts[0]]), hosts[0] if hosts else "")
        raise TrafficError(f"the hosts of job {job!r} do not have the same NICs: see {odd!r}")
    chosen: dict[str, tuple[str, str]] = {
        "NCCL_IB_HCA": ("=" + kinds.pop(), "exactly these devices and ports, in order of rails"),
        "NCCL_CROSS_NIC": _cross_nic(network, hosts),
    }
    ways = len({(route.path[1], route.cable) for route in routes if len(route.path) > 1})
    queue_pairs = max(1, min(_MOST_QPS, ways))
    chosen["NCCL_IB_QPS_PER_CONNECTION"] = (
        str(queue_pairs),
        f"flows of the plan take {ways} way{'s' * (ways != 1)}, one queue pair each",
    )
    if queue_pairs > 1:
        chosen["NCCL_IB_SPLIT_DATA_ON_QPS"] = ("1", "every message is shared out over all queue pairs")
    if traffic_class is not None:
        chosen["NCCL_IB_TC"] = (str(traffic_class), "the class that the switches keep lossless, as given")
    return NcclSettings(job, {k: v for k, (v, _) in chosen.items()}, {k: why for k, (_, why) in chosen.items()})


def _devices(ports: Sequence[Port]) -> str:
    """`name:port` of every port, by rail and side; without the port where the NIC has only one."""
    double = {port.nic for port in ports if port.side > 0}
    ordered = sorted(ports, key=lambda port: (port.rail, port.side))
    return ",".join(f"{port.nic}:{port.side + 1}" if port.nic in double else port.nic for port in ordered)


def _cross_nic(network: Network, hosts: Sequence[str]) -> tuple[str, str]:
    part_of = {leaf: number for number, part in enumerate(network.parts) for leaf in part}
    rails: dict[int, set[int]] = {}
    for host in hosts:
        for port in network.of_host[host]:
            if port.leaf:
                rails.setdefault(port.rail, set()).add(part_of[port.leaf])
    leaves = {port.leaf for host in hosts for port in network.of_host[host]}
    if len(rails) > 1 and len(set.union(*rails.values())) >= len(rails):
        return "0", "rails are networks of their own: a ring stays on its rail"
    if len(rails) > 1 and len(leaves) > 1:
        return "0", "same rail, same leaf: bytes that stay on their rail cross fewer spines"
    return "2", "one rail: NCCL may choose"
