"""The line to the analysis process: reports go in, changes of findings come out; a dead process is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.diagnosis.arrival import Arrival
from keepstep.errors import RecordError
from keepstep.records.plain_samples import PlainReport
from keepstep.records.summary import WatchReport
from keepstep.service.analysis_wire import (
    LENGTH,
    MAX_FRAME_BYTES,
    Begin,
    Look,
    Seen,
    Standing,
    decode_frame,
    framed,
)
from keepstep.service.clock import Clock

__all__ = ["Analyst"]

_LOOK_S = 0.1
"""How often to look though nothing came in: what stands still says nothing."""
_SOONEST_S = 0.02
"""After a look at the earliest, and after as long as it took: a large job is not looked at without a pause."""
_ANSWER_S = 60.0
_MOST_REPORTS = 20_000
_MOST_STARTS = 5
_RESTART_S = 1.0
_END_S = 2.0
_log = logging.getLogger(__name__)


def _told(task: asyncio.Task[None]) -> None:
    """A mistake in the analysis is in the log; it ends no job."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the analysis ended: this job goes on without it", exc_info=error)


def _nothing() -> None:
    """What follows from a look where nobody asked."""


class Analyst:
    """One job's analysis from `open()` to `close()`; `on_change(standing)` is called in the event loop.

    Never on the way of a decision: a slow analysis lets reports pile up, and of too many the oldest are dropped.
    """

    def __init__(self, begin: Begin, on_change: Callable[[Standing], None], *, clock: Clock, log: Path) -> None:
        """Nothing runs before the first report. What the process says of its own troubles goes to `log`."""
        self.pid: int | None = None
        self.baseline = b""
        self.arrivals: Callable[[], tuple[Arrival, ...]] = tuple
        self.retired: Callable[[], tuple[int, ...]] = tuple
        self.after_look: Callable[[], None] = _nothing
        self._begin = begin
        self._on_change = on_change
        self._clock = clock
        self._log = log
        self._reports: deque[WatchReport] = deque(maxlen=_MOST_REPORTS)
        self._plain: deque[PlainReport] = deque(maxlen=_MOST_REPORTS)
        self._open: dict[str, Standing] = {standing.key: standing for standing in begin.open}
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._useful = asyncio.Event()
        self._came = asyncio.Event()
        self._looking = asyncio.Lock()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def standing(self) -> tuple[Standing, ...]:
        """The findings that stand now."""
        return tuple(self._open.values())

    def take(self, report: WatchReport | PlainReport) -> None:
        """One report of an agent."""
        if isinstance(report, PlainReport):
            self._plain.append(report)
        else:
            self._reports.append(report)
        self._useful.set()
        self._came.set()

    def open(self) -> None:
        """Begin, once there is something to look at."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_told)

    async def _run(self) -> None:
        """Look when something came in and ten times a second, for as long as the job runs."""
        await self._useful.wait()
        while not self._closing and (self._starts < _MOST_STARTS or self._process is not None):
            before = self._clock.monotonic()
            try:
                await self.look()
            except (OSError, asyncio.IncompleteReadError, TimeoutError, RecordError) as error:
                await self._lost(error)
            took = self._clock.monotonic() - before
            await asyncio.sleep(max(_SOONEST_S, min(took, _LOOK_S)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), max(0.0, _LOOK_S - (self._clock.monotonic() - before)))
        if not self._closing:
            _log.error("the analysis ended %d times: this job goes on without it", self._starts)

    async def look(self) -> None:
        """One look at what came in. Raises OSError, TimeoutError and RecordError where the process does not answer."""
        async with self._looking:
            if self._process is None:
                await self._start()
            reports, plain = tuple(self._reports), tuple(self._plain)
            self._came.clear()
            self._reports.clear()
            self._plain.clear()
            await self._ask(Look(self._clock.wall(), reports, plain, self.retired(), self.arrivals()))
        self.after_look()

    async def last_look(self) -> None:
        """Look at what came in since the last time. A process that does not answer has nothing more to say."""
        if self._process is not None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, RecordError):
                await asyncio.wait_for(self.look(), 5.0)

    async def close(self) -> None:
        """A last look, then the end of the process."""
        self._closing = True
        await self.last_look()
        if self._task is not None:
            self._task.cancel()
        await self._end()

    async def _start(self) -> None:
        self._starts += 1
        with open(self._log, "ab") as troubles:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "keepstep.service.analysis_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=troubles,
                start_new_session=True,
            )
        self.pid = self._process.pid
        await self._ask(msgspec.structs.replace(self._begin, open=self.standing))

    async def _ask(self, message: Begin | Look) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(framed(message))
        seen = await asyncio.wait_for(self._answer(self._process.stdin, self._process.stdout), _ANSWER_S)
        self.baseline = seen.baseline or self.baseline
        for standing in seen.changes:
            if standing.status == "ended":
                self._open.pop(standing.key, None)
            else:
                self._open[standing.key] = standing
            self._on_change(standing)

    async def _answer(self, to: asyncio.StreamWriter, source: asyncio.StreamReader) -> Seen:
        await to.drain()
        (length,) = LENGTH.unpack(await source.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise RecordError(f"the analysis answers with {length} bytes")
        message = decode_frame(await source.readexactly(length))
        if not isinstance(message, Seen):
            raise RecordError("the analysis asks instead of answering")
        return message

    async def _lost(self, error: Exception) -> None:
        _log.warning("the analysis process is lost (%s: %s); a new one goes on", type(error).__name__, error)
        await self._end()
        await asyncio.sleep(_RESTART_S)

    async def _end(self) -> None:
        """The process ends with its input; one that does not is ended."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
