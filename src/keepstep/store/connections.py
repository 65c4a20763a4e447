"""The tasks a server runs, one for each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from keepstep.errors import PeerLost

__all__ = ["Connections"]


class Connections:
    """Starts tasks, forgets them when they end, and tells the event loop's exception handler of failures."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task. PeerLost ends it quietly; any other exception goes to the loop's handler."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    async def close(self) -> None:
        """Cancel all tasks (but the calling one) and wait for them."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, PeerLost):
            task.get_loop().call_exception_handler(
                {"message": "a connection's handler failed", "exception": error, "task": task}
            )
