"""Who is where: the addresses of all members by global rank.

`RosterDirectory` is given by the controller; `StoreDirectory` meets in a torch store when nobody leads the job.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
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


class RosterDirectory:
    """A directory that is told everything."""

    def __init__(self, roster: Mapping[int, Address]) -> None:
        self._roster = dict(roster)

    def resolve(self, rank: int, timeout_s: float) -> Address:
        """The address of `rank`. Raises WorldMismatch if the roster does not have it; never waits."""
        try:
            return self._roster[rank]
        except KeyError:
            raise WorldMismatch(f"rank {rank} is not in the roster of {len(self._roster)} members") from None

    def known(self) -> dict[int, Address]:
        """The roster."""
        return dict(self._roster)

    def admits(self, rank: int, member: str) -> bool:
        """Whether the roster gives `rank` to `member`."""
        address = self._roster.get(rank)
        return address is not None and address.member == member

    def replace(self, roster: Mapping[int, Address]) -> frozenset[int]:
        """Installs `roster`; returns the ranks whose address is new, other or gone."""
        old, self._roster = self._roster, dict(roster)
        return frozenset(rank for rank in old.keys() | roster.keys() if old.get(rank) != roster.get(rank))


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
