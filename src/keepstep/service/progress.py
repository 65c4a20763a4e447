"""How a run shows itself: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

__all__ = ["Progress", "Standing"]

_PLAIN_EVERY = 100
"""Plain lines: one for so many looks (10 s at the launcher's pace), and only if something changed."""


class Standing(msgspec.Struct, frozen=True):
    """What the line says. `step` is the lowest step of a member, `loss` what rank 0 printed last, `findings` what
    stands against whom.
    """

    phase: str
    step: int
    loss: float | None
    members: int
    standbys: int
    findings: str = ""

    def text(self) -> str:
        """One line for people."""
        loss = "" if self.loss is None else f" · loss {self.loss:.4g}"
        found = f" · {self.findings}" if self.findings else ""
        return f"step {self.step}{loss} · {self.members} members · {self.standbys} standbys · {self.phase}{found}"


class Progress:
    """Writes lines and keeps the live line below them. Thread-safe: lines come from the console's thread."""

    def __init__(self) -> None:
        """Live only if stderr is a terminal."""
        self._rich = RichConsole(stderr=True)
        self._live: Live | None = None
        self._looks = 0
        self._shown: Standing | None = None
        if self._rich.is_terminal:
            self._live = Live(Text(""), console=self._rich, refresh_per_second=4, transient=True, redirect_stdout=False)
            self._live.start()

    def write(self, line: str, error: bool) -> None:
        """Put a line of output out: above the live line on a terminal, else to stdout or stderr as it came."""
        if self._live is not None and (error or sys.stdout.isatty()):
            self._rich.print(Text(line), soft_wrap=True)
        else:
            print(line, file=sys.stderr if error else sys.stdout, flush=True)

    def show(self, standing: Standing) -> str | None:
        """Update the live line; without a terminal, now and then, the text of a plain line to be written."""
        if self._live is not None:
            self._live.update(Text(standing.text()))
            return None
        self._looks += 1
        if self._looks % _PLAIN_EVERY or standing == self._shown:
            return None
        self._shown = standing
        return f"keepstep: {standing.text()}"

    def close(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
