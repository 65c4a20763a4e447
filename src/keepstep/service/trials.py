"""Runs trials: one process that imports torch once, a child of it for each rank, bounds on time and memory, traces."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.errors import EnvironmentProblem, TornRecord
from keepstep.records.trial import Trace, TrialPlan, TrialRecord, decode_record, trace_of
from keepstep.service.clock import Clock

__all__ = ["TrialLimits", "Trials", "last_lines"]

_START_S = 120.0
_GRACE_S = 10.0
_LOOK_S = 0.1
_MOST_TRACE_BYTES = 128 * 1024 * 1024
_MOST_TEXT_BYTES = 65536
_MOST_OUTPUT_BYTES = 256 * 1024 * 1024
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ')
_OTHERS = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {
        str(Path(__file__).parents[1]),
        *(p for p in (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")) if p),
    }
)


class TrialLimits(msgspec.Struct, frozen=True):
    """Bounds: bytes of resident memory of one trial, seconds of all together."""

    memory_bytes: int
    whole_s: float


class _Running(msgspec.Struct):
    pid: int
    since: float
    cut: str = ""
    cut_text: str = ""


class Trials:
    """The nursery and what it was asked for. Use it as a context: nothing that was started outlives it."""

    def __init__(self, plan: TrialPlan, environment: Mapping[str, str], *, limits: TrialLimits, clock: Clock) -> None:
        """Start the process. Raises EnvironmentProblem if it cannot run."""
        self._plan, self._limits, self._clock = plan, limits, clock
        self._directory = Path(plan.directory)
        self._began = clock.monotonic()
        self._running: dict[int, _Running] = {}
        self._rest = b""
        file = self._directory / "plan.json"
        file.write_bytes(msgspec.json.encode(plan))
        with open(self._directory / "nursery.out", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keepstep.training.trial_nursery", str(file)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        """End everything: the nursery ends its trials when its input does."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        for one in self._running.values():
            _kill(one.pid)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            process.wait()
        process.stdout.close()

    @property
    def time_is_up(self) -> bool:
        """Whether no further trial may begin."""
        return self._clock.monotonic() - self._began >= self._limits.whole_s

    def wait_until_ready(self) -> None:
        """Until torch is imported. Raises EnvironmentProblem."""
        end = self._clock.monotonic() + _START_S
        while b"ready\n" not in self._rest:
            if not self._read() or self._clock.monotonic() > end:
                text = last_lines(self._directory / "nursery.out", 1)
                raise EnvironmentProblem(
                    f"trials cannot run: {text or 'the process does not start'}", remedy="see `keepstep doctor`"
                )
        self._rest = self._rest.replace(b"ready\n", b"", 1)

    def run(self, ranks: Sequence[int], *, at_once: int, tell: Callable[[Trace, float], None]) -> list[Trace]:
        """The traces of `ranks`, `at_once` at a time; `tell` gets each with its seconds. Stops where time is up, or
        when two of them hung."""
        waiting = list(ranks)
        done: list[Trace] = []
        while waiting or self._running:
            hung = sum(trace.cut == "hang" for trace in done)
            if self.time_is_up or hung > 1:
                waiting.clear()
            while waiting and len(self._running) < at_once:
                self._start(waiting.pop(0))
            for rank, code in self._ended():
                one = self._running.pop(rank)
                trace = self._trace(rank, one, code=code)
                done.append(trace)
                tell(trace, self._clock.monotonic() - one.since)
            self._watch()
        return done

    def _start(self, rank: int) -> None:
        assert self._process.stdin is not None
        self._running[rank] = _Running(0, self._clock.monotonic())
        self._process.stdin.write(b"%d\n" % rank)
        self._process.stdin.flush()

    def _read(self) -> bool:
        """Read what the nursery says, for a moment; False when it is gone."""
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], _LOOK_S)[0]:
            data = os.read(self._process.stdout.fileno(), 65536)
            self._rest += data
            return bool(data)
        return True

    def _ended(self) -> list[tuple[int, int]]:
        """Ranks whose trial ended, with the exit code. Raises EnvironmentProblem if the nursery is gone."""
        there = self._read()
        lines = self._rest.split(b"\n")
        self._rest = lines.pop()
        ended = []
        for line in lines:
            what, rank, number = line.split()
            if what == b"started":
                self._running[int(rank)].pid = int(number)
            else:
                ended.append((int(rank), int(number)))
        if not there and not ended:
            raise EnvironmentProblem(f"trials ended: {last_lines(self._directory / 'nursery.out', 1)}")
        return ended

    def _watch(self) -> None:
        """Keep to the bounds."""
        now = self._clock.monotonic()
        for rank, one in self._running.items():
            if not one.pid or one.cut:
                continue
            resident = _resident_bytes(one.pid)
            if resident > self._limits.memory_bytes:
                gib = 1 << 30
                bound = self._limits.memory_bytes / gib
                one.cut, one.cut_text = "memory", f"{resident / gib:.2f} GiB where {bound:.2f} GiB are allowed"
            elif now - one.since > self._plan.limit_s + _GRACE_S:
                one.cut = "hang"
            elif _size(self._directory / f"rank-{rank}.out") > _MOST_OUTPUT_BYTES:
                one.cut, one.cut_text = "output", "keepstep: it printed too much"
            if one.cut:
                _kill(one.pid)

    def _trace(self, rank: int, one: _Running, *, code: int) -> Trace:
        records = _records(self._directory / f"rank-{rank}.trace")
        trace = trace_of(rank, records)
        if trace.ended is not None and trace.ended.how != "full":
            return trace
        dump = _text(self._directory / f"rank-{rank}.stack")
        cut, text = one.cut, one.cut_text
        if cut == "hang" or (not cut and dump.startswith("Timeout")):
            cut, text = "hang", f"{self._plan.limit_s:g} s"
        elif not cut and trace.ended is None:
            cut, text = "died", f"signal {code - 128}" if code > 128 else f"the script itself, with exit code {code}"
        return msgspec.structs.replace(trace, cut=cut, cut_text=text, stack=_stack(dump))


def last_lines(path: Path, count: int) -> str:
    """The last lines of a file, at most 64 KiB of it; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(_size(path) - _MOST_TEXT_BYTES, 0))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(line[:500] for line in lines[-count:])


def _records(path: Path) -> list[TrialRecord]:
    """The records of a trace; what a kill left of the last line is left out."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_MOST_TRACE_BYTES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        if line:
            with contextlib.suppress(TornRecord):
                found.append(decode_record(line))
    return found


def _stack(dump: str) -> tuple[str, ...]:
    """The script's own places on the main thread, which faulthandler prints last; the innermost first."""
    blocks = dump.split("most recent call first")
    places = []
    for line in blocks[-1].splitlines():
        found = _FRAME.match(line)
        if found and not found["file"].startswith(("<", *_OTHERS)):
            file = os.path.relpath(found["file"])
            places.append(f"{found['file'] if file.startswith('..') else file}:{found['line']}")
    return tuple(places)


def _text(path: Path) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST_TEXT_BYTES)
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read(256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _kill(pid: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
