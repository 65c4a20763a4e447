"""One training process as its agent knows it: process, pipes, recorder ring, wire, and whether it is frozen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from keepstep.errors import PeerLost, TransportError
from keepstep.records.messages import Go, MemberFact, Order, Welcome
from keepstep.records.move_messages import MoveCommitted, MoveTaken
from keepstep.service.output import Console, LogFile, PipeReader
from keepstep.service.processes import ChildProcess, frozen
from keepstep.service.ring_memory import RingMemory
from keepstep.store.wire_server import AgentWire

__all__ = ["MemberProcess", "bad_loss", "loss_in", "mismatch_in"]

_LOSS = re.compile(rb"\bloss\b[\s=:]+(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)", re.IGNORECASE)
_MISMATCH = re.compile(rb"distributed collective mismatch|Detected mismatch between collectives")
"""Of Gloo, where more came than was expected, and of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
_MOST_SAID = 400
_BAD_LOSS = re.compile(rb"\bloss\b[\s=:]+([-+]?(?:nan|inf(?:inity)?))\b", re.IGNORECASE)


def loss_in(line: bytes) -> float | None:
    """The number after the word loss in a printed line, for the progress line; None if there is none."""
    found = _LOSS.search(line[:512])
    return float(found.group(1)) if found else None


def bad_loss(line: bytes) -> str:
    """The loss in a printed line if it is no finite number; empty if there is none, or a finite one."""
    found = _BAD_LOSS.search(line[:512])
    return found[1].decode() if found else ""


def mismatch_in(line: bytes) -> str:
    """The printed line where a library says in it that collectives do not match; else empty."""
    return line.strip()[-_MOST_SAID:].decode(errors="replace") if _MISMATCH.search(line) else ""


class MemberProcess:
    """State of one process. `protected` is true once it said Hello; `rank` is -1 while it holds none, `role` the one it
    is to hold; `drill` is the fault it was started with; `bad_loss` a loss it printed that is no finite number,
    `mismatch` a line of a library about collectives that do not match."""

    def __init__(self, name: str, rank: int, *, process: ChildProcess, ring: RingMemory) -> None:
        """Wraps a process that has just been started."""
        self.name = name
        self.rank = rank
        self.role = rank
        self.process = process
        self.ring = ring
        self.wire: AgentWire | None = None
        self.protected = False
        self.ended_by_order = False
        self.drill = ""
        self.loss: float | None = None
        self.batch = ""
        self.bad_loss = ""
        self.mismatch = ""
        self._frozen_since: float | None = None
        self._frozen_reported = False
        self._readers: list[PipeReader] = []
        self._log: LogFile | None = None

    def capture(self, logs: Path, console: Console, *, on_line: Callable[[bytes], None] | None = None) -> None:
        """Keep what the process prints in `logs` and echo it with the rank in front. `on_line` sees every line, too."""

        def trouble(text: str) -> None:
            console.say(f"keepstep: {text} -> its output is shown here only; free space", error=True)

        self._log = LogFile(logs / f"{self.name}.log", on_trouble=trouble)

        def echo(line: bytes, *, error: bool) -> None:
            label = f"rank {self.rank}" if self.rank >= 0 else "standby"
            self.loss = self.loss if (loss := loss_in(line)) is None else loss
            if on_line is not None:
                on_line(line)
            console.say(f"[{label}] {line.decode(errors='replace')}", error=error)

        for pipe, error in ((self.process.stdout, False), (self.process.stderr, True)):
            if pipe is not None:
                self._readers.append(PipeReader(pipe, partial(echo, error=error), on_data=self._log.write))

    def note_said(self, fact: MemberFact) -> None:
        """In a planned move ranks change their process without an order."""
        if isinstance(fact, MoveTaken):
            self.rank = self.role
        elif isinstance(fact, MoveCommitted):
            self.rank = -1

    def tell(self, order: Order) -> None:
        """Send an order; a process that is gone or does not read is noticed elsewhere."""
        if isinstance(order, Welcome):
            self.role = order.rank
            self.rank = self.rank if order.move else order.rank
        elif isinstance(order, Go):
            self.rank = self.role
        if self.wire is not None:
            with contextlib.suppress(PeerLost, TransportError):
                self.wire.post(order)

    def newly_frozen(self, now: float, *, after_s: float) -> float | None:
        """The time since when it is stopped, once, when that is at least `after_s` seconds ago. `now` is wall time."""
        if not frozen(self.process.pid):
            self._frozen_since, self._frozen_reported = None, False
            return None
        self._frozen_since = self._frozen_since or now
        if self._frozen_reported or now - self._frozen_since < after_s:
            return None
        self._frozen_reported = True
        return self._frozen_since

    def moves_again(self) -> bool:
        """Once true after it was told as frozen and is not any more; to be asked before `newly_frozen`."""
        return self._frozen_reported and not frozen(self.process.pid)

    def drain(self) -> None:
        """Read what the process printed last and close its pipes and log."""
        for reader in self._readers:
            reader.drain()
        if self._log is not None:
            self._log.close()
