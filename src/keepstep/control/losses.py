"""Members that leave without leave: exits, freezes, broken links, processes that never start."""

from __future__ import annotations

import msgspec

from keepstep.control.answers import speaker
from keepstep.control.beginning import begin_change
from keepstep.control.capacity import stop_when_short
from keepstep.control.exclusion import exclude_node
from keepstep.control.exits import SELF_INFLICTED, ExitKind, classify_exit, exit_code_of
from keepstep.control.job_state import Event, Loss
from keepstep.control.move_losses import claimant, drop_silent_joiners, end_leavers, lost_to_move, move_overdue
from keepstep.control.outcome import BROKEN_STANDBYS, end_job, note_lost, restart_or_end
from keepstep.control.roster import Member, Status, live
from keepstep.control.starting import start_standby
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.messages import Fence, MemberExited, MemberStopped, PeerLostReport, StartFailed
from keepstep.records.watch_messages import MemberHung, MemberSlow, MismatchSaid

__all__ = [
    "on_exited",
    "on_hung",
    "on_mismatch",
    "on_peer_lost",
    "on_slow",
    "on_start_failed",
    "on_stopped",
    "on_tick",
]

_FENCE_GRACE_S = 30.0
_LINK_PATIENCE_S = 1.0
_LEAVE_PATIENCE_S = 60.0
_SIGSTOP = 19
_SIGKILL = 9

# ---------------------------------------------------------------- a process is gone


def on_exited(turn: Turn, event: Event) -> None:
    """A process is gone: nobody's problem, the user's, or a fault to repair."""
    fact = event.fact
    assert isinstance(fact, MemberExited)
    member = turn.state.members.get(fact.member)
    if member is None or member.status is Status.GONE:
        return
    turn.put(member, status=Status.GONE)
    if member.status is Status.FENCED:
        _add_private(turn, fact, member=member)
    if turn.state.phase in ("ending", "restarting") or member.status is Status.FENCED:
        return
    kind = classify_exit(fact.code, fact.signal)
    how = f"ended ({f'signal {fact.signal}' if fact.signal else f'code {fact.code}'})"
    if lost_to_move(turn, member, how=how, done=kind is ExitKind.DONE):
        return
    member = claimant(member)
    if member.rank < 0:
        _standby_lost(turn, member, how=how, again=bool(fact.signal) or member.warming)
        return
    if member.moving and kind is ExitKind.DONE:
        _rank_done(turn, member)
    elif member.joiner:
        _lose(turn, fact, member=member, why=f"{_obituary(member, fact)} before it was a member")
    elif kind is ExitKind.DONE:
        _rank_done(turn, member)
    elif turn.state.disagreed >= 0 and (not fact.signal or fact.signal in SELF_INFLICTED):
        says = f"rank {turn.state.disagreed} says that collectives do not match"
        why = f"{_obituary(member, fact)}, and {says}: a new start would come to the same place"
        end_job(turn, exit_code_of(fact.code, fact.signal), why=why)
    elif not fact.protected or member.status in (Status.STARTING, Status.CONNECTED) or _initial(turn):
        _exit_at_start(turn, fact, member=member)
    elif kind is ExitKind.USER_ERROR and (member.error or not _stopping(turn)):
        what = f" after {member.error}" if member.error else ""
        why = f"{_obituary(member, fact)}{what}: an error of the script, no member is replaced"
        end_job(turn, exit_code_of(fact.code, fact.signal), why=why)
    else:
        _lose(turn, fact, member=member, why=_obituary(member, fact))


def on_mismatch(turn: Turn, event: Event) -> None:
    """A library in a member says that collectives do not match: what then ends a rank no restart mends."""
    fact = event.fact
    assert isinstance(fact, MismatchSaid)
    member = turn.state.members.get(fact.member)
    if member is not None and member.rank >= 0 and member.status not in (Status.GONE, Status.FENCED):
        turn.let(disagreed=member.rank)


def _add_private(turn: Turn, fact: MemberExited, *, member: Member) -> None:
    """One that was fenced as frozen may have gone on in between (nobody led, say): its last words are the newest."""
    change = turn.state.change
    if change is not None and any(loss.member == member.name for loss in change.lost):
        known = change.private.get(member.rank, {})
        turn.change(private={**change.private, member.rank: {**fact.private, **known}})


def _initial(turn: Turn) -> bool:
    return turn.state.change is not None and turn.state.change.initial


def _stopping(turn: Turn) -> bool:
    """True while members are told to stop: their collectives give unspecified data, and then they run keepstep only.

    Inside a step the step guard discards what comes of that; between steps and in the set-up it may end the script.
    """
    change = turn.state.change
    return change is not None and not change.going


def _obituary(member: Member, fact: MemberExited) -> str:
    how = f"was ended by signal {fact.signal}" if fact.signal else f"exited with code {fact.code}"
    return f"rank {member.rank} ({member.name} on {member.node}) {how}"


def _exit_at_start(turn: Turn, fact: MemberExited, *, member: Member) -> None:
    """Before members could take each other's place, and in scripts without keepstep: all start again."""
    why = _obituary(member, fact)
    code = exit_code_of(fact.code, fact.signal)
    if fact.protected and not fact.signal:
        end_job(turn, code, why=f"{why} before the first step: an error of the script")
        return
    if fact.signal and not fact.protected and classify_exit(fact.code, fact.signal) is ExitKind.FAULT:
        _exclude(turn, member, signal=fact.signal)
    note_lost(turn, (_loss(turn, fact, member=member),))
    restart_or_end(turn, f"{why} before the first step" if fact.protected else why, code=code)


def _exclude(turn: Turn, member: Member, *, signal: int) -> None:
    """Take the node of a suspect out, unless the program does this to itself or no restart is left."""
    if signal not in SELF_INFLICTED and turn.state.attempt < turn.state.spec.max_restarts:
        exclude_node(turn, member.node)


def _rank_done(turn: Turn, member: Member) -> None:
    done = turn.state.done_ranks | {member.rank}
    turn.let(done_ranks=done)
    if len(done) == turn.state.spec.world:
        turn.mark("first_valid_step", again=False)
        end_job(turn, 0, why="all ranks are done")


def _loss(turn: Turn, fact: MemberExited, *, member: Member) -> Loss:
    return Loss(
        rank=member.rank,
        member=member.name,
        node=member.node,
        kind="crash",
        signal=fact.signal,
        code=fact.code,
        onset=fact.onset,
        detected=turn.now,
        joining=member.joiner,
    )


def _lose(turn: Turn, fact: MemberExited, *, member: Member, why: str) -> None:
    private = {} if member.joiner and not member.moving else fact.private
    begin_change(turn, (_loss(turn, fact, member=member),), private={member.rank: private}, why=why)
    turn.mark("fenced", rank=member.rank, again=False)


def _standby_lost(turn: Turn, member: Member, *, how: str, again: bool) -> None:
    """A process without a role is lost: outside a change it is replaced, in a change `reconcile` sees to it."""
    turn.let(broken_standbys=turn.state.broken_standbys + 1)
    turn.because(f"standby {member.name} on {member.node} {how}; the job runs on with one standby less")
    if again and turn.state.broken_standbys < BROKEN_STANDBYS and turn.state.change is None:
        start_standby(turn, member.node, reason="a new standby in place of the lost one")


def on_start_failed(turn: Turn, event: Event) -> None:
    """An agent could not start a process."""
    fact = event.fact
    assert isinstance(fact, StartFailed)
    member = turn.state.members.get(fact.member)
    if member is None or member.status is Status.GONE:
        return
    turn.put(member, status=Status.GONE)
    if turn.state.phase in ("ending", "restarting"):
        return
    if member.rank < 0:
        _standby_lost(turn, member, how=f"could not be started: {fact.why}", again=False)
    else:
        end_job(turn, 69, why=f"rank {member.rank} could not be started on {member.node}: {fact.why}")


# ---------------------------------------------------------------- a process stands still


def on_stopped(turn: Turn, event: Event) -> None:
    """A process is frozen: fence it by generation; if it wakes up it is told to go."""
    fact = event.fact
    assert isinstance(fact, MemberStopped)
    member = turn.state.members.get(fact.member)
    if member is None or member.status in (Status.GONE, Status.FENCED):
        return
    if lost_to_move(turn, member, how="is frozen", done=False):
        turn.kill(turn.put(member, status=Status.FENCED), f"{member.name} is frozen", grace_s=GRACE_S)
        return
    member = claimant(member)
    if member.rank < 0:
        turn.put(member, status=Status.FENCED)
        turn.kill(member, f"standby {member.name} is frozen", grace_s=GRACE_S)
        _standby_lost(turn, member, how="is frozen", again=True)
        return
    why = f"rank {member.rank} ({member.name} on {member.node}) is frozen"
    _stands_still(turn, fact, member=member, signal=_SIGSTOP, why=why)


def on_hung(turn: Turn, event: Event) -> None:
    """A process lives and does nothing, by hard evidence: as a frozen one, its place is given to another."""
    fact = event.fact
    assert isinstance(fact, MemberHung)
    member = turn.state.members.get(fact.member)
    if member is None or member.rank < 0 or member.status in (Status.GONE, Status.FENCED, Status.FINISHED):
        return
    where = f" at {fact.where}" if fact.where else ""
    why = f"rank {member.rank} ({member.name} on {member.node}) hangs{where}"
    _stands_still(turn, fact, member=member, signal=_SIGKILL, why=why)


def on_slow(turn: Turn, event: Event) -> None:
    """A member of a job that knows nothing of keepstep holds the others up: all start again without its node, if they
    can."""
    fact = event.fact
    assert isinstance(fact, MemberSlow)
    member = turn.state.members.get(fact.member)
    if member is None or member.rank < 0 or member.status is not Status.STARTING:
        return
    if turn.state.attempt >= turn.state.spec.max_restarts or not exclude_node(turn, member.node):
        return
    loss = Loss(member.rank, member.name, member.node, "compute_slow", _SIGKILL, 0, turn.now, turn.now)
    note_lost(turn, (loss,))
    restart_or_end(turn, f"rank {member.rank} ({member.name} on {member.node}) is slow: {fact.why}")


def _stands_still(turn: Turn, fact: MemberStopped | MemberHung, *, member: Member, signal: int, why: str) -> None:
    """Fence a member that does nothing, and repair its loss; `signal` stands for it in the exit code."""
    loss = Loss(
        rank=member.rank,
        member=member.name,
        node=member.node,
        kind="noncommunication_hang",
        signal=signal,
        code=0,
        onset=fact.onset or fact.since,
        detected=turn.now,
        joining=member.joiner,
    )
    if member.status in (Status.STARTING, Status.CONNECTED) or _initial(turn):
        if member.status is Status.STARTING:
            _exclude(turn, member, signal=signal)
        else:
            why = f"{why} before the first step"
        note_lost(turn, (loss,))
        restart_or_end(turn, why)
        return
    turn.put(member, status=Status.FENCED)
    turn.tell(member, Fence(turn.state.epoch, f"{why}; its rank is given to another member"), reason=why)
    turn.kill(member, why, grace_s=_FENCE_GRACE_S)
    private = {} if member.joiner and not member.moving else fact.private
    begin_change(turn, (loss,), private={member.rank: private}, why=why)
    turn.mark("fenced", rank=member.rank, again=False)


# ---------------------------------------------------------------- links break


def on_peer_lost(turn: Turn, event: Event) -> None:
    """A link broke. Normally the agent reports the death behind it at once; else the links are made anew."""
    fact = event.fact
    assert isinstance(fact, PeerLostReport)
    change = turn.state.change
    stopping = change is not None and not change.going and not change.initial
    move = turn.state.move
    running = {turn.state.generation} | (
        {move.before, move.generation} if move is not None and move.committing else set()
    )
    member = speaker(turn, event)
    if member is None or stopping or fact.generation not in running:
        return
    if move is not None and member.name in move.committed:  # its links are those of a generation that it has left
        return
    if fact.rank not in turn.state.suspected:
        turn.let(suspected={**turn.state.suspected, fact.rank: turn.now})


# ---------------------------------------------------------------- time passes


def on_tick(turn: Turn, event: Event) -> None:
    """Time passes: broken links without a death, members that do not answer, processes that do not end."""
    state = turn.state
    stop_when_short(turn)
    if state.phase in ("ending", "restarting"):
        _end_when_stuck(turn)
    elif state.phase in ("running", "changing"):
        _end_failing(turn)
        _suspect(turn)
        _look_at_move(turn)
        _lose_patience(turn)


def _look_at_move(turn: Turn) -> None:
    """A move that stands still is cancelled or, after its commit, repaired as a loss of its joiner."""
    end_leavers(turn)
    drop_silent_joiners(turn)
    late = move_overdue(turn)
    if late is not None:
        why = f"{late.name} does not take rank {late.heir_of} in the move"
        fact = MemberStopped(late.name, late.heir_of, turn.now)
        _stands_still(turn, fact, member=claimant(late), signal=_SIGKILL, why=why)


def _end_when_stuck(turn: Turn) -> None:
    """Agents end processes by force; one that does not confirm it is gone itself."""
    if turn.now - turn.state.leaving <= _LEAVE_PATIENCE_S:
        return
    left = sorted(m.name for m in turn.state.members.values() if m.status is not Status.GONE)
    if turn.state.phase == "ending":
        turn.let(members={n: msgspec.structs.replace(m, status=Status.GONE) for n, m in turn.state.members.items()})
        turn.because(f"no agent confirms the end of {left}")
    else:
        end_job(turn, 75, why=f"no agent confirms the end of {left}: no restart is possible")


def _end_failing(turn: Turn) -> None:
    """A script that raised an exception and then does not end holds all others up: end the job for it."""
    for member in live(turn.state.members):
        if member.error and turn.now - member.failed > turn.state.spec.patience_s:
            end_job(turn, 1, why=f"rank {member.rank} raised {member.error} and its process does not end")


def _suspect(turn: Turn) -> None:
    """Act on links that broke without a death. A rank that has left in peace gets the others' patience first."""
    state = turn.state
    if state.exit_code is not None:
        return
    if _initial(turn):
        _give_up_setup(turn)
        return
    failing = {m.rank for m in live(state.members) if m.error}
    due = {r for r, since in state.suspected.items() if turn.now - since >= _LINK_PATIENCE_S and r not in failing}
    left = due & state.done_ranks
    if due - left:
        loss = Loss(-1, "", "", "communication_hang", 0, 0, 0.0, turn.now)
        begin_change(turn, (loss,), private={}, why=f"links to ranks {sorted(due - left)} broke, their processes live")
        return
    waited = {rank for rank in left if turn.now - state.suspected[rank] > state.spec.patience_s}
    if waited:
        end_job(
            turn, 75, why=f"ranks {sorted(waited)} ended with code 0 while others still had steps to make with them"
        )


def _give_up_setup(turn: Turn) -> None:
    """Start again where links broke in the set-up and some member has not come out of it since."""
    state = turn.state
    waiting = [m.rank for m in live(state.members) if m.status is Status.RUNNING]
    if waiting and state.suspected and turn.now - min(state.suspected.values()) > state.spec.patience_s:
        why = f"links to ranks {sorted(state.suspected)} broke in the set-up, and ranks {waiting} do not end theirs"
        restart_or_end(turn, why)


def _lose_patience(turn: Turn) -> None:
    """Send joiners to their sources again that came back without state; end the job if nobody answers any more."""
    change = turn.state.change
    if change is None or change.going or turn.state.short:
        return
    change = turn.change(fetching=change.fetching - change.failed, failed=frozenset())
    patience_s = turn.state.spec.patience_s
    members = live(turn.state.members)
    if change.initial and not change.finding:
        patience_s *= 10
    elif any(m.joiner and not m.ready for m in members):
        patience_s = max(patience_s, 2 * turn.state.setup_s)
    if turn.now - change.moved <= patience_s:
        return
    silent = [m.rank for m in members if not m.joiner and m.answered != change.generation]
    late = silent or [m.rank for m in members if not m.joiner and m.status not in (Status.SETTLED, Status.READY)]
    end_job(turn, 75, why=f"ranks {late or 'that join'} did not answer within {patience_s:.0f} s of a change")
