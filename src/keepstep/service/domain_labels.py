"""The failure domains of nodes as this machine knows them: from files, from flags, and the release it runs itself."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from keepstep import __version__
from keepstep.control.domains import Domains
from keepstep.errors import UsageError
from keepstep.intake.domain_file import checked_label, read_domains

__all__ = ["domains_of_files", "labels_of_flags", "labels_of_this_node", "own_release"]

_DRIVER = Path("/proc/driver/nvidia/version")
_SYSTEM = Path("/etc/os-release")
_MAX_BYTES = 64 * 1024


def domains_of_files(paths: Iterable[str]) -> Domains:
    """What all files say together. Raises UsageError for a bad file, or two that say different things of a node."""
    domains = Domains()
    for path in paths:
        for node, labels in read_domains(Path(path)).items():
            for kind, label in labels.items():
                earlier = domains.labels.get(node, {}).get(kind, label)
                if earlier != label:
                    raise UsageError(f"node {node} is in {kind} {label}, an earlier file says {earlier}", where=path)
            domains = domains.with_labels(node, labels)
    return domains


def labels_of_flags(words: Iterable[str]) -> dict[str, str]:
    """KIND=LABEL of each flag. Raises UsageError for nonsense and for a kind that is given twice."""
    labels: dict[str, str] = {}
    for text in words:
        kind, equals, label = text.partition("=")
        if not equals:
            raise UsageError(f"{text[:60]!r} is no domain", where="--domain", remedy="write KIND=LABEL, as rack=r1")
        checked_label(kind, label, where="--domain")
        if kind in labels:
            raise UsageError(f"two labels of {kind}", where="--domain", remedy="a node is in one domain of each kind")
        labels[kind] = label
    return labels


def own_release() -> str:
    """What this node runs, as one label: versions of keepstep, Python and torch, of the system and of the driver."""
    parts = [f"keepstep-{__version__}", f"python-{platform.python_version()}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        parts.append(f"torch-{metadata.version('torch')}")
    fields = dict(re.findall(r'^(ID|VERSION_ID|IMAGE_VERSION)="?([^"\n]*)', _head(_SYSTEM), re.MULTILINE))
    if system := "".join(fields.get(key, "") for key in ("ID", "VERSION_ID", "IMAGE_VERSION")):
        parts.append(f"image-{system}")
    if driver := re.search(r"Kernel Module\s+([\d.]+)", _head(_DRIVER)):
        parts.append(f"driver-{driver[1]}")
    return "+".join(re.sub(r"[^\w.+-]", "_", part) for part in parts)[:128]


def _head(path: Path) -> str:
    """The beginning of a small text file; empty if there is none."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read(_MAX_BYTES)
    return ""


def labels_of_this_node(flags: Iterable[str]) -> dict[str, str]:
    """What the agent of this node tells the controller; a flag wins over what it finds out itself."""
    return {"release": own_release(), **labels_of_flags(flags)}
