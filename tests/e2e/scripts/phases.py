"""Stops this process at a phase of a membership change, so that others (or itself) can be killed from outside there.

The file `control` holds `{"case": N, "phase": ..., "who": ...}`: the first process that comes to that phase as that
rank (or as "joiner") writes its pid to `case-N` beside it and waits for `case-N-go`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from keepstep.records.messages import Parked, Ready
from keepstep.records.move_messages import CommitMove, PrepareMove
from keepstep.training.guard import Guard
from keepstep.training.leading import Leading
from keepstep.training.moving import Moving
from keepstep.training.taking_over import TakingOver
from keepstep.training.transfer import StateServer

PHASES_OF_STAYERS = ("abort", "parked", "settle", "settled", "serving", "go", "installed")
PHASES_OF_JOINERS = ("welcome", "ready", "fetch", "fetched", "go", "installed")
PHASES_OF_MOVES = {
    "leaver": ("leave", "snapshot", "commit", "voted", "proving"),
    "joiner": ("welcome", "ready", "follow", "room", "following", "handed", "taking", "taken"),
    "stayer": ("stay", "staying", "stayed"),
}
LIMIT_S = 60.0


class Phases:
    """Reads `control` whenever a phase is reached; nothing happens while the file is not there."""

    def __init__(self, control: Path) -> None:
        self.control = control
        self.joining = False
        self.rank = -1

    def at(self, phase: str) -> None:
        try:
            wanted = json.loads(self.control.read_text())
        except (OSError, ValueError):
            return
        if wanted["phase"] != phase or wanted["who"] != ("joiner" if self.joining else str(self.rank)):
            return
        marker = self.control.parent / f"case-{wanted['case']}"
        try:
            with marker.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        end = time.monotonic() + LIMIT_S
        while not Path(f"{marker}-go").exists() and time.monotonic() < end:
            time.sleep(0.002)

    def around(self, owner: type, name: str, before: str = "", after: str = "") -> None:
        """Calls `at` before and after the method `name` of `owner`."""
        method = getattr(owner, name)

        def wrapped(this, *args, **kwargs):
            if before:
                self.at(before)
            result = method(this, *args, **kwargs)
            if after:
                self.at(after)
            return result

        setattr(owner, name, wrapped)


def stop_at_phases(control: Path) -> None:
    """Makes this process look at `control` at every phase."""
    phases = Phases(control)
    begin, say = Guard.__init__, Guard._say

    def begun(guard, *args, **kwargs):
        begin(guard, *args, **kwargs)
        phases.rank, phases.joining = guard.state.rank, guard.state.joiner
        phases.at("welcome")

    def said(guard, act):
        phases.at("abort" if isinstance(act.fact, Parked) else "ready" if isinstance(act.fact, Ready) else "")
        say(guard, act)
        phases.at("parked" if isinstance(act.fact, Parked) else "")

    Guard.__init__, Guard._say = begun, said
    phases.around(Guard, "_tell_settled", "settle", "settled")
    phases.around(Guard, "_take_state", "fetch", "fetched")
    phases.around(StateServer, "handle", "serving")
    phases.around(Guard, "_run_on", "go")
    install = Guard._run_on

    def installed(guard, act):
        install(guard, act)
        phases.at("installed")
        phases.joining = False

    Guard._run_on = installed
    _stop_at_moves(phases)


def _stop_at_moves(phases: Phases) -> None:
    take = Moving.take

    def taken(moving, order):
        if isinstance(order, PrepareMove) and order.part != "join":
            phases.at(order.part)
        if isinstance(order, CommitMove):
            phases.at("commit")
        take(moving, order)

    Moving.take = taken
    phases.around(Leading, "snapshot", "", "snapshot")
    phases.around(Moving, "_leave", "voted")
    phases.around(Leading, "prove", "proving")
    phases.around(Moving, "_stay", "staying", "stayed")
    phases.around(TakingOver, "_connect", "follow")
    phases.around(TakingOver, "_lag", "room")
    phases.around(TakingOver, "_update", "following")
    phases.around(TakingOver, "_handed_over", "handed")
    take_rank = TakingOver._take

    def took(joining, last, order):
        phases.at("taking")
        take_rank(joining, last, order)
        phases.at("taken")
        phases.joining = False

    TakingOver._take = took
