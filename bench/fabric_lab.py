"""A leaf-spine fabric of network namespaces on this machine: real kernels' routing, queues and ECMP, no real wires.

Hosts hang below two leaves, every leaf has one uplink to every spine, and each leaf spreads connections over its
uplinks by a hash of the 5-tuple (`fib_multipath_hash_policy=3`), as switches do. Rates are set with token buckets. A
second, unlimited network joins the hosts with the namespace `manage`, where a controller runs. Needs root or
CAP_SYS_ADMIN and CAP_NET_ADMIN; everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Fabric", "FabricPlan", "LabHost", "remove_left", "why_no_fabric"]

_LEAVES = 2
_BURST_KB = 64
_QUEUE_MS = 50
_NAMED = re.compile(r"ks(?:try)?([0-9]+)(?:-[a-z0-9]+)?")


@dataclass(frozen=True)
class FabricPlan:
    """What to build: hosts (half below each leaf), spines, rates in Mbit/s, and the seed of the switches' hash."""

    hosts: int = 8
    spines: int = 4
    host_mbit: int = 200
    uplink_mbit: int = 200
    seed: int = 1


@dataclass(frozen=True)
class LabHost:
    """One host: its namespace, its address in the fabric and the one in the management network."""

    number: int
    leaf: int
    namespace: str
    address: str
    management: str


def why_no_fabric() -> str:
    """What is missing to build a fabric here; empty if nothing is."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian, Ubuntu: apt-get install iproute2)"
    name = f"kstry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        for command in (
            ["ip", "-n", name, "link", "add", "kstry0", "type", "veth", "peer", "name", "kstry1"],
            [
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "kstry0",
                "root",
                "tbf",
                "rate",
                "1mbit",
                "burst",
                "16kb",
                "latency",
                "9ms",
            ],
        ):
            tried = subprocess.run(command, capture_output=True, text=True)
            if tried.returncode:
                return f"`{' '.join(command[:1] + command[3:6])}` is not possible here: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def remove_left() -> list[str]:
    """Remove the namespaces of builders that were killed; those in which processes run stay. Returns their names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    left = []
    for name in (line.split()[0] for line in listed.stdout.splitlines() if line.strip()):
        found = _NAMED.fullmatch(name)
        if found and not Path("/proc", found[1]).exists():
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            if not inside.stdout.strip():
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
                left.append(name)
    return left


class Fabric:
    """The fabric as a context manager. Raises RuntimeError with the failing command if it cannot be built."""

    def __init__(self, plan: FabricPlan | None = None) -> None:
        self.plan = plan or FabricPlan()
        prefix = f"ks{os.getpid()}"
        half = self.plan.hosts // _LEAVES
        self.leaves = tuple(f"{prefix}-l{leaf}" for leaf in range(_LEAVES))
        self.spines = tuple(f"{prefix}-s{spine}" for spine in range(self.plan.spines))
        self.manage = f"{prefix}-m"
        self.management = "10.99.0.1"
        self.hosts = tuple(
            LabHost(n, n // half, f"{prefix}-h{n}", f"10.{n // half}.{n}.2", f"10.99.0.{n + 2}")
            for n in range(self.plan.hosts)
        )
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Fabric:
        remove_left()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ use

    def start(self, namespace: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` inside `namespace`; it is ended with the fabric."""
        process = subprocess.Popen(["ip", "netns", "exec", namespace, *command], start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(
        self, namespace: str, command: Sequence[str], *, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` inside `namespace` to its end."""
        whole = ["ip", "netns", "exec", namespace, *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s)

    def uplink_bytes(self, leaf: int) -> dict[int, int]:
        """Bytes that `leaf` has sent to each spine."""
        return {int(port[1:]): sent for port, sent in self._sent(self.leaves[leaf]) if port.startswith("u")}

    def spine_address(self, spine: int, *, leaf: int) -> str:
        """What the spine calls itself to the hosts below `leaf`: the answer of a probe that died there."""
        return f"10.{10 + leaf}.{spine}.2"

    def fail_spine(self, spine: int) -> None:
        """Take a spine out; the leaves see their uplinks lose carrier."""
        for leaf in range(_LEAVES):
            _do("ip", "-n", self.spines[spine], "link", "set", f"d{leaf}", "down")

    def swallow(self, spine: int) -> None:
        """Let a spine drop everything without a word: its links stay up, nobody is told."""
        for leaf in range(_LEAVES):
            _do("ip", "-n", self.spines[spine], "route", "del", f"10.{leaf}.0.0/16")
            _do("ip", "-n", self.spines[spine], "route", "add", "blackhole", f"10.{leaf}.0.0/16")

    def restore_spine(self, spine: int) -> None:
        """Bring a spine back, with its routes."""
        for leaf in range(_LEAVES):
            _do("ip", "-n", self.spines[spine], "link", "set", f"d{leaf}", "up")
            self._route_down(spine, leaf)
        for leaf in range(_LEAVES):
            self._route_up(leaf)

    def cut_host(self, number: int) -> None:
        """Take a host off both networks, at the switches: its processes live on and are told nothing."""
        self._set_host(number, "down")

    def mend_host(self, number: int) -> None:
        """Bring it back."""
        self._set_host(number, "up")

    def _set_host(self, number: int, state: str) -> None:
        _do("ip", "-n", self.leaves[self.hosts[number].leaf], "link", "set", f"h{number}", state)
        _do("ip", "-n", self.manage, "link", "set", f"p{number}", state)

    def slow_uplink(self, leaf: int, spine: int, *, mbit: int) -> None:
        """Give one uplink another rate."""
        _limit(self.leaves[leaf], f"u{spine}", mbit, verb="replace")

    def close(self) -> None:
        """End what was started here and remove all namespaces. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()
        for namespace in self._namespaces():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    # ------------------------------------------------------------------ construction

    def _namespaces(self) -> Iterator[str]:
        yield from self.leaves
        yield from self.spines
        yield self.manage
        yield from (host.namespace for host in self.hosts)

    def _build(self) -> None:
        for namespace in self._namespaces():
            _do("ip", "netns", "add", namespace)
            _do("ip", "-n", namespace, "link", "set", "lo", "up")
        for switch in (*self.leaves, *self.spines):
            _settings(switch, self.plan.seed)
        self._build_management()
        for host in self.hosts:
            self._build_host(host)
        for leaf in range(_LEAVES):
            for spine in range(self.plan.spines):
                _wire(
                    self.leaves[leaf],
                    f"u{spine}",
                    f"10.{10 + leaf}.{spine}.1/30",
                    self.spines[spine],
                    f"d{leaf}",
                    f"10.{10 + leaf}.{spine}.2/30",
                )
                _limit(self.leaves[leaf], f"u{spine}", self.plan.uplink_mbit)
                _limit(self.spines[spine], f"d{leaf}", self.plan.uplink_mbit)
        for leaf in range(_LEAVES):
            for spine in range(self.plan.spines):
                self._route_down(spine, leaf)
        for leaf in range(_LEAVES):
            self._route_up(leaf)

    def _build_host(self, host: LabHost) -> None:
        gateway = host.address[:-1] + "1"
        _wire(host.namespace, "e0", f"{host.address}/24", self.leaves[host.leaf], f"h{host.number}", f"{gateway}/24")
        _do("ip", "-n", host.namespace, "route", "add", "default", "via", gateway)
        _limit(host.namespace, "e0", self.plan.host_mbit)
        _limit(self.leaves[host.leaf], f"h{host.number}", self.plan.host_mbit)

    def _build_management(self) -> None:
        _do("ip", "-n", self.manage, "link", "add", "hub", "type", "bridge")
        _do("ip", "-n", self.manage, "addr", "add", f"{self.management}/24", "dev", "hub")
        _do("ip", "-n", self.manage, "link", "set", "hub", "up")
        for host in self.hosts:
            port = f"p{host.number}"
            _do(
                "ip",
                "-n",
                host.namespace,
                "link",
                "add",
                "m0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.manage,
            )
            _do("ip", "-n", host.namespace, "addr", "add", f"{host.management}/24", "dev", "m0")
            _do("ip", "-n", host.namespace, "link", "set", "m0", "up")
            _do("ip", "-n", self.manage, "link", "set", port, "master", "hub")
            _do("ip", "-n", self.manage, "link", "set", port, "up")

    def _route_down(self, spine: int, leaf: int) -> None:
        _do("ip", "-n", self.spines[spine], "route", "replace", f"10.{leaf}.0.0/16", "via", f"10.{10 + leaf}.{spine}.1")

    def _route_up(self, leaf: int) -> None:
        hops = [
            word
            for spine in range(self.plan.spines)
            for word in ("nexthop", "via", f"10.{10 + leaf}.{spine}.2", "weight", "1")
        ]
        _do("ip", "-n", self.leaves[leaf], "route", "replace", f"10.{1 - leaf}.0.0/16", *hops)

    def _sent(self, namespace: str) -> Iterator[tuple[str, int]]:
        table = self.run(namespace, ["cat", "/proc/net/dev"]).stdout
        for name, numbers in re.findall(r"^\s*(\w+):(.*)$", table, re.MULTILINE):
            yield name, int(numbers.split()[8])


def _settings(switch: str, seed: int) -> None:
    wanted = {
        "ip_forward": 1,
        "fib_multipath_hash_policy": 3,
        "fib_multipath_hash_fields": 55,
        "fib_multipath_hash_seed": seed,
        "icmp_ratelimit": 0,
        "icmp_msgs_per_sec": 1000000,
        "icmp_msgs_burst": 10000,
        "conf/all/ignore_routes_with_linkdown": 1,
        "conf/all/rp_filter": 0,
        "conf/default/rp_filter": 0,
    }
    lines = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in wanted.items() if _there(name))
    _do("ip", "netns", "exec", switch, "sh", "-ec", lines)


def _there(name: str) -> bool:
    return not name.startswith("icmp_msgs") or Path("/proc/sys/net/ipv4", name).exists()


def _wire(here: str, name: str, address: str, there: str, other_name: str, other_address: str) -> None:
    _do("ip", "-n", here, "link", "add", name, "type", "veth", "peer", "name", other_name, "netns", there)
    for namespace, port, own in ((here, name, address), (there, other_name, other_address)):
        _do("ip", "-n", namespace, "addr", "add", own, "dev", port)
        _do("ip", "-n", namespace, "link", "set", port, "up")


def _limit(namespace: str, port: str, mbit: int, *, verb: str = "add") -> None:
    rate = ("rate", f"{mbit}mbit", "burst", f"{_BURST_KB}kb", "latency", f"{_QUEUE_MS}ms")
    _do("tc", "-n", namespace, "qdisc", verb, "dev", port, "root", "tbf", *rate)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
