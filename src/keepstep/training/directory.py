"""Who is where: the addresses of all members by global rank.

`RosterDirectory` is given by the controller; `StoreDirectory` meets in a torch store when nobody leads the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import msgspec

from keepstep.errors import PeerLost, WorldMismatch
from keepstep.records.messages import Address

__all__ = ["Directory", "RosterDirectory", "Store", "StoreDirectory"]


class Store(Protocol):
    """The part of a torch store that is used here."""

    def set(self, key: str, value: bytes | str) -> None:
        """Keeps `value` under `key`."""
        ...

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until all keys are there; raises RuntimeError after `timeout`."""
        ...


class Directory(Protocol):
    """Answers where a rank is reached."""

    def resolve(self, rank: int, timeout_s: float) -> Address:
        """The address of global `rank`; waits at most `timeout_s` until it is known. Raises PeerLost."""
        ...

    def known(self) -> dict[int, Address]:
        """All addresses known by now."""
        ...

    def admits(self, rank: int, member: str) -> bool:
        """Whether `member` may be `rank`; never waits."""
        ...

    def replace(self, roster: Mapping[int, Address]) -> frozenset[int]:
        """Takes `roster` as the new truth; returns the ranks whose address changed."""
        ...

    def pass_on(self, rank: int, address: Address | None) -> None:
        """The rank has another member now, at `address` (None: somewhere). The former one is not admitted any more."""
        ...


class RosterDirectory:
    """A directory that is told everything, but for members that moved: `ask(rank)`, which may be set later, asks for
    the address of one, and `pass_on` gives the answer."""

    def __init__(self, roster: Mapping[int, Address]) -> None:
        self._roster = dict(roster)
        self._former: dict[int, str] = {}
        self._guests: dict[int, str] = {}
        self._change = threading.Condition()
        self.ask: Callable[[int], None] | None = None

    def resolve(self, rank: int, timeout_s: float) -> Address:
        """The address of `rank`; waits at most `timeout_s` for that of one that moved. Raises PeerLost, and
        WorldMismatch if there is no such rank."""
        with self._change:
            moved = rank in self._former and rank not in self._roster
        if moved and self.ask is not None:
            self.ask(rank)
        with self._change:
            if moved and not self._change.wait_for(lambda: rank in self._roster, timeout_s):
                raise PeerLost(f"nobody says where rank {rank} has moved to", where=f"rank {rank}")
            if rank not in self._roster:
                raise WorldMismatch(f"rank {rank} is not in the roster of {len(self._roster)} members")
            return self._roster[rank]

    def known(self) -> dict[int, Address]:
        """The addresses known."""
        with self._change:
            return dict(self._roster)

    def admits(self, rank: int, member: str) -> bool:
        """Whether `member` may be `rank`. Of one that moved, the first but its former one: the secret vouches."""
        with self._change:
            address = self._roster.get(rank)
            if address is None:
                new = rank in self._former and self._former[rank] != member
                return new and self._guests.setdefault(rank, member) == member
            return address.member == member

    def replace(self, roster: Mapping[int, Address]) -> frozenset[int]:
        """Installs `roster`; returns the ranks whose address is new, other or gone."""
        with self._change:
            old, self._roster = self._roster, dict(roster)
            known = {rank for rank, guest in self._guests.items() if rank in roster and roster[rank].member == guest}
            self._former.clear()
            self._guests.clear()
            self._change.notify_all()
        changed = (rank for rank in old.keys() | roster.keys() if old.get(rank) != roster.get(rank))
        return frozenset(changed) - known

    def pass_on(self, rank: int, address: Address | None) -> None:
        """The rank has another member now, at `address` (None: not known yet)."""
        with self._change:
            old = self._roster.pop(rank, None)
            if old is not None and old != address:
                self._former[rank] = old.member
            if address is not None:
                self._roster[rank] = address
                self._guests.pop(rank, None)
                self._change.notify_all()


class StoreDirectory:
    """A directory in a torch store: every member publishes its address and reads those it needs once."""

    def __init__(self, store: Store, *, prefix: str = "keepstep/address/") -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._found: dict[int, Address] = {}

    def publish(self, rank: int, address: Address) -> None:
        """Makes `address` known as that of `rank`."""
        with self._lock:
            self._found[rank] = address
        self._store.set(f"{self._prefix}{rank}", msgspec.json.encode(address))

    def resolve(self, rank: int, timeout_s: float) -> Address:
        """The address of `rank`; waits until it is published. Raises PeerLost after `timeout_s`."""
        with self._lock:
            if rank in self._found:
                return self._found[rank]
        key = f"{self._prefix}{rank}"
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            address = msgspec.json.decode(bytes(self._store.get(key)), type=Address)
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise PeerLost(f"rank {rank} has not published its address: {error}", where=f"rank {rank}") from error
        with self._lock:
            return self._found.setdefault(rank, address)

    def known(self) -> dict[int, Address]:
        """The addresses read by now."""
        with self._lock:
            return dict(self._found)

    def admits(self, rank: int, member: str) -> bool:
        """Whether `member` may be `rank`: yes as long as nothing else is known; the secret vouches for it."""
        with self._lock:
            address = self._found.get(rank)
        return address is None or address.member == member

    def replace(self, roster: Mapping[int, Address]) -> frozenset[int]:
        """Takes `roster` as the new truth; returns the ranks whose address changed."""
        with self._lock:
            old, self._found = self._found, dict(roster)
        return frozenset(rank for rank in old.keys() | roster.keys() if old.get(rank) != roster.get(rank))

    def pass_on(self, rank: int, address: Address | None) -> None:
        """The rank has another member now; without an `address` the one in the store holds."""
        with self._lock:
            if address is not None:
                self._found[rank] = address
