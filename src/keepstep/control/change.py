"""A membership change, level-triggered: whatever happens, look at who stands where and order what is possible next.

The order of things: fill empty ranks with standbys; stayers park; all come to one version at a step boundary; joiners
take the state of that version from every replica that has the majority's digest; where no live replica is left, they
take mirrors and all return to the newest version that these have; else, or where it is newer, all load the newest
checkpoint that all can load; everybody goes on in the new generation.
"""

from __future__ import annotations

from itertools import repeat

import msgspec

from keepstep.control.capacity import choose_standby, node_for_rank, run_short
from keepstep.control.job_state import Change
from keepstep.control.mirror_sources import (
    keep_to_mirrors,
    mirrored_ranks,
    note_sources,
    place_mirrors,
    seek_mirrors,
    take_mirror,
)
from keepstep.control.move_losses import kept_joiner, settle_claims
from keepstep.control.outcome import (
    BROKEN_STANDBYS,
    close_change,
    end_job,
    judge_losses,
    loss_code,
    newest_version,
    restart_or_end,
)
from keepstep.control.roster import Member, Status, by_rank, free_local_rank, live, standbys
from keepstep.control.sources import Sources, choose_sources, name_diverged
from keepstep.control.starting import start_standby
from keepstep.control.turn import Turn
from keepstep.records.messages import Fetch, Find, Go, Restore, Settle, Welcome

__all__ = ["reconcile", "settle_version"]


def settle_version(parked: list[Member]) -> int:
    """The version all members come to: the highest that a live member has applied or seen agreed.

    A member that saw the agreement of step k pass knows that every member had final gradients of step k, so all can
    roll forward to k + 1; if nobody saw it, nobody has applied it and all redo step k.
    """
    return max(member.version + int(member.agreed) for member in parked)


def reconcile(turn: Turn) -> None:
    """Order whatever the present state of the change allows."""
    change = turn.state.change
    if change is None or turn.state.exit_code is not None:
        return
    if change.going:
        _close_when_stepped(turn, change)
        return
    if _too_late(turn, change) or _spoiled(turn, change):
        return
    settled = settle_claims(turn)
    filled = _fill_ranks(turn)
    if turn.state.change is None or not settled or not _all_settled(turn) or not filled:
        return
    change = _present(turn)
    if change.restore is not None:
        _go_when_restored(turn)
    elif change.finding:
        _restore_when_known(turn)
    else:
        _copy_state(turn)


def _present(turn: Turn) -> Change:
    change = turn.state.change
    assert change is not None
    return change


def _stayers(turn: Turn) -> list[Member]:
    return [] if _present(turn).initial else [m for m in live(turn.state.members) if not m.joiner]


def _joiners(turn: Turn) -> list[Member]:
    initial = _present(turn).initial
    return [m for m in live(turn.state.members) if m.joiner or initial]


# ---------------------------------------------------------------- who takes part


def _too_late(turn: Turn, change: Change) -> bool:
    """True, and the job ends, if some rank has left its last step: its script goes on and will not stop again."""
    finished = {m.rank for m in live(turn.state.members) if m.status is Status.FINISHED} | turn.state.done_ranks
    if not finished:
        return False
    ranks = sorted({loss.rank for loss in change.lost if loss.rank >= 0})
    what = f"ranks {ranks} were lost" if ranks else "a change is needed"
    end_job(turn, loss_code(change), why=f"{what} when ranks {sorted(finished)} had made their last step")
    return True


def _spoiled(turn: Turn, change: Change) -> bool:
    """True, and all start again, if links broke in the set-up and there is no checkpoint to take its place."""
    if not change.initial or change.restore != -1 or not turn.state.suspected:
        return False
    restart_or_end(turn, f"links to ranks {sorted(turn.state.suspected)} broke before the first step")
    return True


def _fill_ranks(turn: Turn) -> bool:
    """Give every empty rank to a standby; True if no rank is empty."""
    taken = by_rank(turn.state.members)
    claimed = () if turn.state.move is None else turn.state.move.ranks
    empty = [rank for rank in range(turn.state.spec.world) if rank not in taken and rank not in claimed]
    for rank in list(empty):
        kept = kept_joiner(turn, rank)
        if kept is not None:
            _adopt(turn, kept)
            empty.remove(rank)
            continue
        standby = choose_standby(turn, rank)
        if standby is not None:
            _promote(turn, standby, rank=rank)
            empty.remove(rank)
    on_the_way = len(standbys(turn.state.members, Status.STARTING))
    for rank in empty[on_the_way:]:
        if turn.state.broken_standbys >= BROKEN_STANDBYS:
            why = f"{BROKEN_STANDBYS} processes that should take rank {rank} ended before they could: see their logs"
            end_job(turn, 75, why=why)
            return False
        node = node_for_rank(turn, rank)
        if not node:
            run_short(turn, tuple(empty))
            return False
        start_standby(turn, node, reason=f"no standby is left for rank {rank}: a fresh process is started")
    if not empty:
        turn.let(short=0.0)
    return not empty


def _promote(turn: Turn, standby: Member, *, rank: int) -> None:
    state = turn.state
    change = _present(turn)
    turn.mark("standby_chosen", rank=rank)
    if state.short:
        _note(turn, rank, note=f"no machine was left; {turn.now - state.short:.1f} s until one joined")
    elif standby.started >= min((loss.detected for loss in change.lost if loss.rank == rank), default=turn.now):
        _note(turn, rank, note=f"no standby was left; a fresh process took {turn.now - standby.started:.1f} s to start")
    local_rank = free_local_rank(state.members, standby.node)
    joiner = turn.put(standby, rank=rank, local_rank=local_rank, status=Status.JOINING, joiner=True)
    order = Welcome(
        epoch=state.epoch,
        rank=rank,
        world=state.spec.world,
        local_rank=local_rank,
        generation=change.generation,
        attempt=state.attempt,
        joiner=True,
        roster=turn.addresses(),
        secret=state.spec.secret,
    )
    turn.tell(joiner, order, reason=f"standby {joiner.name} takes rank {rank}")


def _adopt(turn: Turn, joiner: Member) -> None:
    """A process that a move had warmed up for a rank takes it, now that the rank is lost."""
    turn.mark("standby_chosen", rank=joiner.heir_of)
    if joiner.ready:
        turn.mark("warmed", rank=joiner.heir_of)
    status = Status.READY if joiner.ready else Status.JOINING
    turn.put(joiner, rank=joiner.heir_of, heir_of=-1, moving=0, joiner=True, status=status)
    turn.because(f"{joiner.name}, which was to join, takes rank {joiner.heir_of}")


def _note(turn: Turn, rank: int, *, note: str) -> None:
    replace = msgspec.structs.replace
    turn.change(lost=tuple(replace(loss, note=note) if loss.rank == rank else loss for loss in _present(turn).lost))
    turn.because(note)


# ---------------------------------------------------------------- one version


def _all_settled(turn: Turn) -> bool:
    """Settle the stayers once all have parked; True when they all stand at the boundary (or there are none)."""
    change = _present(turn)
    stayers = _stayers(turn)
    if any(m.answered != change.generation for m in stayers):
        return False
    if stayers and change.version < 0:
        early = [m.rank for m in stayers if m.version < 0]
        if early:
            restart_or_end(turn, f"the loss interrupted the set-up of ranks {early}", code=loss_code(change))
            return False
        version = settle_version(stayers)
        turn.let(version=version)
        change = turn.change(version=version, reached=max(change.reached, version))
        if not _judged(turn, version):
            return False
        for member in stayers:
            turn.tell(member, Settle(turn.state.epoch, change.generation, version), reason=f"come to version {version}")
    return all(m.status is Status.SETTLED for m in stayers)


def _judged(turn: Turn, version: int) -> bool:
    """Now that the version is known: False if the losses are the script's own fault, and the job ends."""
    replace = msgspec.structs.replace
    lost = _present(turn).lost
    turn.change(lost=tuple(replace(loss, version=version) if loss.version < 0 else loss for loss in lost))
    return judge_losses(turn)


# ---------------------------------------------------------------- state for the joiners


def _copy_state(turn: Turn) -> None:
    """Send joiners to their sources; go when all have the state."""
    change = _present(turn)
    joiners = _joiners(turn)
    if any(m.status not in (Status.READY, Status.FETCHED) for m in joiners):
        return
    if change.initial:
        _find(turn, "looking for the checkpoint to start from")
        return
    name_diverged(turn, _stayers(turn))
    choices = {joiner.name: choose_sources(_stayers(turn), joiner) for joiner in joiners}
    why = _lacking(turn, joiners, choices=choices)
    if why and not seek_mirrors(turn, joiners, why=why):
        _find(turn, f"{why}: looking for a checkpoint")
        return
    if why and (_lacking(turn, joiners, choices=choices) or not _all_settled(turn)):
        return
    for joiner in joiners:
        _fetch_once(turn, joiner, choice=choices[joiner.name])
    if all(j.status is Status.FETCHED for j in _joiners(turn)):
        _go(turn)


def _lacking(turn: Turn, joiners: list[Member], *, choices: dict[str, Sources]) -> str:
    """What no live member has and no chosen mirror gives; empty if the joiners can have all they need."""
    change = _present(turn)
    mirrored = mirrored_ranks(change)
    if not all(choices[joiner.name].ranks or joiner.rank in mirrored for joiner in joiners):
        return "no live replica of the lost state is left"
    needy = [j.rank for j in joiners if change.version > 0 and not _private(change, j) and j.rank not in mirrored]
    if needy and not change.blind:
        return f"the random state and data position of ranks {needy} are lost"
    return ""


def _private(change: Change, joiner: Member) -> bytes:
    return change.private.get(joiner.rank, {}).get(change.version, b"")


def _fetch_once(turn: Turn, joiner: Member, *, choice: Sources) -> None:
    """Order a joiner to take the state, unless it holds it or is on its way."""
    change = _present(turn)
    digest = mirrored_ranks(change).get(joiner.rank, choice.digest)
    if joiner.status is Status.FETCHED and (joiner.version, joiner.digest) == (change.version, digest):
        return
    if joiner.name in change.fetching:
        return
    change = turn.change(fetching=change.fetching | {joiner.name})
    turn.put(joiner, status=Status.READY)
    turn.mark("connected", rank=joiner.rank)
    if joiner.rank in mirrored_ranks(change):
        take_mirror(turn, joiner, private=_private(change, joiner))
        return
    order = Fetch(
        epoch=turn.state.epoch,
        generation=change.generation,
        version=change.version,
        digest=choice.digest,
        sources=choice.ranks,
        roster=turn.addresses(),
        private=_private(change, joiner),
    )
    turn.tell(joiner, order, reason=f"take the state of version {change.version} from ranks {list(choice.ranks)}")


def _find(turn: Turn, why: str) -> None:
    change = turn.change(finding=True)
    for member in live(turn.state.members):
        turn.put(member, checkpoints=None)
        turn.tell(member, Find(turn.state.epoch, change.generation), reason=why)
    turn.because(why)


def _restore_when_known(turn: Turn) -> None:
    members = live(turn.state.members)
    change = _present(turn)
    if any(m.checkpoints is None for m in members):
        return
    common = _common_steps(turn, members)
    version = max(common, default=-1)
    if keep_to_mirrors(turn, _joiners(turn), loadable=version):
        _copy_state(turn)
        return
    if not common and not change.initial:
        _without_checkpoint(turn)
        return
    change = turn.change(restore=version, version=max(version, 0), reached=newest_version(turn.state))
    turn.let(version=max(version, 0))
    if _spoiled(turn, change) or not _judged(turn, max(version, 0)):
        return
    why = (
        f"all load the checkpoint of step {version}" if version >= 0 else "no checkpoint yet: start from the beginning"
    )
    turn.because(why)
    turn.mark("connected")
    for member in members:
        turn.put(member, status=Status.PARKED)
        turn.tell(member, Restore(turn.state.epoch, change.generation, version), reason=why)


def _common_steps(turn: Turn, members: list[Member]) -> set[int]:
    """The steps that all could load, of which all parts were written in one generation of one job."""
    found = [dict(zip(m.checkpoints or (), m.written_in or repeat(""), strict=False)) for m in members]
    steps = set.intersection(*map(set, found))
    mixed = {step for step in steps if len({one[step] for one in found}) > 1}
    for step in sorted(mixed):
        turn.because(f"step {step} is passed over: its parts were not written in one generation")
    return steps - mixed


def _without_checkpoint(turn: Turn) -> None:
    """No checkpoint that all can load: copy what can be copied, else begin again."""
    stayers = _stayers(turn)
    if not all(choose_sources(stayers, joiner).ranks for joiner in _joiners(turn)):
        why = "no live replica and no valid checkpoint that all members can load is left"
        restart_or_end(turn, why, code=loss_code(_present(turn)))
        return
    for joiner in _joiners(turn):
        if not _private(_present(turn), joiner):
            _note(
                turn, joiner.rank, note=f"rank {joiner.rank} goes on with the random state and data of a fresh process"
            )
    turn.change(blind=True, finding=False)
    _copy_state(turn)


def _go_when_restored(turn: Turn) -> None:
    if all(m.status is Status.SETTLED for m in live(turn.state.members)):
        _go(turn)


# ---------------------------------------------------------------- on again


def _go(turn: Turn) -> None:
    change = _present(turn)
    unprepared = [j.rank for j in _joiners(turn) if j.unprepared and not change.initial]
    change = turn.change(going=True, anew=change.anew or bool(unprepared))
    if unprepared:
        turn.because(f"ranks {unprepared} have prepared no pipeline schedule: all prepare theirs anew")
    for joiner in _joiners(turn):
        turn.mark("copied", rank=joiner.rank)
    turn.mark("joined")
    note_sources(turn)
    place_mirrors(turn, change.generation)
    roster = turn.addresses()
    replicas = {member.rank: member.replica for member in live(turn.state.members)}
    for member in live(turn.state.members):
        running = turn.put(member, status=Status.RUNNING, joiner=False, unprepared=False)
        order = Go(turn.state.epoch, change.generation, change.version, roster, replicas, change.anew)
        turn.tell(running, order, reason=f"run on from version {change.version} in generation {change.generation}")
    turn.let(generation=change.generation, suspected={})
    if change.initial:
        turn.let(change=None)


def _close_when_stepped(turn: Turn, change: Change) -> None:
    """Close the incident when every member has completed its first step in the new generation."""
    missing = [m for m in live(turn.state.members) if m.name not in change.first_steps]
    if all(m.status is Status.FINISHED for m in missing):
        close_change(turn)
