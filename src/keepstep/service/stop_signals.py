"""Ctrl-C and friends for a loop that has nobody to tell but itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

from keepstep.errors import KeepstepError

__all__ = ["STOPPED_BY", "StopSignals", "ended_by_signals", "stopped_words"]

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job in order."""


def stopped_words(number: int) -> str:
    """Why a job ended that was ended by this signal."""
    return f"stopped by {signal.Signals(number).name}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """In the main thread: SIGTERM and SIGHUP end the block as Ctrl-C does, with exit code 128 + signal, so that it lets
    go of what it holds. One that is ignored (nohup) stays so."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    wanted = [number for number in STOPPED_BY[1:] if signal.getsignal(number) is not signal.SIG_IGN]
    kept = {number: signal.signal(number, end) for number in wanted}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class StopSignals:
    """Catches the signals that end a job from its making on, in the running loop."""

    def __init__(self) -> None:
        """Take over the signals; an internal error ends the work too, with 70."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        self._came: asyncio.Future[int] = loop.create_future()
        for number in STOPPED_BY:
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if not self._came.done():
            self._came.set_result(128 + number)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _log.error("internal error: %s", context.get("message"), exc_info=context.get("exception"))
        if not self._came.done():
            self._came.set_result(KeepstepError.exit_code)

    async def or_result(self, work: Coroutine[Any, Any, _Result]) -> _Result | int:
        """The result of `work`, or 128 + signal as soon as one comes; `work` is cancelled then."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._came}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        return self._came.result()
