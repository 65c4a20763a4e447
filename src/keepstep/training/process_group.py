"""Registers the backend `keepstep` with torch.distributed and makes its groups.

With a fabric of an agent (`connect_fabric`) all groups use that one. Without, as under plain torchrun, the first
group makes an unprotected fabric whose members meet in the group's store; it ends with its last group.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from keepstep.errors import PeerLost
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.directory import Store, StoreDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place, current_fabric

__all__ = ["BACKEND", "Options", "node_identity", "register"]

BACKEND = "keepstep"


@dataclass(frozen=True)
class Options:
    """`pg_options` of `init_process_group`: the `node` members with equal names share memory on (empty: found out),
    and the `host` to listen on (empty: the address that reaches the store)."""

    node: str = ""
    host: str = ""


def register() -> None:
    """Makes "keepstep" known to torch.distributed. Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def node_identity() -> str:
    """A name that is equal exactly for processes that can share memory: host, boot and network namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"


_groups: dict[int, set[str]] = {}
_own: list[Fabric] = []
_lives: dict[tuple[int, ...], int] = {}


def _create(asked: Any, options: object) -> KeepstepGroup:
    ranks = tuple(asked.global_ranks_in_group) or tuple(range(asked.group_size))
    wanted = options if isinstance(options, Options) else Options()
    fabric = current_fabric() or _suitable(ranks, wanted)
    if fabric is None:
        fabric = _make_fabric(asked, ranks, options=wanted)
        _own.append(fabric)
    name = asked.group_id
    _groups.setdefault(id(fabric), set()).add(name)
    made = fabric
    return KeepstepGroup(fabric, name, ranks=ranks, timeout=asked.timeout, on_shutdown=lambda: _ended(made, name))


def _suitable(ranks: tuple[int, ...], options: Options) -> Fabric | None:
    fits = (fabric for fabric in _own if options.node in ("", fabric.address.node))
    return next((fabric for fabric in fits if set(ranks) <= set(fabric.ranks)), None)


def _ended(fabric: Fabric, name: str) -> None:
    left = _groups.get(id(fabric), set())
    left.discard(name)
    if not left and fabric in _own:
        _own.remove(fabric)
        _groups.pop(id(fabric), None)
        fabric.close()


@atexit.register
def _close_all() -> None:
    for fabric in list(_own):
        fabric.close()


def _make_fabric(asked: Any, ranks: tuple[int, ...], *, options: Options) -> Fabric:
    rank, store = ranks[asked.group_rank], asked.store
    # A world that was destroyed and made again finds the keys of its earlier life in the same store.
    life = _lives[ranks] = _lives.get(ranks, 0) + 1
    member = f"rank{rank}-{secrets.token_hex(6)}"
    doors = Doors(member, options.node or node_identity(), host=options.host or _own_host())
    directory = StoreDirectory(store, prefix=f"keepstep/{life}/address/")
    directory.publish(rank, doors.address)
    place = Place(rank, len(ranks), 1, ranks)
    secret = _shared_secret(store, asked.group_rank, key=f"keepstep/{life}/secret", timeout=asked.timeout)
    fabric = Fabric(doors, place, secret=secret, directory=directory, protected=False)
    fabric.start_watch()
    return fabric


def _shared_secret(store: Store, rank: int, *, key: str, timeout: timedelta) -> bytes:
    """The store is what the members trust: whoever reads it may take part."""
    if rank == 0:
        secret = secrets.token_bytes(32)
        store.set(key, secret.hex())
        return secret
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise PeerLost(f"rank 0 did not come to the store: {error}", remedy="see why rank 0 did not start") from error
    return bytes.fromhex(bytes(store.get(key)).decode("ascii"))


def _own_host() -> str:
    """The own address towards the master that torchrun names; loopback where that is this machine's loopback."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
