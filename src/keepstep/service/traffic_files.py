"""Files of the traffic planner: topologies and jobs, read and brought together; results written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepstep.errors import EnvironmentProblem, RecordError, TrafficError
from keepstep.intake.job_yaml import read_job
from keepstep.intake.topology_assumed import Assumed
from keepstep.intake.topology_file import read_text, read_topology
from keepstep.records.demand import Demand
from keepstep.records.topology import ClosShape, Topology
from keepstep.traffic.clos import clos
from keepstep.traffic.declared import demand_of
from keepstep.traffic.host_ports import with_host_nics

__all__ = ["load_demands", "load_topology", "write_text"]


def load_topology(path: Path, assumed: Assumed | None = None, *, host_nics: Path | None = None) -> Topology:
    """The topology in `path`, with the NICs of the NCCL file `host_nics` in every host. It is not checked here.

    Raises RecordError for files that cannot be read, TrafficError for what cannot be brought together.
    """
    assumed = assumed or Assumed()
    found = read_topology(path, assumed)
    topology = clos(found) if isinstance(found, ClosShape) else found
    if host_nics is None:
        return topology
    inside = read_topology(host_nics, assumed)
    if isinstance(inside, ClosShape) or inside.switches or len(inside.hosts) != 1:
        raise RecordError("not the topology of one host", where=str(host_nics), remedy="give NCCL's topology XML")
    return with_host_nics(topology, inside.ports)


def load_demands(paths: Sequence[Path]) -> list[Demand]:
    """The demands of job files. Raises RecordError, and TrafficError for two jobs of one name."""
    demands = [demand_of(read_job(read_text(path), where=str(path))) for path in paths]
    names = [demand.job for demand in demands]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TrafficError(f"two job files are of job {twice!r}")
    return demands


def write_text(path: Path, text: str) -> None:
    """Write a result. Raises EnvironmentProblem if the place cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise EnvironmentProblem(f"cannot be written: {error.strerror or error}", where=str(path)) from error
