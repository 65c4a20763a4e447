"""Measurements of a probe on a node: how fast a processor there computes, how fast a member's files are read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from keepstep.records.watch_messages import NodeProbed, ProbeNode
from keepstep.service.clock import Clock
from keepstep.service.member_process import MemberProcess
from keepstep.service.stack_words import digest_of, place_words
from keepstep.service.stacks import take_stack

__all__ = ["probe_node"]

_LIMIT_S = 20.0
_LOOPS = 3_000_000
_PIECE_BYTES = 8 << 20
_MOST_FILES = 8
_APART_S = 1.0
_COUNT = f"import time; b=time.process_time(); [0 for _ in range({_LOOPS})]; print(time.process_time()-b)"


def probe_node(member: MemberProcess, order: ProbeNode, *, node: str, clock: Clock, log: Path) -> NodeProbed:
    """What `order` asks about `member`. Blocks for some seconds at most; for a thread."""
    if order.what == "cpu":
        value, unit, note = _processor(member.process.pid)
    elif order.what == "read":
        value, unit, note = _files(member.process.pid, clock)
    else:
        value, unit, note = 0.0, "", _stacks(member.process.pid, log)
    return NodeProbed(order.finding, order.rank, node, value, unit, note)


def _processor(pid: int) -> tuple[float, str, str]:
    """Loops per second of processor time, on the processors the member may use."""
    try:
        allowed = os.sched_getaffinity(pid)
        command = [sys.executable, "-I", "-S", "-c", f"import os; os.sched_setaffinity(0, {sorted(allowed)}); {_COUNT}"]
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True)
        return _LOOPS / max(float(done.stdout), 1e-9), "loops/s", f"on {len(allowed)} processors"
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return 0.0, "", f"could not be measured: {type(error).__name__}"


def _files(pid: int, clock: Clock) -> tuple[float, str, str]:
    """Bytes per second of reading the first pieces of the regular files that the member has open."""
    taken, took_s, count = 0, 0.0, 0
    for path in _open_files(pid)[:_MOST_FILES]:
        try:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, _PIECE_BYTES, os.POSIX_FADV_DONTNEED)
                begun = clock.monotonic()
                taken += len(file.read(_PIECE_BYTES) or b"")
                took_s += clock.monotonic() - begun
                count += 1
        except OSError:
            continue
    if not taken:
        return 0.0, "", "it has no file open that could be read"
    return taken / max(took_s, 1e-9), "B/s", f"{count} files"


def _open_files(pid: int) -> list[str]:
    """Regular files that are open, each once, without those that are gone or only mapped by the interpreter."""
    found: dict[str, None] = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            ours = path.startswith("/") and not path.startswith(("/dev", "/proc", "/memfd"))
            if ours and stat.S_ISREG(os.stat(path).st_mode):
                found[path] = None
    except OSError:
        pass
    return list(found)


def _stacks(pid: int, log: Path) -> str:
    """Where its main thread stands, and whether it moved within a second."""
    first = take_stack(pid, log).main
    time.sleep(_APART_S)
    second = take_stack(pid, log).main
    moved = "moved" if digest_of(first) != digest_of(second) else "did not move within a second"
    return f"stands at {place_words(second)}; {moved}"
