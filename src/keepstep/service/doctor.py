"""What this machine lacks: one check a line, each with a remedy."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["Check", "examine", "healthy", "plane_library", "show"]

_TESTED_TORCH = "2.13.0"
_WANTED_FILES = 4096
_WANTED_DISK = 1 << 30
_WANTED_SHARED = 256 << 20
_Level = Literal["OK", "WARN", "FAIL"]


class Check(msgspec.Struct, frozen=True):
    """One line: FAIL is needed and missing, WARN is worth knowing. `remedy` is empty where all is well."""

    level: _Level
    name: str
    found: str
    remedy: str = ""


def examine() -> tuple[Check, ...]:
    """All checks of this machine, in a fixed order. Starts nothing and changes nothing."""
    return tuple(check() for check in _CHECKS)


def healthy(checks: Sequence[Check]) -> bool:
    """Whether nothing needed is missing."""
    return all(check.level != "FAIL" for check in checks)


def show(checks: Sequence[Check], *, json: bool) -> str:
    """The checks as lines or as JSON."""
    if json:
        return msgspec.json.format(msgspec.json.encode(checks), indent=2).decode()
    lines = [
        f"{check.level:<4}  {check.name:<14} {check.found}" + (f" -> {check.remedy}" if check.remedy else "")
        for check in checks
    ]
    return "\n".join(lines)


def _system() -> Check:
    if sys.platform == "linux":
        return Check("OK", "system", f"Linux {os.uname().release}")
    return Check("FAIL", "system", sys.platform, "keepstep needs Linux 5.3 or newer")


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if tuple(sys.version_info) >= (3, 11):
        return Check("OK", "python", found)
    return Check("FAIL", "python", found, "install Python 3.11 or newer")


def _torch() -> Check:
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("FAIL", "torch", "not installed", f"pip install torch=={_TESTED_TORCH}")
    if found.split("+")[0] == _TESTED_TORCH:
        return Check("OK", "torch", found)
    return Check("WARN", "torch", found, f"tested with {_TESTED_TORCH} only")


def plane_library() -> Path | None:
    """The built library of the data plane; None if there is none."""
    spec = importlib.util.find_spec("keepstep.training")
    places = spec.submodule_search_locations if spec else None
    return next((file for place in places or () for file in Path(place).glob("_plane*.so")), None)


def _library() -> Check:
    if (built := plane_library()) is not None:
        return Check("OK", "data plane", str(built))
    return Check("FAIL", "data plane", "not built", "in the source tree: python setup.py build_ext --inplace")


def _compiler() -> Check:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return Check("OK", "C compiler", found)
    needed: _Level = "WARN" if _library().level == "OK" else "FAIL"
    return Check(needed, "C compiler", "none found", "needed to build from source: apt-get install gcc")


def _proc() -> Check:
    if Path(f"/proc/{os.getpid()}/stat").is_file():
        return Check("OK", "/proc", "readable")
    return Check("FAIL", "/proc", "not mounted", "mount it: frozen processes are found there")


def _pidfd() -> Check:
    return _possible(
        "pidfd", lambda: os.close(os.pidfd_open(os.getpid())), remedy="needs Linux 5.3; or a sandbox forbids it"
    )


def _memfd() -> Check:
    def make() -> None:
        os.close(os.memfd_create("keepstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    return _possible("memfd", make, remedy="a sandbox forbids memfd_create: allow it")


def _unix_sockets() -> Check:
    def make() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0keepstep-doctor-{os.getpid()}")

    return _possible("unix sockets", make, remedy="abstract SEQPACKET sockets are needed")


def _possible(name: str, attempt: Callable[[], None], *, remedy: str) -> Check:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return Check("FAIL", name, str(error), remedy)
    return Check("OK", name, "available")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _WANTED_FILES or soft == resource.RLIM_INFINITY:
        return Check("OK", "open files", str(soft))
    return Check("WARN", "open files", f"{soft} (hard {hard})", f"large jobs need more: ulimit -n {_WANTED_FILES}")


def _disk() -> Check:
    return _space("disk here", Path.cwd(), wanted=_WANTED_DISK, remedy="free space; rings, logs and journals go there")


def _shared_memory() -> Check:
    remedy = "DataLoader workers need it: mount a larger /dev/shm"
    return _space("shared memory", Path("/dev/shm"), wanted=_WANTED_SHARED, remedy=remedy)


def _space(name: str, path: Path, *, wanted: int, remedy: str) -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check("WARN", name, f"{path}: {error.strerror}", remedy)
    found = f"{free >> 20} MiB free in {path}"
    return Check("OK", name, found) if free >= wanted else Check("WARN", name, found, remedy)


_CHECKS: tuple[Callable[[], Check], ...] = (
    _system,
    _python,
    _torch,
    _library,
    _compiler,
    _proc,
    _pidfd,
    _memfd,
    _unix_sockets,
    _open_files,
    _disk,
    _shared_memory,
)
