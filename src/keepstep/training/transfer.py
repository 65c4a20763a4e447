"""State moves from members that have it to a member that needs it: hashed chunks, from all sources at once.

The sources are compared first: one whose digest differs is named and not used. Every chunk is checked on arrival.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import xxhash

from keepstep.errors import NoValidState, PeerLost, RecordError, StateDivergence, TornRecord, UnsupportedState
from keepstep.training.chunkqueue import ChunkQueue, Unit
from keepstep.training.manifest import CHUNK_BYTES, Chunk, Image, Manifest, decode_manifest, state_digest
from keepstep.training.statewire import (
    MAX_CHUNKS,
    MAX_MANIFEST_BYTES,
    Ask,
    Status,
    ask,
    next_request,
    receive_exactly,
    receive_header,
    receive_into,
    reply,
    set_timeout,
)
from keepstep.training.treediff import first_difference

__all__ = ["Divergence", "SourcesLost", "StateServer", "Taker", "Transfer", "fetch"]

_SERVER_TIMEOUT_S = 60.0
_IN_FLIGHT = 2


class Taker(Protocol):
    """Whoever takes a state (`TrackedState`)."""

    @property
    def taking(self) -> bool:
        """True where an earlier transfer broke off."""

    def adopt(self, manifest: Manifest) -> list[memoryview]:
        """Make room; the views are where the bytes go."""

    def adopted(self) -> None:
        """All bytes are there."""


@dataclass(frozen=True)
class Divergence:
    """A source whose state differs: its digest, and the first entry that is not what the others hold."""

    rank: int
    digest: str
    entry: str


@dataclass(frozen=True)
class Transfer:
    """What was moved: bytes, bytes by source, the sources left out because they differ, and those that died."""

    bytes_moved: int
    by_source: dict[int, int]
    diverged: tuple[Divergence, ...] = ()
    lost: tuple[int, ...] = ()


class SourcesLost(NoValidState):
    """No source is left. `lost` did not answer, `diverged` hold something else."""

    def __init__(self, lost: tuple[int, ...], diverged: tuple[Divergence, ...]) -> None:
        self.lost = lost
        self.diverged = diverged
        different = ", ".join(f"rank {one.rank} differs in {one.entry}" for one in diverged)
        super().__init__(
            f"no source of state is left: ranks {list(lost)} did not answer{'; ' + different if different else ''}",
            remedy="another replica or a checkpoint is needed",
        )


class _Sent(msgspec.Struct, frozen=True):
    """A manifest with the digests of its chunks, as it travels."""

    manifest: bytes
    digests: bytes


class StateServer:
    """Answers requests for the state that `provider` gives; None means that this member does not stand still now.

    `provider` is asked at every request and should give the same Image as long as the state stands still.
    """

    def __init__(self, provider: Callable[[], Image | None]) -> None:
        self.hold: Callable[[int, Callable[[], None]], None] | None = None  # a drill that makes it slow
        self._provider = provider

    def handle(self, sock: socket.socket) -> None:
        """Serve one client until it hangs up, dies or asks nonsense; closes the socket.

        A joiner of a move connects long before it asks.
        """
        with sock:
            try:
                set_timeout(sock, _SERVER_TIMEOUT_S, waits=True)
                while (request := next_request(sock)) is not None:
                    kind, first, count = request
                    self._answer(sock, kind, first=first, count=count)
            except (OSError, PeerLost, TornRecord):
                return

    def _answer(self, sock: socket.socket, kind: int, *, first: int, count: int) -> None:
        try:
            image = self._provider()
        except UnsupportedState:
            image = None
        if image is None:
            reply(sock, Status.NO_STATE)
        elif kind == Ask.DIGEST:
            reply(sock, Status.OK, parts=[image.digest.encode()])
        elif kind == Ask.MANIFEST:
            sent = _Sent(image.manifest.encode(), image.chunk_digests)
            reply(sock, Status.OK, parts=[msgspec.msgpack.encode(sent)])
        elif kind == Ask.CHUNKS and 0 < count <= MAX_CHUNKS and first + count <= len(image.chunks):
            parts = [_view(image.buffers, chunk) for chunk in image.chunks[first : first + count]]
            if self.hold is None:
                reply(sock, Status.OK, parts=parts)
            else:
                self.hold(sum(map(len, parts)), lambda: reply(sock, Status.OK, parts=parts))
        else:
            reply(sock, Status.REFUSED)


def _view(buffers: list[memoryview], chunk: Chunk) -> memoryview:
    return buffers[chunk.entry][chunk.offset : chunk.offset + chunk.length]


@dataclass
class _Source:
    """One member that may have the state."""

    rank: int
    sock: socket.socket
    digest: str = ""
    manifest: Manifest | None = None
    digests: bytes = b""
    moved: int = 0
    lost: bool = False
    divergence: Divergence | None = None

    @property
    def usable(self) -> bool:
        return not self.lost and self.divergence is None

    def call(self, kind: Ask, limit: int) -> bytes:
        """One question, one bounded answer. Raises PeerLost, RecordError, OSError."""
        ask(self.sock, kind)
        status, length = receive_header(self.sock)
        if status != Status.OK or length > limit:
            raise PeerLost(f"rank {self.rank} has no state to give (status {status}, {length} bytes)")
        return bytes(receive_exactly(self.sock, length))

    def ask_digest(self) -> None:
        """Learn the digest of its state."""
        self.digest = self.call(Ask.DIGEST, 64).decode("ascii", "replace")

    def ask_manifest(self) -> None:
        """Learn what its state consists of."""
        data = self.call(Ask.MANIFEST, MAX_MANIFEST_BYTES)
        try:
            sent = msgspec.msgpack.decode(data, type=_Sent)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TornRecord(f"not a state manifest: {error}") from error
        manifest = decode_manifest(sent.manifest)
        if manifest.nbytes > CHUNK_BYTES * len(sent.digests) // 8 or 8 * len(manifest.chunks()) != len(sent.digests):
            raise TornRecord(f"a state of {manifest.nbytes} bytes comes with {len(sent.digests) // 8} digests")
        self.manifest, self.digests = manifest, sent.digests


@dataclass
class _Plan:
    """What is taken: the queue, where every chunk goes, and what it must be."""

    manifest: Manifest
    digests: bytes
    buffers: list[memoryview]
    chunks: list[Chunk] = field(init=False)
    queue: ChunkQueue = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = self.manifest.chunks()
        self.queue = ChunkQueue(self.chunks)

    def wrong(self, first: int, count: int) -> list[int]:
        """The numbers of those chunks that are not what they must be."""
        one = xxhash.xxh3_64_digest
        return [
            number
            for number in range(first, first + count)
            if one(_view(self.buffers, self.chunks[number])) != self.digests[8 * number : 8 * number + 8]
        ]


def fetch(
    sources: Mapping[int, socket.socket], expected_digest: str, *, state: Taker, timeout_s: float = 10.0
) -> Transfer:
    """Take the state with `expected_digest` (empty: the one most sources hold) from `sources`, by rank.

    A source that moves no byte for `timeout_s` is lost. After a failure, `fetch` again keeps the chunks that are
    right. Raises SourcesLost if none is left, StateError if the state does not fit this member.
    """
    members = [_Source(rank, sock) for rank, sock in sorted(sources.items())]
    _in_parallel(members, lambda source: _prepare(source, timeout_s))
    good = _compare(members, expected_digest)
    reference = _reference(good)
    if reference is None:
        raise _left(members)
    _name_divergences(members, reference)
    manifest = reference.manifest
    assert manifest is not None
    resumed = state.taking
    plan = _Plan(manifest, reference.digests, state.adopt(manifest))
    if resumed:
        plan.queue = ChunkQueue(plan.chunks, set(range(len(plan.chunks))) - set(plan.wrong(0, len(plan.chunks))))
    _in_parallel([source for source in good if source.usable], lambda source: _work(source, plan))
    if plan.queue.missing:
        raise _left(members)
    state.adopted()
    failed = _left(members)
    by_source = {source.rank: source.moved for source in members if source.moved}
    return Transfer(sum(by_source.values()), by_source, failed.diverged, failed.lost)


def _in_parallel(members: list[_Source], action: Callable[[_Source], None]) -> None:
    """`action` for every source, each in its own thread; a source whose connection fails is lost."""

    def guarded(source: _Source) -> None:
        try:
            action(source)
        except (OSError, PeerLost, RecordError):
            source.lost = True

    threads = [threading.Thread(target=guarded, args=(source,), name=f"state-{source.rank}") for source in members[1:]]
    for thread in threads:
        thread.start()
    for source in members[:1]:
        guarded(source)
    for thread in threads:
        thread.join()


def _prepare(source: _Source, timeout_s: float) -> None:
    set_timeout(source.sock, timeout_s)
    source.ask_digest()


def _compare(members: list[_Source], expected: str) -> list[_Source]:
    """The sources that hold the expected state; the others are marked."""
    answered = [source for source in members if source.usable]
    if not expected and answered:
        expected = Counter(source.digest for source in answered).most_common(1)[0][0]
    for source in answered:
        if source.digest != expected:
            source.divergence = Divergence(source.rank, source.digest, "")
    return [source for source in answered if source.usable]


def _reference(good: list[_Source]) -> _Source | None:
    """The first source whose manifest proves the digest it named."""
    for source in good:
        try:
            source.ask_manifest()
        except (OSError, PeerLost, RecordError):
            source.lost = True
            continue
        assert source.manifest is not None
        if state_digest(source.manifest, source.digests) == source.digest:
            return source
        source.divergence = Divergence(source.rank, source.digest, "manifest")
    return None


def _name_divergences(members: list[_Source], reference: _Source) -> None:
    """Find out in what the sources that differ do differ."""

    def name(source: _Source) -> None:
        source.ask_manifest()
        assert source.manifest is not None and reference.manifest is not None
        entry = first_difference((reference.manifest, reference.digests), (source.manifest, source.digests))
        source.divergence = Divergence(source.rank, source.digest, entry)

    _in_parallel([source for source in members if source.divergence and not source.divergence.entry], name)


def _work(source: _Source, plan: _Plan) -> None:
    """Bring units until there are none left. What was asked for and did not come goes back to the queue."""
    asked: deque[Unit] = deque()
    try:
        while True:
            while len(asked) < _IN_FLIGHT and (unit := plan.queue.take(block=not asked)) is not None:
                asked.append(unit)
                ask(source.sock, Ask.CHUNKS, first=unit.first, count=unit.count)
            if not asked:
                return
            _bring(source, plan, unit=asked[0])
            asked.popleft()
            plan.queue.done()
    except StateDivergence as error:
        source.divergence = Divergence(source.rank, source.digest, error.where)
    finally:
        plan.queue.back(asked)


def _bring(source: _Source, plan: _Plan, *, unit: Unit) -> None:
    """Receive one unit and check it. Raises StateDivergence for wrong bytes, PeerLost, OSError."""
    status, length = receive_header(source.sock)
    if status != Status.OK or length != unit.nbytes:
        raise PeerLost(f"rank {source.rank} gives no state any more (status {status})")
    chunks = plan.chunks[unit.first : unit.first + unit.count]
    receive_into(source.sock, [_view(plan.buffers, chunk) for chunk in chunks])
    source.moved += length
    wrong = plan.wrong(unit.first, unit.count)
    if wrong:
        name = plan.manifest.entries[plan.chunks[wrong[0]].entry].name
        raise StateDivergence(f"rank {source.rank} sent other bytes than it announced", where=name)


def _left(members: list[_Source]) -> SourcesLost:
    """The sources that failed, as the error to raise if they were all."""
    lost = tuple(source.rank for source in members if source.lost)
    return SourcesLost(lost, tuple(source.divergence for source in members if source.divergence))
