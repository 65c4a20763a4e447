"""The links of one member: which exist, who dials, what arrived early.

A link belongs to one plane (group and lane) and one peer. Whoever needs it first dials, in a thread of its own, so
that submitting a call never blocks; the plane holds the call until the link is there. Where two members dial each
other at once, the call of the lower global rank stands and the other one is answered CROSSED. A link that arrives
before its plane exists waits in the inbox.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from keepstep.errors import Fenced, GroupAborted, MembershipError, PeerLost, TransportError, UsageError
from keepstep.records.messages import Address
from keepstep.training.authentication import Greeting, Verdict
from keepstep.training.dialing import Errand, Identity, dial_link
from keepstep.training.directory import Directory
from keepstep.training.paths import PathPlan, Paths
from keepstep.training.plane import Call, Domain, Lane, Op, Plane
from keepstep.training.spares import Arrived, LinkKey, Spares

__all__ = ["AGREEMENT_GROUP", "Channel", "Links"]

AGREEMENT_GROUP = "keepstep.agreement"
"""The group of all members that a step is agreed in."""

_DIAL_TIMEOUT_S = 120.0
_SIZED = (Op.ALL_REDUCE, Op.REDUCE, Op.BROADCAST)
_MOST_READY = 4096
_NO_LINGER = struct.pack("ii", 1, 0)
_PATH_TIMEOUT_S = 5.0
_LOOKS = 40
_LOOK_EVERY_S = 0.0025


class Channel:
    """One plane with its links: what a process group submits its calls to."""

    def __init__(self, links: Links, plane: Plane) -> None:
        self.plane = plane
        self.index = {rank: number for number, rank in enumerate(plane.global_ranks)}
        self._links = links
        self._ready: set[tuple[Op, int, int]] = set()

    def submit(self, call: Call) -> int:
        """Hands `call` to the plane and sees to it that the links it needs come up. Returns the ticket."""
        nbytes = sum(size for _, size in call.inputs or call.outputs) if call.op in _SIZED else 0
        key = (call.op, nbytes, call.peer if call.op >= Op.SEND else call.root)
        ticket = self.plane.submit(call)
        if key not in self._ready and self._links.ensure(self, self._needed(call, nbytes)):
            if len(self._ready) > _MOST_READY:
                self._ready.clear()
            self._ready.add(key)
        return ticket

    def forget_ready(self) -> None:
        """Looks at the links again from the next call on."""
        self._ready.clear()

    def _needed(self, call: Call, nbytes: int) -> frozenset[int]:
        if call.op < Op.SEND:
            return self.plane.peers_needed(call.op, nbytes=nbytes, root=call.root)
        if call.peer >= 0:
            return frozenset({call.peer} - {self.plane.rank})
        return frozenset(range(self.plane.size)) - {self.plane.rank}


class Links:
    """All links of this member. `lost(rank, generation)` is called from a dialing thread for a peer that cannot be
    reached, with rank -1 where this member itself was refused. `interrupt_fd` is readable while no call is to wait."""

    def __init__(
        self, domain: Domain, identity: Identity, *, directory: Directory, lost: Callable[[int, int], None]
    ) -> None:
        self._domain = domain
        self._identity = identity
        self._directory = directory
        self._lost = lost
        self._lock = threading.RLock()
        self._channels: dict[tuple[str, int], Channel] = {}
        self._inbox: dict[LinkKey, Arrived] = {}
        self._dialing: set[LinkKey] = set()
        self._voided: Counter[int] = Counter()  # by rank: how often its links were made void
        self._expected: set[LinkKey] = set()
        self.interrupt_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closings: dict[str, int] = {}
        self._pause = threading.Event()
        self._closed = False
        self._joiners: dict[int, Address] = {}
        self.paths = Paths(self._call_path)
        self.moves = Spares(self._call_joiner)

    def channel(self, group: str, lane: Lane, *, ranks: tuple[int, ...]) -> Channel:
        """The channel of `lane` of the group `group` whose members are the global `ranks`; made at the first call."""
        with self._lock:
            group = self._wire_name(group)
            found = self._channels.get((group, lane))
            if found is not None:
                return found
            own = ranks.index(self._identity.rank)
            plane = Plane(self._domain, own, size=len(ranks), lane=lane, group=group, global_ranks=ranks)
            channel = self._channels[group, lane] = Channel(self, plane)
            for key in [key for key in self._inbox if key[:2] == (group, lane)]:
                self._attach(channel, key.peer, arrived=self._inbox.pop(key), creator=False)
            return channel

    def ensure(self, channel: Channel, peers: Iterable[int]) -> bool:
        """Dials what is missing of the group ranks `peers`; True if all are linked already."""
        plane = channel.plane
        missing = frozenset(peers) - plane.linked()
        if not missing or self._domain.poisoned:
            return not missing
        with self._lock:
            for peer in missing - plane.linked():
                key = LinkKey(plane.group, plane.lane, plane.global_ranks[peer])
                if key in self._dialing or key in self._expected or self._awaits(key):
                    continue
                self._dialing.add(key)
                threading.Thread(target=self._dial, args=(channel, key), name="keepstep-dial", daemon=True).start()
        return False

    def _awaits(self, key: LinkKey) -> bool:
        return _planned(key.group, key.lane) and self.paths.awaited(key.peer)

    # ------------------------------------------------------------------ the acceptor's side, in the porter thread

    def judge(self, greeting: Greeting) -> Verdict:
        """CROSSED if our rank is the lower one and we are dialling the same link or have it, else WELCOME."""
        key = LinkKey(greeting.group, greeting.lane, greeting.rank)
        with self._lock:
            if self._identity.rank < greeting.rank and (key in self._dialing or self._stands(key)):
                return Verdict.CROSSED
            self._expected.add(key)
            return Verdict.WELCOME

    def _stands(self, key: LinkKey) -> bool:
        channel = self._channels.get((key.group, key.lane))
        return key in self._inbox or (channel is not None and channel.index.get(key.peer) in channel.plane.linked())

    def withdrawn(self, greeting: Greeting) -> None:
        """The caller hung up before it confirmed: dial ourselves if a call waits for the link."""
        key = LinkKey(greeting.group, greeting.lane, greeting.rank)
        with self._lock:
            self._expected.discard(key)
            channel = self._channels.get((key.group, key.lane))
        if channel is not None:
            channel.forget_ready()

    def deliver(self, greeting: Greeting, sock: socket.socket, *, memory_fd: int) -> None:
        """A confirmed link: attaches it or keeps it for a plane that does not exist yet."""
        key = LinkKey(greeting.group, greeting.lane, greeting.rank)
        with self._lock:
            self._expected.discard(key)
            arrived = Arrived(sock, memory_fd)
            channel = self._channels.get((key.group, key.lane))
            if self._closed or not self._directory.admits(key.peer, greeting.member):
                arrived.discard()
            elif channel is not None:
                self._attach(channel, key.peer, arrived=arrived, creator=False)
            else:
                if key in self._inbox:
                    self._inbox[key].discard()
                self._inbox[key] = arrived

    # ------------------------------------------------------------------ the dialer's side, a thread per missing link

    def _dial(self, channel: Channel, key: LinkKey) -> None:
        """Tries until the link stands, somebody else makes it, or this generation is over."""
        while True:
            generation, voided = self._domain.generation, self._voided[key.peer]
            why: Exception | None = None
            arrived = None
            member = ""
            try:
                address = self._directory.resolve(key.peer, _DIAL_TIMEOUT_S)
                member = address.member
                arrived = self._call(address, key, generation=generation)
            except (TransportError, MembershipError, OSError) as error:
                why = error
            with self._lock:
                over = self._closed or self._domain.poisoned
                if why is not None and not over and self._domain.generation != generation:
                    continue
                if arrived is not None and (self._voided[key.peer] != voided or not self._may(key.peer, member)):
                    arrived.discard()
                    if not over:
                        continue  # the membership has changed since
                    arrived = None
                self._dialing.discard(key)
                if arrived is not None:
                    self._attach(channel, key.peer, arrived=arrived, creator=True)
            if why is not None and not over and not isinstance(why, GroupAborted):
                self._lost(-1 if isinstance(why, Fenced) else key.peer, generation)
            return

    def _may(self, rank: int, member: str) -> bool:
        return not self._closed and self._directory.admits(rank, member)

    def _call(self, address: Address, key: LinkKey, *, generation: int) -> Arrived | None:
        ports = self.paths.source_ports(key.peer) if _planned(key.group, key.lane) else ()
        errand = Errand("link", generation, ports, _DIAL_TIMEOUT_S, self.interrupt_fd)
        return dial_link(self._identity, address, key=key, errand=errand)

    def _call_path(self, key: LinkKey, number: int) -> Arrived:
        ports = self.paths.source_ports(key.peer)
        errand = Errand(f"path {number}", self._domain.generation, ports, _PATH_TIMEOUT_S, self.interrupt_fd)
        address = self._directory.resolve(key.peer, _DIAL_TIMEOUT_S)
        return _certain(dial_link(self._identity, address, key=key, errand=errand))

    def _call_joiner(self, key: LinkKey, number: int) -> Arrived:
        errand = Errand(f"move {number}", self._domain.generation, (), _DIAL_TIMEOUT_S, self.interrupt_fd)
        return _certain(dial_link(self._identity, self._joiners[key.peer], key=key, errand=errand))

    def _attach(self, channel: Channel, rank: int, *, arrived: Arrived, creator: bool) -> None:
        peer = channel.index.get(rank, -1)
        if peer < 0 or peer == channel.plane.rank:
            arrived.discard()
            return
        try:
            if peer in channel.plane.linked():
                channel.plane.unlink(peer)
            self.paths.note(LinkKey(channel.plane.group, channel.plane.lane, rank), arrived.sock)
            if arrived.memory_fd >= 0:
                channel.plane.link_shared(peer, arrived.sock, memory_fd=arrived.memory_fd, creator=creator)
                os.close(arrived.memory_fd)
            else:
                channel.plane.link_tcp(peer, arrived.sock)
        except (UsageError, TransportError):  # the plane was closed meanwhile
            arrived.discard()

    # ------------------------------------------------------------------ planned paths

    def prepare_paths(self, plan: PathPlan, *, ready: Callable[[str], None]) -> None:
        """Dials anew, beside the links in use, what `plan` moves; `ready` as in `Paths.prepare`."""
        with self._lock:
            for channel in self._channels.values():
                channel.forget_ready()
            standing = [key for key in self._standing() if _planned(key.group, key.lane)]
        self.paths.prepare(plan, standing, ready=ready)

    def deliver_path(self, greeting: Greeting, sock: socket.socket) -> None:
        """A link that a peer dialled for a plan; the greeting's kind carries the number of the plan."""
        key = LinkKey(greeting.group, greeting.lane, greeting.rank)
        self.paths.arrived(key, int(greeting.kind.partition(" ")[2]), sock=sock)

    def quiet(self) -> bool:
        """Whether no collective runs or waits."""
        with self._lock:
            return not any(channel.plane.busy for key, channel in self._channels.items() if _planned(*key))

    def switch_paths(self) -> None:
        """Puts the prepared links into use. To be called on all members while all are quiet."""
        with self._lock:
            for key, arrived in self.paths.take().items():
                channel = self._channels.get(key[:2])
                if channel is None or self._closed:
                    arrived.discard()
                else:
                    _reset_on_close(channel.plane.link_fd(channel.index[key.peer]))
                    self._attach(channel, key.peer, arrived=arrived, creator=True)

    # ------------------------------------------------------------------ members that move

    def peers(self) -> frozenset[int]:
        """The global ranks that a link stands to."""
        with self._lock:
            return frozenset(key.peer for key in self._standing())

    def _standing(self) -> list[LinkKey]:
        return [
            LinkKey(group, lane, channel.plane.global_ranks[peer])
            for (group, lane), channel in self._channels.items()
            for peer in channel.plane.linked()
        ]

    def prepare_move(self, number: int, joiners: Mapping[int, Address], *, ready: Callable[[str], None]) -> None:
        """Dials, beside every link to a rank in `joiners`, one to its joiner; `ready` as in `Spares.expect`."""
        with self._lock:
            self._joiners = dict(joiners)
            keys = [key for key in self._standing() if key.peer in joiners]
        self.moves.expect(number, keys, dial=keys, ready=ready)

    def keep_for_move(self, greeting: Greeting, arrived: Arrived) -> None:
        """A joiner keeps a link that a stayer dialled; the greeting's kind carries the number of the move."""
        key = LinkKey(greeting.group, greeting.lane, greeting.rank)
        self.moves.arrived(key, int(greeting.kind.partition(" ")[2]), arrived=arrived)

    def busy(self) -> bool:
        """Whether a call of any kind runs or waits."""
        with self._lock:
            return any(channel.plane.busy for channel in self._channels.values())

    def stands_still(self) -> bool:
        """Whether no call runs or waits. An engine that has ended its last one is given a moment to let go."""
        for _ in range(_LOOKS):
            if not self.busy():
                return True
            self._pause.wait(_LOOK_EVERY_S)
        return False

    def replace(self, number: int, ranks: frozenset[int], *, creator: bool) -> list[int]:
        """Puts the links of move `number` into use (`creator`: this member dialled them) and takes those to the former
        members of `ranks` out of use. Returns the descriptors of these, which their members may still be reading."""
        with self._lock:
            self._voided.update(ranks)
            self.paths.drop()
            retired = [self._retire(key) for key in self._standing() if key.peer in ranks]
            for key in [key for key in self._inbox if key.peer in ranks]:
                retired.append(self._inbox.pop(key).leave_open())
            for key, arrived in self.moves.take(number).items():
                channel = self._channels.get(key[:2])
                if self._closed:
                    arrived.discard()
                elif channel is not None:
                    self._attach(channel, key.peer, arrived=arrived, creator=creator)
                else:
                    self._inbox[key] = arrived
            return retired

    def _retire(self, key: LinkKey) -> int:
        channel = self._channels[key[:2]]
        channel.forget_ready()
        return channel.plane.retire(channel.index[key.peer])

    # ------------------------------------------------------------------ changes

    def interrupt(self) -> None:
        """Ends all calls that wait for an answer; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.interrupt_fd, 1)

    def resume(self, changed: frozenset[int]) -> None:
        """Drops links to the global ranks `changed` and lets calls be made again."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.interrupt_fd)
            self._voided.update(changed)
            self.paths.drop()
            self.moves.drop()
            for key in [key for key in self._inbox if key.peer in changed]:
                self._inbox.pop(key).discard()
            for channel in self._channels.values():
                channel.forget_ready()
                gone = {channel.index[rank] for rank in changed if rank in channel.index}
                for peer in gone & channel.plane.linked():
                    channel.plane.unlink(peer)

    def inodes(self) -> dict[tuple[str, int, int], int]:
        """Socket inode of every link by group, lane and global rank: proof that a link survived."""
        with self._lock:
            return {
                (group, lane, channel.plane.global_ranks[peer]): _inode(channel.plane.link_fd(peer))
                for (group, lane), channel in self._channels.items()
                for peer in channel.plane.linked()
            }

    def close_group(self, group: str) -> None:
        """Closes the planes of one group; its pending calls end at once."""
        with self._lock:
            name = self._wire_name(group)
            self._closings[group] = self._closings.get(group, 0) + 1
            for key in [key for key in self._channels if key[0] == name]:
                self._channels.pop(key).plane.close()
            for waiting in [waiting for waiting in self._inbox if waiting.group == name]:
                self._inbox.pop(waiting).discard()

    def _wire_name(self, group: str) -> str:
        """A group made again under an old name is another one: members may not all have closed the old one yet."""
        closings = self._closings.get(group, 0)
        return f"{group}~{closings}" if closings else group

    def close(self) -> None:
        """Closes everything. Idempotent."""
        with self._lock:
            self._closed = True
            self.interrupt()
            for arrived in self._inbox.values():
                arrived.discard()
            self._inbox.clear()
            self.moves.drop()
            self.paths.drop()
            for channel in self._channels.values():
                channel.plane.close()
            self._channels.clear()


def _inode(descriptor: int) -> int:
    """The same number before and after proves that a link survived; 0: no link."""
    return os.fstat(descriptor).st_ino if descriptor >= 0 else 0


def _reset_on_close(descriptor: int) -> None:
    """A link that carries nothing any more ends with a reset, so that its port can be used again at once."""
    if descriptor >= 0:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            if same.family != socket.AF_UNIX:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _planned(group: str, lane: int) -> bool:
    """Plans are for collectives, but not for the members' own small one, by which they agree to change over."""
    return lane == Lane.COLLECTIVE and group != AGREEMENT_GROUP


def _certain(arrived: Arrived | None) -> Arrived:
    """A call for a change is never answered CROSSED: one side alone dials."""
    if arrived is None:
        raise PeerLost("a member dials a link itself that it should wait for")
    return arrived
