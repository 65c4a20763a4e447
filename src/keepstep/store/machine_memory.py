"""Memory of this machine: how much there is, and how much a process of it may still take, by the system and cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["free_bytes", "machine_bytes"]

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class _Names:
    """What the files of one version of cgroups are called. `cache`: the part of what is taken that is given back."""

    limits: tuple[str, ...]
    taken: str
    cache: str


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")


def free_bytes(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, *, membership: Path = _MEMBERSHIP) -> int:
    """What can still be allocated without swapping: the least of what the system and the cgroups say that this process
    is in, which are its own and all above it."""
    left = (_below_limit(place, names) for place, names in _own_groups(groups, membership))
    return max(0, min(_told(meminfo, "MemAvailable"), *left))


def machine_bytes(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, *, membership: Path = _MEMBERSHIP) -> int:
    """All there is: the memory of the machine, or the least limit of the cgroups that this process is in."""
    limits = (_limit(place, names) for place, names in _own_groups(groups, membership))
    return min(_told(meminfo, "MemTotal"), *limits)


def _own_groups(groups: Path, membership: Path) -> Iterator[tuple[Path, _Names]]:
    """The directories of the cgroups of this process and of those above them, up to where they are mounted.

    Version 2 is mounted at `groups`, the memory of version 1 in `memory` under it; a machine may have both.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {controllers: path for _, controllers, path in (line for line in lines if len(line) == 3)}
    one = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), "/")
    for mounted, path, names in ((groups, paths.get("", "/"), _V2), (groups / "memory", one, _V1)):
        for place in _upwards(path):
            yield mounted / place, names


def _upwards(path: str) -> Iterator[PurePosixPath]:
    """`path` and all above it, without the leading slash; the top alone if it lies outside of what is mounted here."""
    own = PurePosixPath(path.lstrip("/"))
    yield from (own, *own.parents) if ".." not in own.parts else (PurePosixPath(),)


def _below_limit(place: Path, names: _Names) -> int:
    """What a group may still take; what it keeps of files only to read them faster does not count as taken."""
    limit, taken = _limit(place, names), _number(place / names.taken)
    if limit >= _UNLIMITED or taken is None:
        return _UNLIMITED
    return limit - taken + _cache(place, names)


def _limit(place: Path, names: _Names) -> int:
    """The least limit of a group. Version 1 writes a number near 2**63 for none."""
    found = (_number(place / name) for name in names.limits)
    return min((number for number in found if number is not None), default=_UNLIMITED)


def _cache(place: Path, names: _Names) -> int:
    try:
        words = [line.split() for line in (place / "memory.stat").read_text().splitlines()]
        return next((int(word[1]) for word in words if word[0] == names.cache), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(file: Path) -> int | None:
    """What the file says; None where there is no such file, or no limit ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _told(meminfo: Path, name: str) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _UNLIMITED
