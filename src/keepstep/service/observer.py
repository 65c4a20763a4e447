"""The agent's eyes: a thread that reads the recorder rings of all members and says upward how they stand.

It never touches a training process; what it reads belongs to the agent. numpy is loaded in the thread.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from keepstep import __version__
from keepstep.errors import RecordError
from keepstep.records.plain_samples import PlainReport
from keepstep.records.summary import MemberProfile, MemberProgress, MemberSummary, WatchReport
from keepstep.service.clock import Clock
from keepstep.service.counters import host_sample
from keepstep.service.look_times import LOOK_NS, are_due, pause_s
from keepstep.service.member_process import MemberProcess
from keepstep.service.plain_eyes import PlainEyes
from keepstep.service.stack_words import digest_of
from keepstep.service.stacks import spy_stack

if TYPE_CHECKING:
    from keepstep.diagnosis.summarise import Summariser

__all__ = ["Observer"]

_SIGN_OF_LIFE_S = 1.0
_IDLE_US = 1_000_000
_STACK_EVERY_S = 1.0
_ACCELERATORS = Path("/proc/driver/nvidia/gpus")
_log = logging.getLogger(__name__)


class _Watched:
    """What is kept about one process between two looks."""

    def __init__(self, summariser: Summariser) -> None:
        self.summariser = summariser
        self.profile: MemberProfile | None = None
        self.batch = ""
        self.idle = False
        self.stack = 0
        self.stack_at = float("-inf")


class Observer:
    """Watches the members of one agent from `open()` to `close()`. `report` is called from its thread."""

    def __init__(
        self,
        node: str,
        members: Callable[[], Iterable[MemberProcess]],
        *,
        clock: Clock,
        report: Callable[[WatchReport | PlainReport], None],
    ) -> None:
        """`members()` gives the processes that run now, from any thread."""
        self._node = node
        self._members = members
        self._clock = clock
        self._report = report
        self._known: dict[str, _Watched] = {}
        self._reported = float("-inf")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-observer", daemon=True)

    def open(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for the look that is under way."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        from keepstep.diagnosis.summarise import Summariser

        plain = PlainEyes(self._node, clock=self._clock)
        wait_s = LOOK_NS / 1e9
        while not self._ending.wait(wait_s):
            running = [member for member in self._members() if member.rank >= 0]
            names = {member.name for member in running}
            self._known = {name: kept for name, kept in self._known.items() if name in names}
            if (seen := plain.look([member for member in running if not member.protected])) is not None:
                self._report(seen)
            watched = [(member, self._known.setdefault(member.name, _Watched(Summariser()))) for member in running]
            gathered = _Gathered()
            if are_due([kept.summariser.due_ns for _, kept in watched], self._now_ns()):
                for member, kept in watched:
                    self._look_at(member, kept, gathered=gathered)
            self._send(gathered)
            wait_s = pause_s([kept.summariser.due_ns for _, kept in watched], self._now_ns())

    def _now_ns(self) -> int:
        return int(self._clock.monotonic() * 1e9)

    def _look_at(self, member: MemberProcess, kept: _Watched, *, gathered: _Gathered) -> None:
        now_ns = self._now_ns()
        if not kept.summariser.due(now_ns):
            return
        sample = host_sample(member.process.pid, stack=self._stack(member, kept))
        with member.ring.held() as view:
            if view is None:
                return
            try:
                drained = kept.summariser.drain(view, sample, now_ns=now_ns)
            except RecordError:  # a process that has not joined wrote nothing yet
                return
        kept.profile = drained.profile or kept.profile
        if kept.profile is not None and (drained.profile is not None or kept.batch != member.batch):
            kept.batch = member.batch
            gathered.profiles.append(_described(kept.profile, member.batch))
        if drained.window is not None:
            gathered.windows.append(drained.window)
        if drained.progress is not None:
            gathered.progress.append(drained.progress)
            kept.idle = drained.progress.idle_us > _IDLE_US
        elif drained.window is not None:
            kept.idle = False

    def _stack(self, member: MemberProcess, kept: _Watched) -> int:
        """A digest of where the process stands, taken now and then while it is idle; 0 otherwise."""
        now = self._clock.monotonic()
        if not kept.idle:
            return 0
        if now - kept.stack_at >= _STACK_EVERY_S:
            kept.stack_at = now
            kept.stack = digest_of(spy_stack(member.process.pid).main)
        return kept.stack

    def _send(self, gathered: _Gathered) -> None:
        now = self._clock.monotonic()
        if not gathered and now - self._reported < _SIGN_OF_LIFE_S:
            return
        self._reported = now
        self._report(
            WatchReport(
                node=self._node,
                wall=self._clock.wall(),
                mono_ns=int(now * 1e9),
                profiles=tuple(gathered.profiles),
                windows=tuple(gathered.windows),
                progress=tuple(gathered.progress),
            )
        )


class _Gathered:
    """What goes into the next report."""

    def __init__(self) -> None:
        self.profiles: list[MemberProfile] = []
        self.windows: list[MemberSummary] = []
        self.progress: list[MemberProgress] = []

    def __bool__(self) -> bool:
        return bool(self.profiles or self.windows or self.progress)


def _described(profile: MemberProfile, batch: str) -> MemberProfile:
    """`profile` with what the agent knows of the environment."""
    return msgspec.structs.replace(
        profile,
        batch=batch,
        versions=(
            ("keepstep", __version__),
            ("kernel", platform.release()),
            ("python", platform.python_version()),
            ("torch", _installed("torch")),
        ),
        hardware=_hardware(),
    )


def _hardware() -> str:
    """What the node is made of, as far as it shows without a driver's library."""
    devices = len(list(_ACCELERATORS.glob("*"))) if _ACCELERATORS.is_dir() else 0
    return f"{platform.machine()}, {os.cpu_count()} processors" + (f", {devices} gpu" if devices else "")


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
