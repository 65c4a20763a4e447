"""Plays a transcript: its events go through the real machines, and what they do is written below each event.

Events (`> ` lines):

    job world=4 [nnodes= max_restarts= patience_s= epoch=]     a new job (first line)
    running world=4 standbys=1                                 a job on one node, through its first step; silent
    n0 AgentHello slots=4 standbys=1                           any fact, from an agent or a member, fields by name
    m2 Parked generation=1 version=7 agreed=true
    hello all | hello m4 world=3                               processes that start call join()
    parked all version=7 | settled all digest=d ...            the same answer from every member that can give it
    move 2 0 [to=n1] | move node=n0                            a person wants ranks moved
    tick 1.0 | wait 0.2 | stop 130                             time passes, with or without a tick; a person ends it
    machine rank=1 version=7 generation=3                      a member's own machine (instead of a job)
    at agreement Settle epoch=1 generation=4 version=8         an order reaches it there; `at boundary`, `kept`, too
"""

from __future__ import annotations

import re

import msgspec
import output

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobSpec, JobState, StopRequest, Tick
from keepstep.control.member import MemberState, Place, at_boundary, obey, step_kept
from keepstep.control.roster import Status, live
from keepstep.records import domain_messages, messages, mirror_messages, move_messages, watch_messages
from keepstep.records.messages import Address
from keepstep.records.mirror_messages import HeldMirror
from keepstep.records.moves import MoveRequest

VERSION = "1.0"
MODULES = (messages, watch_messages, mirror_messages, move_messages, domain_messages)
DEFAULTS = {
    "AgentHello": {"slots": 0, "standbys": 0, "keepstep_version": VERSION},
    "Hello": {"pid": 1, "keepstep_version": VERSION, "torch_version": "2"},
    "MemberExited": {"rank": -1, "code": 0, "signal": 0},
    "MemberStopped": {"rank": -1, "since": 0.0},
    "MemberHung": {"rank": -1, "since": 0.0},
    "MemberSlow": {"rank": -1, "why": "its loader"},
    "StartFailed": {"rank": -1, "why": "no such file"},
    "Parked": {"agreed": False, "boundary": False},
    "Settled": {"digest": "d", "replica": "all"},
    "Ready": {"replica": "all"},
    "Fetched": {"digest": "d", "bytes_moved": 100},
    "FetchFailed": {"lost": (), "why": "no source answers"},
    "Abort": {"lost": ()},
    "Fence": {"why": "gone"},
    "MovePrepared": {"number": 1},
    "MoveCommitted": {"number": 1},
    "MoveRefused": {"number": 1, "why": "somebody was not quiet"},
    "MoveTaken": {"number": 1, "parts": {"last_update_s": 0.001, "check_s": 0.002}},
    "Stop": {"code": 1, "why": "over"},
    "Go": {"roster": {}},
    "Fetch": {"digest": "d", "sources": (), "roster": {}, "private": b""},
}
ANSWERS = {
    "parked": "Parked",
    "settled": "Settled",
    "first": "FirstStep",
    "finished": "Finished",
    "found": "Checkpoints",
    "mirrors": "Mirrors",
}


def _named(kind: str) -> type[msgspec.Struct]:
    """The message of that name."""
    return next(found for module in MODULES if (found := getattr(module, kind, None)) is not None)


def value(text: str):
    """`true`, `7`, `0.5`, `2,4,`, `7:aa,8:bb`, `1:8:a|9:b` (rank, version), held mirrors, `rack:r1,power:x`, text."""
    if text in ("true", "false"):
        return text == "true"
    if re.match(r"\d+:\d+:\w+:", text):
        parts = [one.split(":") for one in text.split(",") if one]
        return tuple(HeldMirror(int(rank), int(version), digest, key) for rank, version, digest, key in parts)
    if re.match(r"\d+:\d+:", text):
        rank, _, versions = text.partition(":")
        return {int(rank): value(versions.replace("|", ","))}
    if re.match(r"\d+:", text):
        pairs = [pair.split(":") for pair in text.split(",")]
        return {int(version): data.encode() for version, data in pairs}
    if re.fullmatch(r"[a-z]+:\w+(,[a-z]+:\w+)*", text):
        return dict(pair.split(":") for pair in text.split(","))
    if "," in text:
        return tuple(value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.replace("_", " ")


def fields_of(words: list[str]) -> dict:
    return {name: value(text) for name, text in (word.split("=", 1) for word in words)}


def message(kind: str, **given):
    return _named(kind)(**{**DEFAULTS.get(kind, {}), **given})


class Player:
    """A job, or one member's machine, and the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.job: JobState | None = None
        self.machine: MemberState | None = None
        self.seen: set[str] = set()

    def play(self, words: list[str]) -> list[str]:
        first, rest = words[0], words[1:]
        special = getattr(self, f"_play_{first}", None)
        if special is not None:
            return special(rest)
        if first in ANSWERS:
            return self._answer(ANSWERS[first], rest[0], fields_of(rest[1:]))
        return self._fact(first, rest[0], fields_of(rest[1:]))

    # ------------------------------------------------------------ a job

    def _play_job(self, words: list[str]) -> list[str]:
        given = {"nnodes": 1, "epoch": 1, **fields_of(words)}
        epoch = given.pop("epoch")
        spec = JobSpec(job="job", keepstep_version=VERSION, secret=b"secret", **given)
        self.job = new_job(spec, epoch)
        return []

    def _play_running(self, words: list[str]) -> list[str]:
        given = fields_of(words)
        standbys = given.pop("standbys")
        self._play_job([f"{name}={number}" for name, number in given.items()])
        self._fact("n0", "AgentHello", {"slots": given["world"], "standbys": standbys})
        self._play_hello(["all"])
        self._answer("FirstStep", "all", {"version": 1})
        self.now += 10.0
        return []

    def _play_wait(self, words: list[str]) -> list[str]:
        self.now += float(words[0])
        return []

    def _play_tick(self, words: list[str]) -> list[str]:
        self.now += float(words[0])
        return self._feed(Event("", "", Tick()))

    def _play_stop(self, words: list[str]) -> list[str]:
        return self._feed(Event("", "", StopRequest(int(words[0]), "interrupted")))

    def _play_move(self, words: list[str]) -> list[str]:
        given = fields_of([word for word in words if "=" in word])
        ranks = tuple(int(word) for word in words if "=" not in word)
        return self._feed(Event("", "", MoveRequest(ranks, given.get("node", ""), given.get("to", ""))))

    def _play_hello(self, words: list[str]) -> list[str]:
        starting = [m.name for m in self._state.members.values() if m.status is Status.STARTING]
        lines = []
        for name in starting if words[0] == "all" else words[:1]:
            member = self._state.members[name]
            address = Address(name, member.node, name, member.node, 1)
            given = {"world": self._state.spec.world, "rank": member.rank, **fields_of(words[1:])}
            lines += self._feed(Event(member.node, name, message("Hello", member=name, address=address, **given)))
        return lines

    def _answer(self, kind: str, who: str, given: dict) -> list[str]:
        """From every live member (or those named) that can say this now."""
        change = self._state.change
        copying = change is not None and change.restore is None and not change.going
        silent = kind in ("Parked", "Mirrors") or (kind == "Settled" and copying)
        lines = []
        for member in self._speakers:
            named = who == "all" or member.name in who.split(",")
            if named and not (member.joiner and silent and not member.moving) and member.status is not Status.FINISHED:
                lines += self._fact(member.name, kind, given)
        return lines

    def _fact(self, source: str, kind: str, given: dict) -> list[str]:
        fields = {field.name for field in msgspec.structs.fields(_named(kind))}
        member = given.get("member", "") or (source if source.startswith("m") else "")
        assert not member or member in self.seen, f"there is no {member}"
        node = self._state.members[member].node if member in self._state.members else source
        change = self._state.change
        if "generation" in fields:
            move = self._state.move
            current = self._state.generation if change is None else change.generation
            if change is None and move is not None and kind in ("MoveCommitted", "FirstStep"):
                current = move.generation
            given = {"generation": current, **given}
        if kind == "MoveRefused" and self._state.move is not None:
            given = {"failed": self._state.move.tries, **given}
        if "node" in fields:
            given = {"node": source, **given}
        return self._feed(Event(node, member, message(kind, **given)))

    @property
    def _speakers(self) -> list:
        """Members, and in the commit of a move those who are to be."""
        claims = [m for m in self._state.members.values() if m.moving and m.status is not Status.GONE]
        return [*live(self._state.members), *claims]

    @property
    def _state(self) -> JobState:
        assert self.job is not None, "the first event is `> job ...`"
        return self.job

    def _feed(self, event: Event) -> list[str]:
        before = self._state
        decision = decide(before, event, now=self.now)
        self.job = decision.state
        self.seen |= set(self.job.members)
        return output.lines_of(before, decision)

    # ------------------------------------------------------------ a member's machine

    def _play_machine(self, words: list[str]) -> list[str]:
        self.machine = MemberState(**fields_of(words))
        return []

    def _play_at(self, words: list[str]) -> list[str]:
        assert self.machine is not None
        before = self.machine
        if len(words) == 1:
            self.machine, act = at_boundary(before)
        else:
            self.machine, act = obey(before, message(words[1], **fields_of(words[2:])), place=Place(words[0]))
        return output.lines_of_machine(before, self.machine, act)

    def _play_kept(self, words: list[str]) -> list[str]:
        assert self.machine is not None
        before = self.machine
        self.machine, act = step_kept(before)
        return output.lines_of_machine(before, self.machine, act)


def play(text: str) -> str:
    """The transcript `text` with its output lines as they are now."""
    player = Player()
    played = []
    for line in text.splitlines():
        if line.startswith("> "):
            played += [line, *(f"  {out}" for out in player.play(line[2:].split()))]
        elif not line.startswith("  "):
            played.append(line)
    return "\n".join(played) + "\n"
