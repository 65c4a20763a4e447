"""What changes at a step boundary without the controller: prepared path plans, and members that move.

The agreement of a step tells every member whether such a change is due. If so, all vote once more at the boundary, in
one small collective: who is ready and quiet. All see the same outcome, so all change together or none does.
"""

from __future__ import annotations

import array
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from keepstep.records.messages import Address
from keepstep.training.ballot import Ballot
from keepstep.training.links import Channel
from keepstep.training.plane import Call, Element, Op, Reduction, Status

__all__ = ["Move", "MoveVote", "Turned", "Turning", "smallest"]

_NO_VOTE = 2
_READY = 1
_LEAVES = -1


class Move(NamedTuple):
    """A move that this member prepares: `ranks` gives the joiner of each rank that moves, `leaving` says that this
    member holds one of them."""

    number: int
    generation: int
    ranks: Mapping[int, Address]
    leaving: bool = False


class MoveVote(NamedTuple):
    """How the vote about move `number` went: it passed where nobody is `unready`; then the members of `ranks` leave and
    all others install `generation`."""

    number: int
    generation: int
    ranks: frozenset[int]
    unready: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the move is made."""
        return bool(self.ranks) and not self.unready


class Turned(NamedTuple):
    """What a boundary brought: the path plan that is in force now (0: none new), and the vote about a move, if any."""

    plan: int = 0
    move: MoveVote | None = None


class Turning:
    """What this member knows of changes that wait for a boundary. `least(*values)` is the smallest of each value over
    all members, empty if somebody is missing. Thread-safe but for the votes, which are the training thread's.
    `failed` counts the votes about the present move that did not pass."""

    def __init__(self, least: Callable[..., tuple[int, ...]], *, rank: int, ranks: Sequence[int]) -> None:
        self._least = least
        self._rank, self._ranks = rank, tuple(ranks)
        self._lock = threading.Lock()
        self._move: Move | None = None
        self._ready = False
        self._commits = 0
        self.failed = 0
        self._due_plan = self._due_move = 0
        self._retired: list[int] = []

    @property
    def move(self) -> Move | None:
        """The move that is being prepared."""
        with self._lock:
            return self._move

    def begin(self, move: Move) -> None:
        """This member takes part in a move, and is not ready yet."""
        with self._lock:
            self._move, self._ready, self.failed = move, False, 0

    def ready(self, number: int, *, yes: bool = True) -> None:
        """Everything for move `number` is there, or not any more."""
        with self._lock:
            if self._move is not None and self._move.number == number:
                self._ready = yes

    def commit(self, number: int, *, failed: int = 0) -> None:
        """This member leaves: from the next agreement on, move `number` is due, whose vote has failed `failed` times.

        If it has failed once more since, another leaver was told first: nothing is due any more.
        """
        with self._lock:
            move = self._move
            if move is not None and move.number == number and move.leaving and failed >= self.failed:
                self._commits = number

    @property
    def committing(self) -> bool:
        """Whether this member has asked, or will ask at the next agreement, for the vote."""
        return self._commits > 0

    def drop(self) -> None:
        """No move is being prepared any more."""
        with self._lock:
            self._move, self._ready, self._commits = None, False, 0
            self._due_plan = self._due_move = 0

    def agreement(self, ballot: Ballot, *, prepared: int, installed: int) -> bool:
        """The agreement of a step; `prepared` and `installed` are numbers of path plans, `ballot` rides along."""
        least = self._least(1, prepared, -installed, -self._commits, *ballot.cast())
        ballot.count(least[4:])
        self._due_plan = self._due_move = 0
        if least:
            self._due_plan = least[1] if least[1] > -least[2] else 0
            self._due_move = -least[3]
            self.close_retired()
        return bool(least)

    def due_plan(self) -> int:
        """The plan to vote about now; asked once. A move that is due goes first."""
        due, self._due_plan = self._due_plan, 0
        return due

    def all_ready(self, ready: bool) -> bool:
        """Votes about a plan."""
        return self._least(int(ready)) == (_READY,)

    def put_off(self) -> None:
        """No vote about a move at this boundary."""
        self._due_move = 0

    def vote(self, *, quiet: Callable[[], bool]) -> MoveVote | None:
        """Votes about the move that is due; None where none is, or where a loss came in between.

        `quiet()` tells whether this member stands still; it is asked only where a move is due.
        """
        number, self._due_move = self._due_move, 0
        if not number:
            return None
        still = quiet()
        with self._lock:
            ready, generation = self._vote_of(number, quiet=still)
        votes = [_NO_VOTE] * len(self._ranks)
        votes[self._ranks.index(self._rank)] = ready
        least = self._least(-generation, *votes)
        if not least:
            return None
        leave = frozenset(rank for rank, vote in zip(self._ranks, least[1:], strict=True) if vote == _LEAVES)
        unready = tuple(rank for rank, vote in zip(self._ranks, least[1:], strict=True) if vote == 0)
        outcome = MoveVote(number, -least[0], leave, unready)
        with self._lock:
            self._commits = 0
            self.failed += int(not outcome.passed)
        return outcome

    def _vote_of(self, number: int, *, quiet: bool) -> tuple[int, int]:
        """This member's vote, and the generation of the move if it is the leaver that has to tell the others."""
        move = self._move if self._move is not None and self._move.number == number else None
        ready = quiet and (move is None or self._ready)
        if move is None or not move.leaving:
            return int(ready), 0
        return (_LEAVES, move.generation) if ready else (0, 0)

    def retire(self, descriptors: Sequence[int]) -> None:
        """Connections to members that left: they are closed when the next agreement has passed."""
        with self._lock:
            self._retired += [descriptor for descriptor in descriptors if descriptor >= 0]

    def close_retired(self) -> None:
        """Close them now."""
        if self._retired:
            with self._lock:
                retired, self._retired = self._retired, []
            for descriptor in retired:
                os.close(descriptor)


def smallest(channel: Channel, values: Sequence[int]) -> tuple[int, ...]:
    """The smallest of each value (32 bits, signed) over the members of the channel's group; empty if the call did not
    end well. In the calling thread."""
    votes = array.array("i", values)
    buffer = (votes.buffer_info()[0], votes.itemsize * len(votes))
    call = Call(
        op=Op.ALL_REDUCE,
        element=Element.INT32,
        reduction=Reduction.MIN,
        inputs=[buffer],
        outputs=[buffer],
        inline=True,
    )
    ticket = channel.submit(call)
    status = channel.plane.wait(ticket)
    channel.plane.release(ticket)
    return tuple(votes) if status is Status.DONE else ()
