"""A topology file of any kind we know, recognised by what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import RecordError
from keepstep.intake.bounded_yaml import parse_yaml
from keepstep.intake.hostlist import checked_names
from keepstep.intake.ibnetdiscover import looks_like_ibnetdiscover, read_ibnetdiscover
from keepstep.intake.nccl_topology import looks_like_nccl, read_nccl_topology
from keepstep.intake.reading import whole
from keepstep.intake.slurm_topology import looks_like_slurm, read_slurm_topology
from keepstep.intake.switch_table import looks_like_switch_table, read_switch_table
from keepstep.intake.topology_assumed import Assumed
from keepstep.intake.topology_yaml import looks_like_yaml_topology, read_yaml_topology
from keepstep.records.topology import ClosShape, Topology

__all__ = ["MAX_TOPOLOGY_BYTES", "read_text", "read_topology"]

MAX_TOPOLOGY_BYTES = 256 << 20


def read_text(path: Path) -> str:
    """A text file, gunzipped if need be. Raises RecordError if it is not there, too large, cut off, or not UTF-8."""
    try:
        content, complete = whole(path, limit=MAX_TOPOLOGY_BYTES)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise RecordError("not text in UTF-8", where=str(path)) from error
    if not complete:
        raise RecordError("the compressed file is cut off", where=str(path))
    return text


def read_topology(path: Path, assumed: Assumed) -> Topology | ClosShape:
    """The topology in the file. Raises RecordError for an unknown or damaged format and names that cannot be printed,
    TrafficError for loops."""
    text = read_text(path)
    try:
        found = _read(text, assumed, path=path)
        checked_names(_names(found), where=str(path))
    except RecordError as error:
        if str(path) in error.where:
            raise
        raise RecordError(error.what, where=f"{path}: {error.where}", remedy=error.remedy) from error
    return found


def _names(found: Topology | ClosShape) -> Iterator[str]:
    yield found.name
    if isinstance(found, Topology):
        for switch in found.switches:
            yield from (switch.name, *switch.domains)
        for port in found.ports:
            yield from (port.host, port.nic, *port.domains)


def _read(text: str, assumed: Assumed, *, path: Path) -> Topology | ClosShape:
    where = str(path)
    if looks_like_nccl(text):
        return read_nccl_topology(text, host=path.stem, where=where)
    if looks_like_yaml_topology(text):
        return read_yaml_topology(text, assumed, where=where)
    if looks_like_slurm(text):
        return read_slurm_topology(text, assumed, where=where)
    if looks_like_ibnetdiscover(text):
        return read_ibnetdiscover(text, where=where)
    if path.suffix in (".yaml", ".yml"):
        parse_yaml(text, where=where)
        raise RecordError("it does not say `keepstep_topology: 1`", where=where, remedy="see docs/traffic.md")
    if looks_like_switch_table(text):
        return read_switch_table(text, assumed, where=where)
    raise RecordError(
        "no topology that is known: Slurm topology.conf, ibnetdiscover, NCCL XML, a host,switch table or our YAML",
        where=where,
    )
