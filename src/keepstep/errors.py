"""The error tree: every error says what happened, where, and what to do.

KeepstepError
├── UsageError            a wrong option, path or rank given by a person        exit 2
├── EnvironmentProblem    the machine lacks something: compiler, port, disk      exit 69
├── RecordError           a record cannot be read or written                     exit 65
│   ├── SchemaTooNew      written by a newer major version
│   └── TornRecord        cut off or damaged
├── StoreError            state or journal cannot be kept                        exit 74
│   ├── AppendConflict    somebody else appended first
│   └── StaleEpoch        an order or write of a deposed leader
├── TransportError        bytes between members did not arrive                   exit 70
│   ├── PeerLost          the other side is gone
│   ├── CollectiveTimeout a collective did not finish in time
│   └── GroupAborted      the group was aborted on purpose
├── MembershipError       this process may not take part                         exit 76
│   ├── Fenced            its place was given to another member
│   ├── VersionMismatch   another version of keepstep or torch in the same job
│   └── WorldMismatch     members disagree about the size of the job
├── MoveNotMade           a planned move was given up; training goes on          exit 75
├── NoAnswer              a run has no controller now, or gives no answer        exit 75
├── TrafficError          a network or a demand that cannot be planned for       exit 65
└── StateError            training state cannot be moved or trusted              exit 75
    ├── StateDivergence   replicas that should be equal are not
    ├── UnsupportedState  a tracked object holds something that cannot be carried
    └── NoValidState      no live replica and no valid checkpoint is left
"""

from __future__ import annotations

__all__ = [
    "AppendConflict",
    "CollectiveTimeout",
    "EnvironmentProblem",
    "Fenced",
    "GroupAborted",
    "HelloCut",
    "KeepstepError",
    "MembershipError",
    "MoveNotMade",
    "NoAnswer",
    "NoValidState",
    "PeerLost",
    "RecordError",
    "SchemaTooNew",
    "StaleEpoch",
    "StateDivergence",
    "StateError",
    "StoreError",
    "TornRecord",
    "TrafficError",
    "TransportError",
    "UnsupportedState",
    "UsageError",
    "VersionMismatch",
    "WorldMismatch",
]


class KeepstepError(Exception):
    """Root of the tree.

    `what` happened, `where` it happened (a file, rank, step or address; may be empty) and the `remedy`, what
    the reader should do next (may be empty). `exit_code` is what the command line returns.
    """

    exit_code = 70

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        place = f" [{where}]" if where else ""
        advice = f" -> {remedy}" if remedy else ""
        super().__init__(f"{what}{place}{advice}")


class UsageError(KeepstepError):
    """A wrong option, path or rank given by a person."""

    exit_code = 2


class EnvironmentProblem(KeepstepError):
    """The machine lacks something: a compiler, a free port, disk space."""

    exit_code = 69


class RecordError(KeepstepError):
    """A record cannot be read or written."""

    exit_code = 65


class SchemaTooNew(RecordError):
    """A record written by a newer major version of the schema."""


class TornRecord(RecordError):
    """A record that is cut off or damaged."""


class StoreError(KeepstepError):
    """State or journal cannot be kept."""

    exit_code = 74


class AppendConflict(StoreError):
    """Somebody else appended first; read again and retry."""


class StaleEpoch(StoreError):
    """An order or a write of a leader that has been deposed."""


class TransportError(KeepstepError):
    """Bytes between members did not arrive."""

    exit_code = 70


class PeerLost(TransportError):
    """The other side of a link is gone."""


class HelloCut(PeerLost):
    """The other side hung up before it answered a hello: too busy, not there any more, or another secret."""


class CollectiveTimeout(TransportError):
    """A collective did not finish in time."""


class GroupAborted(TransportError):
    """The group was aborted on purpose."""


class MembershipError(KeepstepError):
    """This process may not take part in the job."""

    exit_code = 76


class Fenced(MembershipError):
    """The place of this member was given to another one."""


class VersionMismatch(MembershipError):
    """Another version of keepstep or torch in the same job."""


class WorldMismatch(MembershipError):
    """Members disagree about the size of the job."""


class MoveNotMade(KeepstepError):
    """A planned move was given up, or only a part of it was made; training goes on."""

    exit_code = 75


class NoAnswer(KeepstepError):
    """A run has no controller now, or it took a request and gave no answer: its records say what came of it."""

    exit_code = 75


class TrafficError(KeepstepError):
    """A network, a demand or a change of them that cannot be planned for; the plan in force stays."""

    exit_code = 65


class StateError(KeepstepError):
    """Training state cannot be moved or trusted."""

    exit_code = 75


class StateDivergence(StateError):
    """Replicas that should be equal are not."""


class UnsupportedState(StateError):
    """A tracked object holds something that cannot be carried."""


class NoValidState(StateError):
    """No live replica and no valid checkpoint is left."""
