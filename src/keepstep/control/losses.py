"""Members that leave without leave: exits, freezes, broken links, processes that never start."""

from __future__ import annotations

from keepstep.control.exits import ExitKind, classify_exit, exit_code_of
from keepstep.control.job_state import Change, Event, Loss
from keepstep.control.outcome import restart_or_end
from keepstep.control.roster import Member, Status, live
from keepstep.control.starting import start_standby
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.messages import (
    Abort,
    Fence,
    MemberExited,
    MemberStopped,
    PeerLostReport,
    StartFailed,
)

__all__ = ["on_exited", "on_peer_lost", "on_start_failed", "on_stopped", "on_tick"]

FENCE_GRACE_S = 30.0
LINK_PATIENCE_S = 1.0


def on_exited(turn: Turn, event: Event) -> None:
    """A process is gone: nobody's problem, the user's, or a fault to repair."""
    fact = event.fact
    assert isinstance(fact, MemberExited)
    member = turn.state.members.get(fact.member)
    if member is None or member.status is Status.GONE:
        return
    before = member.status
    member = turn.put(member, status=Status.GONE)
    if before is Status.FENCED or turn.state.phase in ("ending", "restarting"):
        return
    if member.rank < 0:
        _standby_exited(turn, member, fact)
        return
    kind = classify_exit(
        rank=member.rank, code=fact.code, signal=fact.signal, version=turn.state.version, past=turn.state.past
    )
    if kind is ExitKind.DONE:
        _rank_done(turn, member)
    elif not fact.protected:
        restart_or_end(turn, _obituary(member, fact), exit_code_of(fact.code, fact.signal))
    elif kind is ExitKind.USER_ERROR:
        why = f"{_obituary(member, fact)}: an error of the script, no member is replaced"
        turn.end(exit_code_of(fact.code, fact.signal), why)
    elif before in (Status.STARTING, Status.CONNECTED) or _initial(turn):
        restart_or_end(turn, f"{_obituary(member, fact)} before the first step", exit_code_of(fact.code, fact.signal))
    elif before is Status.FINISHED:
        turn.end(exit_code_of(fact.code, fact.signal), f"{_obituary(member, fact)} after its last step")
    else:
        loss = Loss(member.rank, member.name, member.node, "crash", fact.signal, fact.onset, turn.now)
        begin_change(turn, (loss,), private={member.rank: fact.private}, why=_obituary(member, fact))
        turn.mark("fenced")


def _initial(turn: Turn) -> bool:
    return turn.state.change is not None and turn.state.change.initial


def _obituary(member: Member, fact: MemberExited) -> str:
    how = f"was ended by signal {fact.signal}" if fact.signal else f"exited with code {fact.code}"
    return f"rank {member.rank} ({member.name} on {member.node}) {how}"


def _rank_done(turn: Turn, member: Member) -> None:
    turn.let(done_ranks=turn.state.done_ranks | {member.rank})
    if len(turn.state.done_ranks) == turn.state.spec.world:
        turn.end(0, "all ranks are done")


def _standby_exited(turn: Turn, member: Member, fact: MemberExited) -> None:
    turn.let(broken_standbys=turn.state.broken_standbys + 1)
    how = f"signal {fact.signal}" if fact.signal else f"code {fact.code}"
    turn.because(f"standby {member.name} on {member.node} ended ({how}); the job runs on with one standby less")
    if fact.signal and turn.state.broken_standbys < 3 and turn.state.change is None:
        start_standby(turn, member.node, "a new standby in place of the lost one")
    elif turn.state.change is not None and turn.state.broken_standbys >= 3:
        turn.end(75, "three processes that should take a lost rank ended before they could: see their logs")


def on_start_failed(turn: Turn, event: Event) -> None:
    """An agent could not start a process."""
    fact = event.fact
    assert isinstance(fact, StartFailed)
    member = turn.state.members.get(fact.member)
    if member is None:
        return
    turn.put(member, status=Status.GONE)
    if member.rank >= 0:
        turn.end(69, f"rank {member.rank} could not be started on {member.node}: {fact.why}")
    else:
        turn.let(broken_standbys=turn.state.broken_standbys + 1)
        turn.because(f"standby {member.name} could not be started on {member.node}: {fact.why}")


def on_stopped(turn: Turn, event: Event) -> None:
    """A process is frozen: fence it by generation; if it wakes up it is told to go."""
    fact = event.fact
    assert isinstance(fact, MemberStopped)
    member = turn.state.members.get(fact.member)
    if member is None or member.status in (Status.GONE, Status.FENCED) or turn.state.exit_code is not None:
        return
    why = f"rank {member.rank} ({member.name} on {member.node}) is frozen"
    if member.rank < 0:
        turn.put(member, status=Status.FENCED)
        turn.kill(member, f"standby {member.name} is frozen", grace_s=GRACE_S)
        return
    if member.status in (Status.STARTING, Status.CONNECTED) or _initial(turn):
        restart_or_end(turn, f"{why} before the first step")
        return
    _fence(turn, member, why)
    loss = Loss(member.rank, member.name, member.node, "noncommunication_hang", 19, fact.onset, turn.now)
    begin_change(turn, (loss,), private={member.rank: fact.private}, why=why)
    turn.mark("fenced")


def _fence(turn: Turn, member: Member, why: str) -> None:
    turn.put(member, status=Status.FENCED)
    turn.tell(member, Fence(turn.state.epoch, f"{why}; its rank is given to another member"), why)
    turn.kill(member, why, grace_s=FENCE_GRACE_S)


def begin_change(turn: Turn, lost: tuple[Loss, ...], *, private: dict[int, dict[int, bytes]], why: str) -> None:
    """Start a change, or start it again with one more loss: the generation grows, every stayer is told to stop."""
    old = turn.state.change
    generation = (old.generation if old is not None else turn.state.generation) + 1
    known = {} if old is None or old.going else old.private
    earlier = () if old is None else old.lost
    change = Change(
        generation=generation,
        began=turn.now if old is None else old.began,
        lost=(*earlier, *lost),
        marks={} if old is None else old.marks,
        reached=-1 if old is None else old.reached,
        private={**known, **private},
        bytes_moved=0 if old is None else old.bytes_moved,
    )
    turn.let(change=change, phase="changing", suspected={})
    turn.mark("detected")
    turn.mark("decided")
    turn.because(why)
    ranks = tuple(loss.rank for loss in change.lost)
    for member in live(turn.state.members):
        if not member.joiner:
            if member.status is not Status.FINISHED:
                turn.put(member, status=Status.RUNNING)
            turn.tell(member, Abort(turn.state.epoch, generation, ranks), why)


def on_peer_lost(turn: Turn, event: Event) -> None:
    """A link broke. Normally the agent reports the death behind it at once; else the links are made anew."""
    fact = event.fact
    assert isinstance(fact, PeerLostReport)
    change = turn.state.change
    generation = turn.state.generation if change is None or not change.going else change.generation
    if fact.generation != generation or turn.state.exit_code is not None:
        return
    if fact.rank not in turn.state.suspected:
        turn.let(suspected={**turn.state.suspected, fact.rank: turn.now})


def on_tick(turn: Turn, event: Event) -> None:
    """Time passes: broken links without a death, members that do not answer."""
    state = turn.state
    if state.exit_code is not None or state.phase not in ("running", "changing"):
        return
    due = {rank for rank, since in state.suspected.items() if turn.now - since >= LINK_PATIENCE_S}
    if due:
        turn.let(suspected={r: t for r, t in state.suspected.items() if r not in due})
        if state.change is None or state.change.going:
            begin_change(turn, (), private={}, why=f"links to ranks {sorted(due)} broke, their processes live")
    change = turn.state.change
    if change is not None and not change.going and turn.now - change.began > state.spec.patience_s:
        late = [m.rank for m in live(state.members) if not m.joiner and m.answered != change.generation]
        turn.end(75, f"ranks {late or 'that join'} did not answer within {state.spec.patience_s:.0f} s of a change")
