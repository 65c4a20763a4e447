"""One member's connection to all others: listeners, links, watch links, and the mode its collectives run in.

LIVE: collectives run over links. POISONED: a loss was seen or told; pending and later collectives complete at once
with unspecified data until `install`. LOCAL: a joiner runs its set-up; collectives are answered by itself.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from keepstep.errors import Fenced, GroupAborted, MembershipError, TransportError
from keepstep.records.messages import Address
from keepstep.records.ring import SpanKind
from keepstep.training.authentication import Greeting, Verdict
from keepstep.training.ballot import Ballot
from keepstep.training.dialing import Errand, Identity, dial_member
from keepstep.training.directory import Directory
from keepstep.training.doors import Doors
from keepstep.training.gates import Gates
from keepstep.training.links import AGREEMENT_GROUP, Channel, Links
from keepstep.training.paths import PathPlan
from keepstep.training.places import Mode, Place
from keepstep.training.plane import Domain, Lane, Plane
from keepstep.training.spares import Arrived
from keepstep.training.turning import Move, MoveVote, Turned, Turning, smallest
from keepstep.training.watch import News, Watch, watch_peers

if TYPE_CHECKING:  # a fabric works without torch, which the drills of a training process need
    from keepstep.training.injection import Injector

__all__ = ["Fabric", "Mode", "Place", "connect_fabric", "current_fabric"]

_PATH = re.compile(r"path [0-9]{1,9}")  # a link for a plan of that number
_MOVE = re.compile(r"move [0-9]{1,9}")  # a link for a move of that number
_DIAL_TIMEOUT_S = 120.0
_FAREWELL_GRACE_S = 0.2


class Fabric:
    """One per process. `protected` says that somebody replaces lost members: then nothing ever raises for a loss.

    `on_loss` (may be set later) is called with the global rank of a lost member, at most once per generation and
    rank, from a thread of the fabric; -1 means that this member itself was refused by the others.
    """

    def __init__(
        self,
        doors: Doors,
        place: Place,
        *,
        secret: bytes,
        directory: Directory,
        protected: bool,
        on_loss: Callable[[int], None] | None = None,
    ) -> None:
        self.rank, self.world = place.rank, place.world
        self.ranks = place.ranks or tuple(range(place.world))
        self.address = doors.address
        self.directory = directory
        self.protected = protected
        self.on_loss = on_loss
        self.drills: Injector | None = None
        self.ballot = Ballot()
        self.gates = Gates()
        self.exposed = False  # between two steps: a collective that a loss cuts raises, since nobody can redo it
        self._doors, self._secret = doors, secret
        self._lock = threading.RLock()
        self._local = False
        self._closed = False
        self._lost: set[int] = set()
        self._loss = threading.Event()
        self._left: set[int] = set()
        self._early: set[tuple[int, int]] = set()
        self._served: dict[str, Callable[[socket.socket], None]] = {}
        self._calling: set[int] = set()
        self._voided: Counter[int] = Counter()  # by rank: how often its links were made void
        self._stood_down = False
        self.turning = Turning(self._least, rank=self.rank, ranks=self.ranks)
        self._domain = Domain(protected=protected)
        weakref.finalize(self, self._domain.close).atexit = False  # when no thread of ours can use it any more
        self._domain.install(place.generation)
        identity = Identity(doors.address, place.rank, secret)
        self._links = Links(self._domain, identity, directory=directory, lost=self._gone)
        self._watch = Watch(self._domain, self)
        doors.open(self, secret)

    # ------------------------------------------------------------------ what others ask

    @property
    def mode(self) -> Mode:
        """How collectives are carried out now."""
        if self._local and not self._closed:
            return Mode.LOCAL
        return Mode.POISONED if self._domain.poisoned else Mode.LIVE

    @property
    def generation(self) -> int:
        """The installed generation."""
        return self._domain.generation

    @property
    def lost(self) -> frozenset[int]:
        """Global ranks known to be lost in this generation."""
        with self._lock:
            return frozenset(self._lost)

    def await_loss(self, timeout_s: float) -> frozenset[int]:
        """`lost`, after waiting at most `timeout_s` for news: a link may break before it is known why."""
        self._loss.wait(timeout_s)
        return self.lost

    @property
    def left(self) -> frozenset[int]:
        """Global ranks that left in good order."""
        with self._lock:
            return frozenset(self._left)

    @property
    def recording(self) -> bool:
        """Whether the recorder writes."""
        return self._domain.recording

    @recording.setter
    def recording(self, on: bool) -> None:
        """Switches the recorder on or off."""
        self._domain.recording = on

    def record_into(self, base_address: int, size: int) -> None:
        """Gives the recorder its ring of `size` bytes."""
        self._domain.record_into(base_address, size)

    def set_step(self, step: int) -> None:
        """The step that records carry from now on."""
        self._domain.set_step(step)

    def span_begin(self, what: SpanKind) -> int:
        """Tells the recorder that the training loop begins `what`; the result is for `span_end`."""
        return self._domain.span_begin(what)

    def span_end(self, mark: int) -> None:
        """Tells the recorder that it ended."""
        self._domain.span_end(mark)

    def limit(self, rank: int, bytes_per_s: float | None) -> None:
        """A drill on the link to `rank`; see `Domain.limit`."""
        self._domain.limit(rank, bytes_per_s)

    def limited_bytes(self, rank: int) -> int:
        """Bytes sent to `rank` since its drill began."""
        return self._domain.limited_bytes(rank)

    def channel(self, group: str, lane: Lane, *, ranks: tuple[int, ...]) -> Channel:
        """The plane of one lane of a group of global `ranks`, with its links."""
        return self._links.channel(group, lane, ranks=ranks)

    def close_group(self, group: str) -> None:
        """Ends a group: its pending collectives end at once, its links are closed."""
        self._links.close_group(group)

    def inodes(self) -> dict[tuple[str, int, int], int]:
        """Socket inodes of all links by (group, lane, rank); watch links have the group "watch" and lane -1."""
        watched = {("watch", -1, rank): inode for rank, inode in self._watch.inodes().items()}
        return {**self._links.inodes(), **watched}

    # ------------------------------------------------------------------ modes

    def go_local(self) -> None:
        """Answers collectives locally from now on, until `install`."""
        self._local = True

    def start_watch(self) -> None:
        """Dials the watch links that are missing; returns at once. `install` does it, too."""
        with self._lock:
            there = self._watch.linked() | self._calling | self._left
            wanted = [rank for rank in watch_peers(self.rank, self.ranks) if rank > self.rank and rank not in there]
            self._calling.update(wanted)
        for rank in wanted:
            threading.Thread(target=self._call_watch, args=(rank,), name="keepstep-dial", daemon=True).start()

    def poison(self) -> None:
        """Ends all pending collectives and lets later ones end at once; any thread, idempotent."""
        self._domain.poison()
        self.gates.stop()
        self._links.interrupt()

    def install(self, generation: int, roster: Mapping[int, Address], *, renew: bool = False) -> None:
        """Takes `roster` in `generation`: links to changed members go, all others stay; the mode becomes LIVE.

        With `renew` all links are made anew: some broke, their members live. To be called while no collective runs. A
        loss of this generation that others told already poisons at once.
        """
        with self._lock:
            changed = self.directory.replace(roster) - {self.rank}
            if renew:
                changed = frozenset(self.ranks) - {self.rank}
            self._voided.update(changed)
            self.turning.drop()
            self.turning.close_retired()
            self._links.resume(changed)
            self._watch.renew(generation, changed)
            self._stood_down = False
            early = self._begun(generation)
        self._go_on(early, generation)

    def _begun(self, generation: int) -> list[int]:
        """With the lock held: nobody is lost in `generation` but those that others told already."""
        self._lost.clear()
        self._loss.clear()
        self._local = False
        early = [rank for told, rank in self._early if told == generation]
        self._early = {told for told in self._early if told[0] > generation}
        return early

    def _go_on(self, early: list[int], generation: int) -> None:
        self._doors.reconsider()
        self.start_watch()
        for rank in early:
            self._gone(rank, generation)

    def agreement(self) -> bool:
        """Whether every member of the world came here in this generation. False in LOCAL or POISONED mode.

        It also counts the votes of `ballot` and finds out whether a change is due that all members make by themselves:
        `turn` may follow.
        """
        paths = self._links.paths
        settled = self.gates.settled()
        return settled and self.turning.agreement(self.ballot, prepared=paths.prepared, installed=paths.installed)

    def least(self, votes: Sequence[int]) -> tuple[int, ...]:
        """The smallest of each vote over all members, who all call this at one boundary; empty if one is missing."""
        return self._least(*votes)

    def quiet(self) -> bool:
        """Whether no collective of this member runs or waits."""
        return self._links.quiet()

    def prepare_paths(self, plan: PathPlan, *, ready: Callable[[str], None]) -> None:
        """Dials the links that `plan` moves, beside those in use; `ready("")`, or why not, from any thread."""
        self._links.prepare_paths(plan, ready=ready)

    def turn(self, *, moves: bool = True) -> Turned:
        """At a step boundary behind an agreement: makes the change that is due if all members can. All members call it,
        at the same boundary. Where a vote about a move (with `moves`) has passed, `install_move` or `stand_down` must
        follow."""
        if not moves:
            self.turning.put_off()
        vote = self.turning.vote(quiet=self._links.stands_still)
        due = self.turning.due_plan()
        if vote is not None or not due:
            return Turned(move=vote)
        if not self.turning.all_ready(self._links.paths.prepared == due and self._links.quiet()):
            return Turned()
        self._links.switch_paths()
        return Turned(plan=due)

    # ------------------------------------------------------------------ members that move

    @property
    def busy(self) -> bool:
        """Whether any collective or message is under way."""
        return self._links.busy()

    def peers(self) -> frozenset[int]:
        """The global ranks that this member has a link or a watch link with."""
        return self._links.peers() | self._watch.linked()

    @property
    def watched(self) -> frozenset[int]:
        """The global ranks that this member has a watch link with."""
        return self._watch.linked()

    def prepare_move(self, move: Move, *, ready: Callable[[str], None]) -> None:
        """Takes part in `move`: a stayer dials, beside each link to a leaver, one to its joiner. `ready("")`, or why
        not, from any thread. A leaver is ready when `turning` is told so."""
        self.turning.begin(move)

        def dialled(why: str) -> None:
            self.turning.ready(move.number, yes=not why)
            ready(why)

        if not move.leaving:
            self._links.prepare_move(move.number, move.ranks, ready=dialled)

    def cancel_move(self) -> None:
        """What was prepared for a move is dropped."""
        self.turning.drop()
        self._links.moves.drop()

    def install_move(self, vote: MoveVote, *, roster: Mapping[int, Address] | None = None) -> None:
        """The move is made: its generation begins with the prepared links in place of those to the leavers, which are
        closed after the next agreement. A joiner gives the `roster`. To be called while no collective runs."""
        move = self.turning.move
        known = move.ranks if move is not None and move.number == vote.number else {}
        with self._lock:
            self.turning.drop()
            if roster is not None:
                self.directory.replace(roster)
            gone = vote.ranks if roster is None else frozenset[int]()
            self._voided.update(gone)
            for rank in gone:
                self.directory.pass_on(rank, known.get(rank))
            self._left -= vote.ranks
            retired = self._links.replace(vote.number, gone, creator=roster is None)
            self.turning.retire([*retired, *self._watch.retire(vote.generation, gone)])
            early = self._begun(vote.generation)
        self._go_on(early, vote.generation)

    def stand_down(self) -> None:
        """This member's place is another's now: it says nothing of losses and no good-bye, unless a later generation is
        installed."""
        self._stood_down = True

    def _least(self, *values: int) -> tuple[int, ...]:
        """The smallest of each value over all members; empty if somebody is missing."""
        if self.mode is not Mode.LIVE:
            return ()
        return smallest(self.channel(AGREEMENT_GROUP, Lane.COLLECTIVE, ranks=self.ranks), values)

    # ------------------------------------------------------------------ other connections

    def serve(self, kind: str, handler: Callable[[socket.socket], None]) -> None:
        """Gives authenticated connections of `kind` to `handler`, each in its own thread; the handler closes them."""
        with self._lock:
            self._served[kind] = handler

    def dial(
        self, address: Address, kind: str, *, timeout_s: float = _DIAL_TIMEOUT_S, generation: int = 0
    ) -> socket.socket:
        """An authenticated connection to the member at `address`, in the newer of `generation` and ours (a joiner may
        have missed some). Raises PeerLost or Fenced."""
        return self._dial(address, kind, generation=max(generation, self.generation), timeout_s=timeout_s)

    def _dial(
        self,
        address: Address,
        kind: str,
        *,
        generation: int,
        timeout_s: float = _DIAL_TIMEOUT_S,
        interrupt_fd: int = -1,
    ) -> socket.socket:
        errand = Errand(kind, generation, (), timeout_s, interrupt_fd)
        return dial_member(Identity(self.address, self.rank, self._secret), address, errand=errand)

    def _call_watch(self, rank: int) -> None:
        """Dials one watch link; again if the membership changed meanwhile. One call per pair at a time."""
        while not self._closed:
            generation, voided = self.generation, self._voided[rank]
            try:
                address = self.directory.resolve(rank, _DIAL_TIMEOUT_S)
                sock = self._dial(address, "watch", generation=generation, interrupt_fd=self._links.interrupt_fd)
            except (TransportError, MembershipError) as error:
                with self._lock:
                    if self.generation != generation:
                        continue
                    self._calling.discard(rank)
                if not isinstance(error, GroupAborted):  # the next generation calls again
                    self._gone(-1 if isinstance(error, Fenced) else rank, generation)
                return
            with self._lock:
                if self._voided[rank] == voided and self.directory.admits(rank, address.member):
                    self._calling.discard(rank)
                    self._watch.add(rank, sock)
                    return
            sock.close()

    # ------------------------------------------------------------------ callers (doors.Host), in the porter thread

    def judge(self, greeting: Greeting) -> Verdict:
        """Fencing: an older generation or a stranger is refused, a newer generation waits for our own `install`."""
        if greeting.generation < self.generation:
            return Verdict.STALE
        if greeting.kind in self._served:
            return Verdict.WELCOME
        if _MOVE.fullmatch(greeting.kind):
            return Verdict.WELCOME if self._local else Verdict.UNKNOWN
        if greeting.kind not in ("link", "watch") and not _PATH.fullmatch(greeting.kind):
            return Verdict.UNKNOWN
        if greeting.generation > self.generation or self._local:
            return Verdict.PARKED
        if not self.directory.admits(greeting.rank, greeting.member):
            return Verdict.STRANGER
        return self._links.judge(greeting) if greeting.kind == "link" else Verdict.WELCOME

    def withdrawn(self, greeting: Greeting) -> None:
        """A welcome caller hung up before it confirmed."""
        if greeting.kind == "link":
            self._links.withdrawn(greeting)

    def deliver(self, greeting: Greeting, sock: socket.socket, *, memory_fd: int) -> None:
        """A confirmed connection."""
        if greeting.kind == "link":
            self._links.deliver(greeting, sock, memory_fd=memory_fd)
        elif greeting.kind == "watch" and self.directory.admits(greeting.rank, greeting.member):
            self._watch.add(greeting.rank, sock)
        elif _PATH.fullmatch(greeting.kind):
            self._links.deliver_path(greeting, sock)
        elif _MOVE.fullmatch(greeting.kind):
            self._links.keep_for_move(greeting, Arrived(sock, memory_fd))
        elif greeting.kind in self._served:
            handler = self._served[greeting.kind]
            threading.Thread(target=handler, args=(sock,), name=f"keepstep-{greeting.kind}", daemon=True).start()
        else:
            sock.close()

    # ------------------------------------------------------------------ losses (watch.WatchEvents)

    def heard(self, news: News, rank: int, *, generation: int) -> None:
        """News of a neighbour: acts on them and passes them on, once."""
        if news is News.LEFT:
            with self._lock:
                fresh = rank not in self._left
                self._left.add(rank)
            if fresh:
                self._watch.tell(News.LEFT, rank, generation=generation)
        else:
            self._gone(rank, generation)

    def hung_up(self, rank: int, generation: int) -> None:
        """A watch link broke: a loss, unless that member said good-bye."""
        self._gone(rank, generation)

    def links_failed(self, failed: frozenset[tuple[Plane, int]], generation: int) -> None:
        """Data links broke. Without protection a good-bye that is still on its way is given a moment."""
        ranks = {plane.global_ranks[peer] for plane, peer in failed}
        if self.protected:
            self._all_gone(ranks, generation)
            if self.on_loss is not None and generation == self.generation and not self._stood_down:
                for rank in ranks & self.left:  # it left in good order while others still needed it
                    self.on_loss(rank)
            return
        timer = threading.Timer(_FAREWELL_GRACE_S, self._all_gone, args=(ranks, generation))
        timer.daemon = True
        timer.start()

    def _all_gone(self, ranks: set[int], generation: int) -> None:
        for rank in ranks:
            self._gone(rank, generation)

    def _gone(self, rank: int, generation: int) -> None:
        """A member was lost in `generation`: poison, tell the neighbours, report; once. An older one is over."""
        with self._lock:
            if generation > self.generation:
                self._early.add((generation, rank))
            if generation != self.generation:
                return
            if self._closed or self._stood_down or rank in self._left or rank in self._lost or rank == self.rank:
                return
            self._lost.add(rank)
            self._loss.set()
            self.poison()
        if rank >= 0:
            self._watch.tell(News.LOST, rank, generation=generation)
        if self.on_loss is not None:
            self.on_loss(rank)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leaves in good order: neighbours are told, so that nobody takes it for a loss. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._stood_down:
            self._watch.tell(News.LEFT, self.rank, generation=self.generation)
        self.turning.close_retired()
        self._doors.close()
        self._links.close()
        self._watch.close()
        with contextlib.suppress(ValueError):
            if current_fabric() is self:
                connect_fabric(None)


_current: list[Fabric] = []


def connect_fabric(fabric: Fabric | None) -> None:
    """Makes `fabric` the one that process groups of this process use (None: none)."""
    _current[:] = [] if fabric is None else [fabric]


def current_fabric() -> Fabric | None:
    """The fabric of this process, if there is one."""
    return _current[0] if _current else None
