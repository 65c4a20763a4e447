"""Tasks nobody waits for: their failure is an internal error of the whole process, never silence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["background"]


def background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run `work` in the loop; an exception goes to the loop's exception handler. Keep the task."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            loop.call_exception_handler({"message": f"{done.get_name()} failed", "exception": error, "task": done})

    task.add_done_callback(ended)
    return task
