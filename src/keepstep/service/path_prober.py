"""The agent's side of probing: answers where packets of some connections are and what these carried, beside everything
else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep.errors import KeepstepError
from keepstep.records.messages import Fact
from keepstep.records.path_messages import MAX_WAYS, CountPaths, PathsCounted, PathsProbed, ProbePaths
from keepstep.service.background import background
from keepstep.service.clock import Clock
from keepstep.service.path_counters import carried_by_ways
from keepstep.service.path_probing import hops_of_ways

__all__ = ["PathProber"]


class PathProber:
    """Carries out `ProbePaths` in a thread, one order at a time, and `CountPaths` at once; answers go through
    `upward`."""

    def __init__(self, upward: Callable[[Fact], None], *, clock: Clock) -> None:
        self._upward = upward
        self._clock = clock
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def obey(self, order: ProbePaths | CountPaths) -> None:
        """Start on an order; from the event loop."""
        if isinstance(order, CountPaths):
            self._upward(PathsCounted(order.number, carried_by_ways(order.ways[:MAX_WAYS])))
            return
        task = background(self._answer(order))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Drop what is not answered yet."""
        for task in self._running:
            task.cancel()

    async def _answer(self, order: ProbePaths) -> None:
        async with self._turn:
            try:
                if len(order.ways) > MAX_WAYS:
                    raise KeepstepError(f"asked about {len(order.ways)} ways, at most {MAX_WAYS} are answered")
                hops = await asyncio.to_thread(hops_of_ways, order.ways, order.ttls, clock=self._clock)
            except PermissionError:
                self._upward(PathsProbed(order.number, why="raw sockets are not allowed: the agent needs CAP_NET_RAW"))
            except (OSError, KeepstepError) as error:
                self._upward(PathsProbed(order.number, why=str(error)))
            else:
                self._upward(PathsProbed(order.number, hops))
