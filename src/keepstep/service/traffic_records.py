"""What the recorder of a run says of its traffic: rings found in a run directory, and where its ranks sat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keepstep.errors import RecordError, UsageError
from keepstep.records.demand import Seat
from keepstep.records.events import Event, JobStarted, OrderRecord
from keepstep.records.messages import StartMember
from keepstep.records.ring import Ring, decode_ring, read_header
from keepstep.service.ring_archive import RINGS_FOLDER
from keepstep.store.journal import JOURNAL_NAME, read_journal
from keepstep.traffic.observed import Observed, observe, whole_steps

__all__ = ["observed_run", "rings_of", "seats_on"]

_MOST_BYTES = 1 << 30


def rings_of(directory: Path) -> dict[int, Ring]:
    """A ring of every rank below `directory`: those kept when processes ended, where all ranks have one and share whole
    steps; else the fullest of each rank (a joiner's is short).

    Raises UsageError if there is none, RecordError for damage.
    """
    if not directory.is_dir():
        raise UsageError("no such directory", where=str(directory), remedy="give the directory of a run")
    paths = sorted(directory.rglob("*.ring"))
    fullest = _fullest(paths)
    if not fullest:
        remedy = (
            "rings are kept at every loss and at the end; those of several nodes are with their agents: gather them"
        )
        raise UsageError("no recorder ring below it", where=str(directory), remedy=remedy)
    last = _fullest(path for path in paths if path.parent.name == RINGS_FOLDER)
    if last.keys() == fullest.keys() and last != fullest:
        rings = _decoded(last)
        if whole_steps(rings):
            return rings
    return _decoded(fullest)


def seats_on(ranks: Sequence[int], hosts: Sequence[str]) -> list[Seat]:
    """`ranks` in order shared out over `hosts`. Raises UsageError if they do not divide."""
    if not hosts or len(ranks) % len(hosts):
        raise UsageError(f"{len(ranks)} ranks cannot be shared out over {len(hosts)} hosts")
    each = len(ranks) // len(hosts)
    return [Seat(rank, hosts[place // each], place % each, each) for place, rank in enumerate(sorted(ranks))]


def observed_run(directory: Path, *, job: str, hosts: Sequence[str] = ()) -> Observed:
    """The traffic of the run in `directory`; its ranks sit on `hosts`, or where its journal says they were started.

    Those of a run over several nodes lie in directories of their own: then `directory` has all of them below it.

    Raises as `rings_of` and `seats_on`, UsageError where nothing says where a rank sat, TrafficError as `observe`.
    """
    rings = rings_of(directory)
    seats = seats_on(sorted(rings), hosts) if hosts else _from_journal(directory, rings)
    return observe(job, rings, seats=seats)


def _fullest(paths: Iterable[Path]) -> dict[int, Path]:
    """The file of the fullest ring of every rank."""
    found: dict[int, tuple[int, Path]] = {}
    for path in paths:
        header = read_header(_content(path))
        if header.rank >= 0 and (header.rank not in found or found[header.rank][0] < header.head):
            found[header.rank] = (header.head, path)
    return {rank: path for rank, (_, path) in found.items()}


def _decoded(paths: dict[int, Path]) -> dict[int, Ring]:
    return {rank: decode_ring(_content(path)) for rank, path in paths.items()}


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RecordError(f"larger than {_MOST_BYTES} bytes", where=str(path))
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _from_journal(directory: Path, rings: Mapping[int, Ring]) -> list[Seat]:
    """Ranks are numbered by node name, equally many on each node (see docs/cli.md), or where their members started."""
    events = _journal(directory)
    nodes = next((sorted(event.nodes) for event in events if isinstance(event, JobStarted) and event.nodes), [])
    if nodes:
        return seats_on(sorted(rings), nodes)
    orders = [event for event in events if isinstance(event, OrderRecord) and event.node]
    started = {one.order.member: one.node for one in orders if isinstance(one.order, StartMember)}
    ranks_on: dict[str, list[int]] = {}
    for rank, ring in sorted(rings.items()):
        node = started.get(ring.header.member, "")
        if not node:
            raise UsageError(f"the journal does not say on which node rank {rank} ran", remedy="give --hosts")
        ranks_on.setdefault(node, []).append(rank)
    return [Seat(rank, node, place, len(ranks)) for node, ranks in ranks_on.items() for place, rank in enumerate(ranks)]


def _journal(directory: Path) -> tuple[Event, ...]:
    """The records of the job's journal, in `directory` or below it. Raises UsageError unless there is one."""
    if (directory / JOURNAL_NAME).exists():
        return read_journal(directory)[0]
    found = {path.parent: read_journal(path.parent)[0] for path in sorted(directory.rglob(JOURNAL_NAME))}
    jobs = [place for place, events in found.items() if any(isinstance(event, JobStarted) for event in events)]
    if len(jobs) != 1:
        what = f"journals of {len(jobs)} jobs below it" if jobs else "no journal of a job below it"
        raise UsageError(what, where=str(directory), remedy="give the directory of one run, or --hosts")
    return found[jobs[0]]
