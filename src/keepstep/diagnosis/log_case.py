"""The events of one job's logs, ready to be asked: by kind, by rank, with quotations for evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from keepstep.records.evidence import LogEvent, StackSample
from keepstep.records.finding import Suspect

__all__ = ["LogCase", "is_claim", "quotation", "rank_list", "suspect_of", "words"]

_QUOTED = 220
_OF_A_PROCESS = frozenset({"exception", "gpu_memory", "cuda_error", "crashed", "loader_worker"})
_LONGEST_LIST = 100_000


class LogCase:
    """Events and stacks of one job. Events that a person claims (rather than a program wrote) are kept apart."""

    def __init__(self, events: Iterable[LogEvent], stacks: Iterable[StackSample] = ()) -> None:
        """Keeps the order in which the events come."""
        self.events: tuple[LogEvent, ...] = tuple(events)
        self.stacks: tuple[StackSample, ...] = tuple(stacks)
        self._by_kind: dict[str, list[LogEvent]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event.kind].append(event)

    def of(self, *kinds: str, claims: bool = True) -> list[LogEvent]:
        """Events of these kinds in order of appearance; `claims` False leaves out what only a person says."""
        if len(kinds) == 1:
            found = self._by_kind.get(kinds[0], [])
        else:
            wanted = set(kinds)
            found = [event for event in self.events if event.kind in wanted]
        return [event for event in found if claims or not is_claim(event)]

    def has(self, *kinds: str, claims: bool = True) -> bool:
        """Whether there is an event of one of these kinds."""
        return any(self.of(kind, claims=claims) for kind in kinds)

    def world(self) -> tuple[int | None, bool]:
        """How many ranks the job has, and whether only a person says so; None if nothing tells."""
        said = [
            int(event.fields["world"]) for event in self.of("world", "store_timeout", claims=False) if _count(event)
        ]
        if said:
            return Counter(said).most_common(1)[0][0], False
        claimed = [int(event.fields["world"]) for event in self.of("note_world") if _count(event)]
        return (max(claimed), True) if claimed else (None, False)

    def speakers(self) -> set[int]:
        """Ranks that wrote something themselves."""
        return {event.rank for event in self.events if event.rank is not None and not is_claim(event)}


def _count(event: LogEvent) -> bool:
    value = event.fields.get("world", "")
    return value.isdigit() and 1 < int(value) < 1_000_000


def is_claim(event: LogEvent) -> bool:
    """Whether a person wrote this in their own words; a claim is not a fact."""
    return event.fields.get("claimed") == "yes"


def quotation(event: LogEvent) -> str:
    """Where an event stands and what it says, such as `rank3.log:120: ...`."""
    place = f"{event.path}:{event.line}: " if event.path else ""
    text = event.text if len(event.text) <= _QUOTED else event.text[:_QUOTED] + "..."
    return f"{place}{text}"


def suspect_of(event: LogEvent, *, device: bool = True) -> Suspect | None:
    """The rank, node or device that an event names for itself; None if it names none."""
    found = event.fields.get("device") or None if device else None
    if event.rank is None and event.node is None and (found is None or not event.kind.startswith(("ib_", "nic_"))):
        return None
    one_of_many = event.rank is None and event.node is not None and event.kind in _OF_A_PROCESS
    return Suspect(rank=event.rank, node=event.node, device=found, pid=event.pid if one_of_many else None)


def rank_list(text: str) -> list[int]:
    """Ranks of a list as people and programs write it: `0, 4`, `1 and 2`, `4-7`."""
    found: list[int] = []
    pieces = text.replace("and", ",").replace("&", ",").replace(" to ", "-").replace(";", ",").split(",")
    for piece in pieces:
        low, _, high = (part.strip() for part in piece.partition("-"))
        if low.isdigit() and len(low) < 8:
            last = int(high) if high.isdigit() and len(high) < 8 else int(low)
            found.extend(range(int(low), min(last, int(low) + _LONGEST_LIST) + 1))
    return found


def words(items: Sequence[object], *, most: int = 8) -> str:
    """`1, 2 and 3`, shortened after `most`."""
    shown = [str(item) for item in items[:most]]
    if len(items) > most:
        return f"{', '.join(shown)} and {len(items) - most} more"
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)
