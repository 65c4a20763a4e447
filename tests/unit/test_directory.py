"""Directories: who is where, what changed, who is admitted."""

from __future__ import annotations

from datetime import timedelta

import pytest

from keepstep.errors import PeerLost, WorldMismatch
from keepstep.records.messages import Address
from keepstep.training.directory import RosterDirectory, StoreDirectory


def address(member: str) -> Address:
    return Address(member, "node", f"local-{member}", "127.0.0.1", 1)


class MemoryStore:
    """A store in one process: `wait` does not wait."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if any(key not in self.kept for key in keys):
            raise RuntimeError("wait timeout")


def test_a_roster_says_what_changed() -> None:
    directory = RosterDirectory({0: address("a"), 1: address("b"), 2: address("c")})
    assert directory.replace({0: address("a"), 1: address("x"), 3: address("d")}) == {1, 2, 3}
    assert directory.resolve(1, 0.0) == address("x")
    with pytest.raises(WorldMismatch, match="rank 2"):
        directory.resolve(2, 0.0)


def test_a_roster_admits_only_its_members() -> None:
    directory = RosterDirectory({0: address("a")})
    assert directory.admits(0, "a")
    assert not directory.admits(0, "b")
    assert not directory.admits(1, "a")


def test_members_meet_in_a_store() -> None:
    store = MemoryStore()
    first, second = StoreDirectory(store), StoreDirectory(store)
    first.publish(0, address("a"))
    assert second.resolve(0, 1.0) == address("a")
    assert second.known() == {0: address("a")}
    assert second.admits(0, "a")
    assert not second.admits(0, "b")
    assert second.admits(7, "unknown yet")
    with pytest.raises(PeerLost, match="rank 1"):
        second.resolve(1, 0.1)


def test_damaged_addresses_are_refused() -> None:
    store = MemoryStore()
    store.set("keepstep/address/3", b"{not an address")
    with pytest.raises(PeerLost):
        StoreDirectory(store).resolve(3, 1.0)
