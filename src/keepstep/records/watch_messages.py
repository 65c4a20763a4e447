"""What agents and the controller say to each other about how members stand: summaries, evidence, checks of a hang."""

from __future__ import annotations

import msgspec

from keepstep.records.plain_samples import PlainReport
from keepstep.records.summary import WatchReport

__all__ = [
    "STACK_SIGNAL",
    "CallMade",
    "Called",
    "CheckHang",
    "EvidenceGiven",
    "GiveEvidence",
    "HangDenied",
    "LinkProbed",
    "MemberHung",
    "MemberMoves",
    "MemberSlow",
    "MismatchSaid",
    "NodeProbed",
    "PlainSeen",
    "ProbeLinks",
    "ProbeNode",
    "TellCalls",
    "WatchFact",
    "WatchOrder",
    "Watched",
]


STACK_SIGNAL = 39
"""Linux signal SIGRTMIN + 5: a process that called `join()` answers it with its Python stacks on stderr."""


class _Told(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of these messages: the tag is the class name, as for all others."""


class Watched(_Told, frozen=True, tag=True):
    """An agent's summary of its members. Not kept in the journal: it comes four times a second."""

    report: WatchReport


class PlainSeen(_Told, frozen=True, tag=True):
    """An agent's looks at members that know nothing of keepstep. Not kept in the journal."""

    report: PlainReport


class EvidenceGiven(_Told, frozen=True, tag=True):
    """What an agent has about `member`, for finding `finding`; member "": about the node itself. Not kept in the
    journal but in the bundle of the finding.

    `ring` is the recorder ring and `dump` a Flight Recorder dump of PyTorch, compressed with zlib (empty: none);
    `stack` what the process was doing, as text; `counters` a JSON object of the kernel's counters.
    """

    finding: int
    member: str
    rank: int
    ring: bytes = b""
    stack: str = ""
    counters: bytes = b""
    dump: bytes = b""


class MemberHung(_Told, frozen=True, tag=True):
    """A process is alive and does nothing: its stack and its processor time did not move over `apart_s` seconds.

    `since` is the wall-clock time from which on it did nothing, `where` the line it stands at; `private` and `onset`
    as in `MemberExited`.
    """

    member: str
    rank: int
    since: float
    where: str = ""
    apart_s: float = 0.0
    private: dict[int, bytes] = {}
    onset: float = 0.0


class MemberSlow(_Told, frozen=True, tag=True):
    """A member of a job that knows nothing of keepstep holds up all others, and has for long: `why`. Said by the
    analysis; all start again without its node, where the others have room for its ranks."""

    member: str
    rank: int
    why: str


class CallMade(msgspec.Struct, frozen=True, array_like=True):
    """One collective as a member called it; numbers as in an operation slot of the recorder. `group` is the name
    behind `hash`, empty where the member has closed the group."""

    hash: int
    group: str
    sequence: int
    op: int
    element: int
    count: int
    root: int


class Called(_Told, frozen=True, tag=True):
    """The newest collectives of `member` in every group, in `generation`; given when a script fails."""

    member: str
    rank: int
    generation: int
    calls: tuple[CallMade, ...]


class LinkProbed(_Told, frozen=True, tag=True):
    """One transfer of a probe for `finding`, as its sender measured it; `bytes_per_s` 0: it failed because of `why`."""

    finding: int
    source: int
    destination: int
    latency_s: float
    bytes_per_s: float
    why: str = ""


class NodeProbed(_Told, frozen=True, tag=True):
    """A measurement of a probe for `finding` on the node of `rank`: `value` in `unit`, or words alone in `note`."""

    finding: int
    rank: int
    node: str
    value: float
    unit: str = ""
    note: str = ""


class MemberMoves(_Told, frozen=True, tag=True):
    """A process that was reported as stopped runs again."""

    member: str
    rank: int


class HangDenied(_Told, frozen=True, tag=True):
    """A check found no hard evidence of a hang of `member`: nobody is replaced, because of `why`."""

    member: str
    rank: int
    why: str


class MismatchSaid(_Told, frozen=True, tag=True):
    """A library in `member` printed `said`: its collective does not fit what others sent. A rank that then ends by
    itself is not replaced, and ends the job: a new start would come to the same place."""

    member: str
    rank: int
    said: str


class _Asked(_Told, frozen=True):
    """Base of orders: `epoch` is the leader's."""

    epoch: int


class GiveEvidence(_Asked, frozen=True, tag=True):
    """To an agent: give what there is about all members of the node for `finding`: stacks, counters, and the rings of
    the ranks in `rings`. Answers: `EvidenceGiven`."""

    finding: int
    rings: tuple[int, ...]


class CheckHang(_Asked, frozen=True, tag=True):
    """To an agent: look twice, `apart_s` seconds apart, whether `member` does anything. `since` is the wall-clock time
    from which on the analysis saw nothing of it. Answer: `MemberHung` or `HangDenied`."""

    member: str
    since: float
    apart_s: float


class TellCalls(_Asked, frozen=True, tag=True):
    """To an agent: say at once what its members called last. Answer: `Called` for each."""


class ProbeLinks(_Asked, frozen=True, tag=True):
    """To a member: take part in transfers of `nbytes` between `pairs` (from, to), one after the other, beside training.
    Answer: `LinkProbed` from each sender."""

    finding: int
    pairs: tuple[tuple[int, int], ...]
    nbytes: int


class ProbeNode(_Asked, frozen=True, tag=True):
    """To an agent: measure `what` (cpu, read or stacks) for the member of `rank`. Answer: `NodeProbed`."""

    finding: int
    what: str
    rank: int


WatchFact = (
    Watched
    | PlainSeen
    | EvidenceGiven
    | MemberHung
    | MemberSlow
    | MemberMoves
    | HangDenied
    | MismatchSaid
    | Called
    | LinkProbed
    | NodeProbed
)
WatchOrder = GiveEvidence | CheckHang | TellCalls | ProbeLinks | ProbeNode
