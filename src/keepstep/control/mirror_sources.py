"""Mirrors in a change: which version all can come to with them, who takes which one, and who holds whose. Pure.

For a rank without a live replica the newest mirror counts that a live stayer holds whole, unless a checkpoint is newer.
All stayers must be able to stand at its version: they do already, or they have a copy of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.control.domains import mirror_holders
from keepstep.control.job_state import Change, Event, Loss, MirrorSearch
from keepstep.control.roster import Member, Status, live
from keepstep.control.sources import choose_sources
from keepstep.control.turn import Turn
from keepstep.records.mirror_messages import AskMirrors, HeldMirror, Mirrors, PlaceMirror, Return, TakeMirror

__all__ = [
    "choose_mirrors",
    "keep_to_mirrors",
    "mirrored_ranks",
    "note_sources",
    "on_mirrors",
    "place_mirrors",
    "refuse_mirror",
    "seek_mirrors",
    "take_mirror",
]


# ---------------------------------------------------------------- who holds whose


def place_mirrors(turn: Turn, generation: int, *, heirs: Sequence[Member] = ()) -> None:
    """Tell every member who holds its mirror in `generation`; or only the `heirs` that will have their ranks then."""
    told = {member.heir_of: member for member in heirs}
    members = {m.rank: told.get(m.rank, m) for m in live(turn.state.members) if m.address is not None}
    by_node: dict[str, list[int]] = {}
    for rank, member in members.items():
        by_node.setdefault(member.node, []).append(rank)
    holders = mirror_holders(by_node, turn.state.domains)
    for rank, member in (told or members).items():
        order = PlaceMirror(turn.state.epoch, generation, holders.get(rank, -1))
        turn.tell(member, order, reason="mirrors are placed")


# ---------------------------------------------------------------- the search


def seek_mirrors(turn: Turn, joiners: list[Member], *, why: str) -> bool:
    """Ask for mirrors, wait for the answers, have all return to the version chosen. False if there is none that fits,
    or a checkpoint may be newer.

    `why` says what is lacking. To be called until it has led to a version at which nothing is lacking.
    """
    change = _present(turn)
    stayers = [m for m in live(turn.state.members) if not m.joiner]
    search = change.search
    if search is None:
        turn.change(search=MirrorSearch())
        order = AskMirrors(turn.state.epoch, change.generation, tuple(j.rank for j in joiners))
        for member in stayers:
            turn.tell(member, order, reason=f"{why}: looking for mirrors")
        return bool(stayers)
    if search.over or not stayers:
        return False
    if any(member.name not in search.answers for member in stayers):
        return True
    found = choose_mirrors(stayers, joiners, change=change)
    if found is None:
        turn.change(search=msgspec.structs.replace(search, over=True, chosen={}))
        turn.because(_why_none(search, joiners))
        return False
    newest = _newest_checkpoint(stayers, search)
    if found[0] < newest:
        turn.change(search=msgspec.structs.replace(search, chosen={}))
        turn.because(f"the newest mirrors are of version {found[0]}, there may be a checkpoint of step {newest}")
        return False
    _return_to(turn, stayers, version=found[0], chosen=found[1])
    return True


def keep_to_mirrors(turn: Turn, joiners: list[Member], *, loadable: int) -> bool:
    """All have said what they can load, `loadable` is the newest step: True, and no checkpoint is looked for any more,
    if the mirrors that were passed over for it are not older."""
    change = _present(turn)
    search = change.search
    stayers = [m for m in live(turn.state.members) if not m.joiner]
    if search is None or search.over or not stayers:
        return False
    found = choose_mirrors(stayers, joiners, change=change)
    if found is None or found[0] < loadable:
        return False
    turn.change(search=msgspec.structs.replace(search, loadable=loadable), finding=False)
    turn.because(f"no checkpoint that all can load is newer than the mirrors of version {found[0]}")
    return True


def _newest_checkpoint(stayers: Sequence[Member], search: MirrorSearch) -> int:
    """The newest step that all can load; before they were asked for it, the newest whose parts the stayers wrote."""
    if search.loadable is not None:
        return search.loadable
    return min(search.answers[member.name].checkpoint for member in stayers)


def _why_none(search: MirrorSearch, joiners: list[Member]) -> str:
    """Why no version can be had with mirrors, in one line."""
    keys = {joiner.rank: joiner.replica for joiner in joiners}
    held = [one for answer in search.answers.values() for one in answer.held if one.rank in keys]
    others = {one.rank for one in held} - {one.rank for one in held if keys[one.rank] == one.replica}
    if others:
        return f"mirrors of ranks {sorted(others)} are of another layout and are refused"
    if held:
        return "no version is held of every lost rank that all stayers can return to"
    return "nobody holds a mirror of the lost ranks"


def choose_mirrors(
    stayers: Sequence[Member], joiners: Sequence[Member], *, change: Change
) -> tuple[int, dict[int, tuple[int, HeldMirror]]] | None:
    """The newest version that all can stand at, and from which holder each rank takes its mirror; None: there is none.

    A rank that a live replica can serve needs none, if the lost rank's own state of that version is known.
    """
    search = change.search
    assert search is not None
    served = {joiner.rank for joiner in joiners if choose_sources(list(stayers), joiner).ranks}
    reachable = [{m.version, *search.answers[m.name].own} for m in stayers]
    for version in sorted(set.intersection(*reachable), reverse=True):
        if version > change.version:
            continue
        chosen = {}
        for joiner in joiners:
            private = version == 0 or change.private.get(joiner.rank, {}).get(version, b"")
            if private and joiner.rank in served:
                continue
            mirror = _mirror_of(joiner, version, stayers=stayers, search=search)
            if mirror is None:
                break
            chosen[joiner.rank] = mirror
        else:
            return version, chosen
    return None


def _mirror_of(
    joiner: Member, version: int, *, stayers: Sequence[Member], search: MirrorSearch
) -> tuple[int, HeldMirror] | None:
    """The holder (its rank) of a mirror that fits, and the mirror."""
    for member in stayers:
        for held in search.answers[member.name].held:
            fits = (held.rank, held.version, held.replica) == (joiner.rank, version, joiner.replica)
            if fits and (member.rank, joiner.rank, version) not in search.refused:
                return member.rank, held
    return None


def _return_to(turn: Turn, stayers: list[Member], *, version: int, chosen: dict[int, tuple[int, HeldMirror]]) -> None:
    change = _present(turn)
    assert change.search is not None
    turn.change(version=version, search=msgspec.structs.replace(change.search, chosen=chosen))
    turn.let(version=min(turn.state.version, version))
    for member in stayers:
        if member.version != version:
            turn.put(member, status=Status.PARKED)
            order = Return(turn.state.epoch, change.generation, version)
            turn.tell(member, order, reason=f"return to version {version}, which the mirrors have")
    turn.because(f"ranks {sorted(chosen)} take mirrors of version {version}")


def on_mirrors(turn: Turn, event: Event) -> None:
    """A stayer says what it has."""
    fact = event.fact
    assert isinstance(fact, Mirrors)
    change = turn.state.change
    member = turn.state.members.get(event.source_member)
    if change is None or change.search is None or change.generation != fact.generation:
        return
    if member is None or member.joiner or member not in live(turn.state.members):
        return
    answers = {**change.search.answers, member.name: fact}
    private = dict(change.private)
    for rank, versions in fact.private.items():
        private[rank] = {**versions, **private.get(rank, {})}
    turn.change(search=msgspec.structs.replace(change.search, answers=answers), private=private)


# ---------------------------------------------------------------- the joiner


def mirrored_ranks(change: Change) -> dict[int, str]:
    """The digests of the mirrors that ranks take, by rank."""
    return {} if change.search is None else {rank: held.digest for rank, (_, held) in change.search.chosen.items()}


def take_mirror(turn: Turn, joiner: Member, *, private: bytes) -> None:
    """Send a joiner to the mirror chosen for it."""
    change = _present(turn)
    assert change.search is not None
    holder, held = change.search.chosen[joiner.rank]
    order = TakeMirror(
        epoch=turn.state.epoch,
        generation=change.generation,
        version=held.version,
        digest=held.digest,
        holder=holder,
        roster=turn.addresses(),
        private=private,
    )
    turn.tell(joiner, order, reason=f"take the mirror of version {held.version} that rank {holder} holds")


def refuse_mirror(turn: Turn, joiner: Member) -> bool:
    """The mirror that `joiner` was sent to cannot be taken: the next one is tried. False if it was sent to none."""
    change = _present(turn)
    if change.search is None or joiner.rank not in change.search.chosen:
        return False
    holder, held = change.search.chosen[joiner.rank]
    refused = change.search.refused | {(holder, joiner.rank, held.version)}
    chosen = {rank: one for rank, one in change.search.chosen.items() if rank != joiner.rank}
    search = msgspec.structs.replace(change.search, refused=refused, chosen=chosen)
    turn.change(search=search, fetching=change.fetching - {joiner.name})
    turn.because(f"the mirror of rank {joiner.rank} that rank {holder} holds is refused")
    return True


# ---------------------------------------------------------------- what the incident says


def note_sources(turn: Turn) -> None:
    """Write down where the state of every lost rank came from."""
    change = _present(turn)
    turn.change(lost=tuple(_with_source(turn, change, loss=loss) for loss in change.lost))


def _with_source(turn: Turn, change: Change, *, loss: Loss) -> Loss:
    if loss.rank < 0:
        return loss
    source, note = "replica", loss.note
    if change.restore is not None:
        local = any(m.rank == loss.rank and change.restore in m.local for m in live(turn.state.members))
        source = "start" if change.restore < 0 else "local" if local else "shared"
    elif change.search is not None and loss.rank in change.search.chosen:
        holder, held = change.search.chosen[loss.rank]
        source = "mirror"
        state = f"the state of rank {loss.rank}, version {held.version}"
        text = f"{state}, came from its mirror in the memory of rank {holder}"
        note = "; ".join(part for part in (note, text) if part)
    return msgspec.structs.replace(loss, source=source, note=note)


def _present(turn: Turn) -> Change:
    assert turn.state.change is not None
    return turn.state.change
