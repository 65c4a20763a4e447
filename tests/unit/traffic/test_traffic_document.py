"""The YAML files shown in docs/traffic.md are read, and go together."""

from __future__ import annotations

import re
from pathlib import Path

from keepstep.intake.job_yaml import read_job
from keepstep.intake.topology_yaml import read_yaml_topology
from keepstep.records.topology import Topology
from keepstep.traffic.advice import worth_planning
from keepstep.traffic.checking import problems
from keepstep.traffic.declared import demand_of
from keepstep.traffic.flows import flows_of
from keepstep.traffic.network import Network

DOCUMENT = Path(__file__).parents[3] / "docs" / "traffic.md"


def test_the_files_shown():
    topology, job = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    read = read_yaml_topology(topology)
    assert isinstance(read, Topology)
    assert problems(read) == ()
    demand, network = demand_of(read_job(job)), Network(read)
    flows = flows_of(demand, network)
    assert {flow.source.split("/")[2] for flow in flows} == {"0", "1"}
    planned = [one.use for one in worth_planning(demand, network).advice if one.plan]
    assert {use.split(".")[1] for use in planned} == {"send"}
