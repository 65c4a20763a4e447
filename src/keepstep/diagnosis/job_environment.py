"""The fingerprint of the environment a job runs in, from what its members say of themselves."""

from __future__ import annotations

from collections import defaultdict
from zlib import crc32

from keepstep.diagnosis.live_state import Watch
from keepstep.records.summary import Fingerprint

__all__ = ["fingerprint_of"]


def fingerprint_of(watch: Watch) -> Fingerprint:
    """Layout, batch, world, topology, versions and hardware, as far as they were told."""
    families: dict[tuple[str, int], set[int]] = defaultdict(set)
    for profile in watch.profiles.values():
        for entry in profile.groups:
            families["messages" if entry.lane else "collectives", entry.size].add(entry.hash)
    places = sorted((rank, seen.node) for rank, seen in watch.seen.items())
    profiles = [watch.profiles[rank] for rank in sorted(watch.profiles)]
    return Fingerprint(
        world=watch.plan.world,
        layout=tuple(sorted((kind, len(groups), size) for (kind, size), groups in families.items())),
        batch=profiles[0].batch if profiles else "",
        topology=f"{crc32(repr(_shape(places)).encode()):08x}",
        versions=tuple(sorted({pair for profile in profiles for pair in profile.versions})),
        hardware=tuple(sorted({profile.hardware for profile in profiles if profile.hardware})),
    )


def _shape(places: list[tuple[int, str]]) -> list[int]:
    """Which ranks share a node, whatever it is called: the number of each rank's node in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(node, len(numbers)) for _, node in places]
