"""What members, agents and the controller say to each other.

Every message is a frozen msgspec struct in one tagged union, encoded as MessagePack. Facts travel from members to
the controller, orders travel back. Every order carries the leader `epoch`; a member refuses a lower one. Every fact
about a membership change carries the `generation` it answers, so that late answers are recognised and dropped.
"""

from __future__ import annotations

import msgspec

from keepstep.errors import RecordError
from keepstep.records.address import Address
from keepstep.records.canary import CanaryLoss
from keepstep.records.domain_messages import NodeFact, StateFact
from keepstep.records.enlist_messages import Assignment, Enlist
from keepstep.records.mirror_messages import MirrorFact, MirrorOrder
from keepstep.records.move_messages import MoveFact, MoveOrder
from keepstep.records.path_messages import CountPaths, PathsCounted, PathsProbed, ProbePaths
from keepstep.records.sandbox_messages import SandboxFact, SandboxOrder
from keepstep.records.watch_messages import LinkProbed, WatchFact, WatchOrder

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Abort",
    "Address",
    "AgentHello",
    "Assignment",
    "BatchSeen",
    "Checkpoints",
    "Drill",
    "Drilled",
    "Enlist",
    "Fact",
    "Fence",
    "Fetch",
    "FetchFailed",
    "Fetched",
    "Find",
    "Finished",
    "FirstStep",
    "Go",
    "Hello",
    "KillMember",
    "MemberExited",
    "MemberFact",
    "MemberStarted",
    "MemberStopped",
    "Message",
    "Order",
    "Parked",
    "PathsReady",
    "PeerLostReport",
    "Ready",
    "Restore",
    "ScriptFailed",
    "Settle",
    "Settled",
    "StartFailed",
    "StartMember",
    "StateDigest",
    "Stop",
    "TakePaths",
    "Welcome",
    "decode_message",
    "encode_message",
]

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class _Said(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all messages: the tag is the class name."""


# ---------------------------------------------------------------- facts, from a member


class Hello(_Said, frozen=True, tag=True):
    """A process called `join()`. `rank` is -1 for a standby. `world` is what its environment says."""

    member: str
    rank: int
    world: int
    pid: int
    address: Address
    keepstep_version: str
    torch_version: str


class PeerLostReport(_Said, frozen=True, tag=True):
    """A member saw the link to `rank` break in `generation`."""

    generation: int
    rank: int


class Parked(_Said, frozen=True, tag=True):
    """A stayer stopped for the change to `generation`.

    `version` counts the optimizer updates applied to its state. `agreed` is true where it saw the agreement of step
    `version` pass without having applied the update yet. `boundary` is true between steps.
    """

    generation: int
    version: int
    agreed: bool
    boundary: bool


class Settled(_Said, frozen=True, tag=True):
    """A stayer stands at a step boundary with `version` updates applied.

    `digest` is the hash of its tracked state, `replica` names the set of members that hold the same state.
    """

    generation: int
    version: int
    digest: str
    replica: str


class StateDigest(_Said, frozen=True, tag=True):
    """In passing: what the weights of `rank` hash to at `version`; `replica` as in `Settled`. No order follows."""

    rank: int
    version: int
    digest: str
    replica: str


class Ready(_Said, frozen=True, tag=True):
    """A joiner has run the script up to its first step and can take state. `replica` as in `Settled`.

    `unprepared`: it could not prepare a pipeline schedule alone; all members must prepare theirs anew.
    """

    generation: int
    replica: str
    unprepared: bool = False


class Fetched(_Said, frozen=True, tag=True):
    """A joiner holds the state of `version`; `digest` as in `Settled`."""

    generation: int
    version: int
    digest: str
    bytes_moved: int


class FetchFailed(_Said, frozen=True, tag=True):
    """A joiner could not take state: the sources `lost` did not answer."""

    generation: int
    lost: tuple[int, ...]
    why: str


class Checkpoints(_Said, frozen=True, tag=True):
    """The checkpoint steps this member could load (its own part has the right hashes), and what it skipped.

    `local` are those of `steps` that lie on its local disk. `written_in` names for each of `steps` the job and
    generation that wrote it (empty: all by an earlier version).
    """

    generation: int
    steps: tuple[int, ...]
    skipped: tuple[str, ...] = ()
    local: tuple[int, ...] = ()
    written_in: tuple[str, ...] = ()


class FirstStep(_Said, frozen=True, tag=True):
    """The first step after a membership change is complete; `version` updates are applied now."""

    generation: int
    version: int


class Finished(_Said, frozen=True, tag=True):
    """A member has left its last step; its death from here on is not repaired."""

    version: int
    weights_sha256: str = ""


class BatchSeen(_Said, frozen=True, tag=True):
    """The shapes of a member's first batch, as text. For its agent, which tells the analysis; it goes no further."""

    batch: str


class ScriptFailed(_Said, frozen=True, tag=True):
    """The user's script raised `error` (its type and text) while nothing was amiss; the process is about to exit."""

    version: int
    error: str


class PathsReady(_Said, frozen=True, tag=True):
    """A member has the links of path plan `number`, or says `why` not; `installed`: they carry its collectives now."""

    number: int
    installed: bool = False
    version: int = 0
    why: str = ""


# ---------------------------------------------------------------- facts, from an agent


class AgentHello(_Said, frozen=True, tag=True):
    """An agent offers `slots` ranks and `standbys` standbys on `node`.

    `host` is the address other nodes reach it by; `ports` are some free ports there, one for each attempt.
    """

    node: str
    slots: int
    standbys: int
    keepstep_version: str
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()


class Drilled(_Said, frozen=True, tag=True):
    """A fault was injected into `rank`, which was in `step` (-1: in none), at wall-clock time `at`; or `ended` there.

    `note` says what was done in numbers where it depends on the job.
    """

    fault: str
    rank: int
    step: int
    at: float
    ended: bool = False
    note: str = ""


class MemberStarted(_Said, frozen=True, tag=True):
    """An agent started a process for `rank` (-1: standby)."""

    member: str
    rank: int
    node: str
    pid: int


class MemberExited(_Said, frozen=True, tag=True):
    """A process is gone. `code` is its exit status, `signal` the signal that ended it (0: none).

    `private` holds the rank's own last published state by version (RNG and data position), read from the memory the
    agent kept; `onset` is the wall-clock time of the first collective that left its pattern (0: unknown).
    """

    member: str
    rank: int
    code: int
    signal: int
    private: dict[int, bytes] = {}
    onset: float = 0.0
    protected: bool = True


class MemberStopped(_Said, frozen=True, tag=True):
    """A process is alive but frozen (state T) since `since` (wall clock); `private`, `onset` as in `MemberExited`."""

    member: str
    rank: int
    since: float
    private: dict[int, bytes] = {}
    onset: float = 0.0


class StartFailed(_Said, frozen=True, tag=True):
    """An agent could not start a process."""

    member: str
    rank: int
    why: str


# ---------------------------------------------------------------- orders


class _Ordered(_Said, frozen=True):
    """Base of orders: `epoch` is the leader's."""

    epoch: int


class Welcome(_Ordered, frozen=True, tag=True):
    """Answer to `Hello`: take `rank` of `world`. `joiner`: the others are already in mid-job.

    `roster` maps every rank to its address. `secret` authenticates the data plane. `attempt` counts whole restarts.
    `move` is the move the joiner is for (0: none): another process holds the rank until that is committed.
    """

    rank: int
    world: int
    local_rank: int
    generation: int
    attempt: int
    joiner: bool
    roster: dict[int, Address]
    secret: bytes
    move: int = 0


class Abort(_Ordered, frozen=True, tag=True):
    """Stop the step for a change to `generation`, because the members of `lost` ranks are gone. Answer: `Parked`.

    `renew`: all links are made anew, because members may differ in which generation they have installed.
    """

    generation: int
    lost: tuple[int, ...]
    renew: bool = False


class Settle(_Ordered, frozen=True, tag=True):
    """Come to a step boundary with exactly `version` updates applied: roll forward or redo. Answer: `Settled`."""

    generation: int
    version: int


class Find(_Ordered, frozen=True, tag=True):
    """Say which checkpoints you could load. Answer: `Checkpoints`."""

    generation: int


class Restore(_Ordered, frozen=True, tag=True):
    """Load the checkpoint of `version` (-1: none is left, start from the initial state). Answer: `Settled`."""

    generation: int
    version: int


class Fetch(_Ordered, frozen=True, tag=True):
    """Take the state of `version` from the `sources` (ranks), which all hold `digest`. Answer: `Fetched`.

    `private` is the leaver's own last published state for that version (empty: unknown).
    """

    generation: int
    version: int
    digest: str
    sources: tuple[int, ...]
    roster: dict[int, Address]
    private: bytes


class Go(_Ordered, frozen=True, tag=True):
    """Install `generation` with this `roster` and run on from `version`; `replicas` names what each rank holds.

    `anew`: pipeline schedules are prepared again, by all members in the step that comes.
    """

    generation: int
    version: int
    roster: dict[int, Address]
    replicas: dict[int, str] = {}
    anew: bool = False


class Fence(_Ordered, frozen=True, tag=True):
    """Your place is taken: change nothing and exit."""

    why: str


class Stop(_Ordered, frozen=True, tag=True):
    """The job is over for everybody: exit with `code`."""

    code: int
    why: str


class StartMember(_Ordered, frozen=True, tag=True):
    """To an agent: start a process `member` for `rank` (-1: standby). `drill` is a fault to start it with."""

    member: str
    rank: int
    local_rank: int
    attempt: int
    environment: dict[str, str]
    drill: str = ""


class KillMember(_Ordered, frozen=True, tag=True):
    """To an agent: end `member`, after `grace_s` seconds at the latest by force."""

    member: str
    grace_s: float


class Drill(_Ordered, frozen=True, tag=True):
    """Inject `fault` into `rank` when it reaches `step` (-1: now), for `steps` steps (0: until stopped).

    To the agent, which passes on to the member what only that can do. The rest as in `records.drills.DrillRequest`;
    `peers` are the ranks that a link drill keeps this rank's bytes from. With `stop` the fault ends.
    """

    fault: str
    rank: int
    step: int
    steps: int = 0
    factor: float = 0.0
    rate: float = 0.0
    peers: tuple[int, ...] = ()
    how: str = ""
    stop: bool = False


class TakePaths(_Ordered, frozen=True, tag=True):
    """Dial links from other source ports, beside training. Answers: `PathsReady`, twice.

    `dial` gives the ports to reach a rank from, `accept` those it will call from.
    """

    number: int
    dial: dict[int, tuple[int, ...]] = {}
    accept: dict[int, tuple[int, ...]] = {}


MemberFact = (
    Hello
    | PeerLostReport
    | Parked
    | Settled
    | StateDigest
    | Ready
    | Fetched
    | FetchFailed
    | Checkpoints
    | FirstStep
    | Finished
    | ScriptFailed
    | PathsReady
    | Drilled
    | LinkProbed
    | BatchSeen
    | MoveFact
    | MirrorFact
    | StateFact
    | SandboxFact
)
_PathFact = PathsProbed | PathsCounted
_AgentFact = AgentHello | Enlist | MemberStarted | MemberExited | MemberStopped | StartFailed | _PathFact | CanaryLoss
Fact = MemberFact | _AgentFact | NodeFact | WatchFact
Order = (
    Welcome
    | Abort
    | Settle
    | Find
    | Restore
    | Fetch
    | Go
    | Fence
    | Stop
    | StartMember
    | KillMember
    | Assignment
    | Drill
    | TakePaths
    | ProbePaths
    | CountPaths
    | MoveOrder
    | MirrorOrder
    | SandboxOrder
    | WatchOrder
)
Message = Fact | Order

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One message as MessagePack bytes. Raises RecordError if it is over MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise RecordError(
            f"message {type(message).__name__} has {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return data


def decode_message(data: bytes) -> Message:
    """The message in `data`. Raises RecordError for anything that is not one (never executes foreign data)."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RecordError(f"message of {len(data)} bytes refused, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"not a keepstep message: {error}") from error
