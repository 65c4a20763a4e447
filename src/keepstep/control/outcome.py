"""How things end: an incident that is closed, a replica that differs, a job that restarts or ends."""

from __future__ import annotations

import hashlib

import msgspec

from keepstep.control.exits import PastFailure, exit_code_of, repeats
from keepstep.control.job_state import Change, JobState, Loss
from keepstep.control.move_ends import drop_move
from keepstep.control.roster import Member, Status
from keepstep.control.starting import refill_standbys
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.events import PHASES, Finding, Incident, Suspect
from keepstep.records.messages import Stop

__all__ = [
    "BROKEN_STANDBYS",
    "close_change",
    "divergence_finding",
    "end_job",
    "failure_of",
    "final_weights",
    "judge_losses",
    "loss_code",
    "newest_version",
    "note_lost",
    "restart_or_end",
]

BROKEN_STANDBYS = 3
"""So many processes without a role that end before they are of use are tried, then it is not by chance."""
_PAST = 200
_TROUBLED = 20
_TEMPORARY_FAILURE = 75


def divergence_finding(turn: Turn, member: Member) -> Finding:
    """A replica whose digest differs from the others'."""
    return Finding(
        kind="state_divergence",
        job=turn.state.spec.job,
        generation=turn.state.generation,
        step=member.version,
        rank=member.rank,
        node=member.node,
        wall=turn.now,
        suspects=((Suspect(rank=member.rank),),),
        evidence=(f"digest {member.digest} at version {member.version} differs from its replicas",),
    )


def failure_of(loss: Loss) -> PastFailure:
    """What is remembered of a loss."""
    return PastFailure(loss.rank, loss.signal, loss.code, loss.version, loss.joining)


def loss_code(change: Change) -> int:
    """The exit code of a job that a change could not save: that of its first loss."""
    members = [loss for loss in change.lost if loss.rank >= 0]
    return exit_code_of(members[0].code, members[0].signal) if members else _TEMPORARY_FAILURE


def final_weights(state: JobState) -> str:
    """The hash of the final weights: the one of all ranks, or of their hashes in the order of ranks where these differ;
    empty: unknown."""
    told = {member.rank: member.weights_sha256 for member in state.members.values() if member.weights_sha256}
    if len(set(told.values())) < 2:
        return next(iter(told.values()), "")
    if len(told) < state.spec.world:
        return ""
    return hashlib.sha256("".join(told[rank] for rank in sorted(told)).encode()).hexdigest()


def judge_losses(turn: Turn) -> bool:
    """False, and the job ends, if a loss of this change is the same as before: the program's own fault.

    To be asked when the version that the losses fell on is known.
    """
    change = turn.state.change
    assert change is not None
    past = turn.state.past
    for loss in change.lost:
        failure = failure_of(loss)
        if loss.rank >= 0 and repeats(failure, past):
            how = f"signal {loss.signal}" if loss.signal else f"exit code {loss.code}"
            why = f"rank {loss.rank} ended by {how} at step {loss.version} again: an error of the script"
            end_job(turn, exit_code_of(loss.code, loss.signal), why=why)
            return False
        past = (*past, failure)
    return True


def close_change(turn: Turn) -> None:
    """Every member is through its first step: the incidents are complete, and standbys are replaced."""
    change = turn.state.change
    assert change is not None
    turn.mark("first_valid_step")
    _write_incidents(turn)
    turn.let(phase="running", version=max(turn.state.version, change.version))
    turn.because(f"incident closed: all members completed a step in generation {change.generation}")
    turn.let(broken_standbys=0, members=_remembered(turn.state))
    refill_standbys(turn, reason="a new standby in place of the one that joined")


def _remembered(state: JobState) -> dict[str, Member]:
    """All members but those that are gone and left nothing to tell."""
    return {name: m for name, m in state.members.items() if m.status is not Status.GONE or m.weights_sha256}


def _write_incidents(turn: Turn, note: str = "", *, whole: bool = False) -> None:
    """One incident for every loss of the change that is on its way, which ends with it; `whole`: all ranks restart."""
    change = turn.state.change
    for losses in () if change is None else _together(change.lost):
        assert change is not None
        turn.let(incidents=turn.state.incidents + 1)
        incident = _incident(turn, losses, change=change, note=note)
        if whole:
            lost, world = newest_version(turn.state), turn.state.spec.world
            incident = msgspec.structs.replace(incident, steps_recomputed=lost, members_changed=world)
        turn.incidents.append(incident)
        ranked = [failure_of(loss) for loss in losses if loss.rank >= 0]
        if ranked:
            troubled = (*turn.state.troubled, losses[0].node)[-_TROUBLED:]
            turn.let(past=(*turn.state.past, *ranked)[-_PAST:], troubled=troubled)
    turn.let(change=None)


def _together(lost: tuple[Loss, ...]) -> list[tuple[Loss, ...]]:
    """The losses by incident: those that happened as one are one."""
    groups: dict[str, list[Loss]] = {}
    for number, loss in enumerate(lost):
        groups.setdefault(loss.together or f"#{number}", []).append(loss)
    return [tuple(group) for group in groups.values()]


def _incident(turn: Turn, losses: tuple[Loss, ...], *, change: Change, note: str) -> Incident:
    """The recovery as seconds from the onset; a phase of several losses is reached when it is for the last of them."""
    loss = losses[0]
    several = len(losses) > 1
    onset = min(one.onset or one.detected for one in losses)
    onset = min(onset, *(one.detected for one in losses))
    marks = {name: max(one.marks.get(name, 0.0) for one in losses) for name in loss.marks}
    reached = {name: round(at - onset, 6) for name, at in marks.items() if name in PHASES}
    notes = dict.fromkeys((*(one.note for one in losses), note))
    return Incident(
        kind=loss.kind,
        number=turn.state.incidents,
        job=turn.state.spec.job,
        attempt=turn.state.attempt,
        generation=change.generation,
        step=change.version if change.version >= 0 else turn.state.version,
        rank=loss.rank if loss.rank >= 0 and not several else None,
        ranks=tuple(one.rank for one in losses) if several else (),
        domain=loss.together,
        node=loss.node or None,
        member=loss.member if loss.member and not several else None,
        wall=turn.now,
        onset_wall=onset,
        detected=reached.get("detected"),
        decided=reached.get("decided"),
        fenced=reached.get("fenced"),
        standby_chosen=reached.get("standby_chosen"),
        warmed=reached.get("warmed"),
        connected=reached.get("connected"),
        copied=reached.get("copied"),
        joined=reached.get("joined"),
        first_valid_step=reached.get("first_valid_step"),
        steps_recomputed=max(0, change.reached - change.version) if change.version >= 0 else 0,
        bytes_moved=change.bytes_moved,
        members_changed=sum(1 for lost in change.lost if lost.rank >= 0),
        note="; ".join(text for text in notes if text),
        source=loss.source,
    )


def note_lost(turn: Turn, losses: tuple[Loss, ...]) -> None:
    """Keep losses that no membership change repairs, so that each still becomes an incident when the attempt ends."""
    change = turn.state.change
    if change is None:
        turn.let(change=Change(generation=turn.state.generation, moved=turn.now, lost=losses))
    else:
        turn.change(lost=(*change.lost, *losses))
    turn.mark("detected", again=False)
    turn.mark("decided", again=False)


def restart_or_end(turn: Turn, why: str, *, code: int = _TEMPORARY_FAILURE) -> None:
    """End all ranks and start a new attempt, if one is left; else end the job with `code`."""
    state = turn.state
    if state.attempt >= state.spec.max_restarts:
        end_job(turn, code, why=f"{why}; no restart is left (--max-restarts {state.spec.max_restarts})")
        return
    turn.because(f"{why}: restart {state.attempt + 1} of {state.spec.max_restarts}")
    drop_move(turn, "all start again")
    generation = turn.state.newest_generation + 1
    _write_incidents(turn, note=_restart_note(state), whole=True)
    turn.let(phase="restarting", generation=generation, suspected={}, leaving=turn.now)
    for member in state.members.values():
        if max(member.rank, member.heir_of) >= 0 and member.status is not Status.GONE:
            turn.kill(member, why, grace_s=GRACE_S)


def newest_version(state: JobState) -> int:
    """The kept steps as far as known: by what members answered and what the lost ones published."""
    change = state.change
    published = (v for versions in change.private.values() for v in versions) if change is not None else ()
    answered = (member.version for member in state.members.values())
    return max(0, state.version, -1 if change is None else change.reached, *published, *answered)


def _restart_note(state: JobState) -> str:
    known = newest_version(state)
    note = f"restart {state.attempt + 1} of {state.spec.max_restarts}"
    return f"{note}; up to {known} known steps are done again, fewer if a checkpoint is found" if known else note


def end_job(turn: Turn, code: int, *, why: str) -> None:
    """End the job with `code`; members are told and then ended by their agents."""
    if turn.state.exit_code is not None:
        return
    turn.because(why)
    drop_move(turn, "the job ended")
    _write_incidents(turn, note=f"the job ended: {why}" if code else "")
    turn.let(exit_code=code, exit_why=why, phase="ending", leaving=turn.now, suspected={})
    for member in turn.state.members.values():
        if member.status is not Status.GONE:
            if member.address is not None:
                turn.tell(member, Stop(turn.state.epoch, code, why), reason=why)
            turn.kill(member, why, grace_s=GRACE_S)
