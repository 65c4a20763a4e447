"""What the kernel counts for a process and for the host: processor time, run delay, state, network, pressure.

Sources: proc(5); Documentation/scheduler/sched-stats.rst (schedstat: time on a processor, time waiting for one, ns);
Documentation/accounting/psi.rst (pressure).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keepstep.records.summary import HostSample

__all__ = [
    "HostCounters",
    "InterfaceCounters",
    "ProcessCounters",
    "host_counters",
    "host_sample",
    "main_thread_turns",
    "process_counters",
]

_PROC = Path("/proc")
_MOST_BYTES = 64 * 1024
_MOST_THREADS = 1024
_TICKS = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_PRESSURES = ("cpu", "memory", "io")


class ProcessCounters(msgspec.Struct, frozen=True):
    """One process with all its threads. `state` is the letter of proc(5) of its main thread; times in s since start.

    `run_delay_s` is time in which one of its threads could have run and no processor was free.
    """

    state: str
    cpu_s: float
    run_delay_s: float
    threads: int


class InterfaceCounters(msgspec.Struct, frozen=True):
    """One network interface since boot: bytes, packets with errors, packets dropped, both ways together."""

    bytes_received: int
    bytes_sent: int
    errors: int
    dropped: int


class HostCounters(msgspec.Struct, frozen=True):
    """The host since boot. `cpu_s`: by kind, all processors together; `pressure`: share of the last 10 s, per cent."""

    processors: int
    cpu_s: dict[str, float]
    load: tuple[float, float, float]
    pressure: dict[str, float]
    memory_available: int
    interfaces: dict[str, InterfaceCounters]


def process_counters(pid: int) -> ProcessCounters | None:
    """The counters of `pid`; None if there is no such process."""
    fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    if not fields:
        return None
    cpu_ns = delay_ns = threads = 0
    for thread in _threads(pid):
        words = _read(_PROC / str(pid) / "task" / thread / "schedstat").split()
        if len(words) >= 2 and words[0].isdigit() and words[1].isdigit():
            cpu_ns += int(words[0])
            delay_ns += int(words[1])
        threads += 1
    return ProcessCounters(fields[0], cpu_ns / 1e9, delay_ns / 1e9, threads)


def main_thread_turns(pid: int) -> int:
    """How often the main thread of `pid` was given a processor since it began; 0 where that is unknown."""
    words = _read(_PROC / str(pid) / "task" / str(pid) / "schedstat").split()
    return int(words[2]) if len(words) == 3 and words[2].isdigit() else 0


def host_sample(pid: int, *, stack: int = 0) -> HostSample:
    """The counters of `pid` as summaries carry them, with the digest of its `stack` (0: not taken)."""
    found = process_counters(pid)
    if found is None:
        return HostSample(state="X")
    return HostSample(int(found.cpu_s * 1e6), int(found.run_delay_s * 1e6), found.state, stack)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(_PROC / str(pid) / "task")[:_MOST_THREADS]
    except OSError:
        return []


def host_counters() -> HostCounters:
    """The counters of this host; what the kernel does not give is empty."""
    return HostCounters(
        processors=os.cpu_count() or 1,
        cpu_s=_cpu(),
        load=os.getloadavg(),
        pressure={name: value for name in _PRESSURES if (value := _pressure(name)) is not None},
        memory_available=_memory_available(),
        interfaces=_interfaces(),
    )


def _cpu() -> dict[str, float]:
    words = _read(_PROC / "stat").split("\n", 1)[0].split()[1:]
    return {name: int(word) / _TICKS for name, word in zip(_CPU_FIELDS, words, strict=False) if word.isdigit()}


def _pressure(name: str) -> float | None:
    for word in _read(_PROC / "pressure" / name).split("\n", 1)[0].split():
        key, _, value = word.partition("=")
        if key == "avg10":
            return _number(value)
    return None


def _memory_available() -> int:
    for line in _read(_PROC / "meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:" and words[1].isdigit():
            return int(words[1]) * 1024
    return 0


def _interfaces() -> dict[str, InterfaceCounters]:
    found: dict[str, InterfaceCounters] = {}
    for line in _read(_PROC / "net" / "dev").splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 12 and all(word.isdigit() for word in words):
            n = [int(word) for word in words]
            found[name.strip()] = InterfaceCounters(n[0], n[8], n[2] + n[10], n[3] + n[11])
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    """The first bytes of a file of the kernel; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
