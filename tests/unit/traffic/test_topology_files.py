"""Topology files of every kind: what is in them, what is assumed, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import KeepstepError, RecordError, TrafficError
from keepstep.intake.job_yaml import read_job
from keepstep.intake.topology_assumed import Assumed
from keepstep.intake.topology_file import read_topology
from keepstep.intake.topology_yaml import read_yaml_topology, write_yaml_topology
from keepstep.records.topology import Cable, ClosShape, Port, Switch, Topology
from keepstep.service.traffic_files import load_topology
from keepstep.traffic.checking import checked, problems
from keepstep.traffic.clos import clos
from keepstep.traffic.declared import demand_of

DATA = Path(__file__).parents[2] / "data" / "topology"


def read(name: str, **assumed) -> Topology:
    topology = read_topology(DATA / name, Assumed(**assumed))
    assert isinstance(topology, Topology)
    return topology


def read_as(tmp_path, text: str) -> Topology | ClosShape:
    path = tmp_path / "topology"
    path.write_text(text)
    return read_topology(path, Assumed())


def tiers(topology: Topology) -> list[int]:
    return [sum(switch.tier == tier for switch in topology.switches) for tier in (1, 2, 3)]


def test_a_table_of_847_hosts():
    topology = read("lingjun/topo.csv")
    assert len(topology.hosts) == 847
    assert tiers(topology) == [48, 3, 1]
    assert problems(topology) == ()


def test_a_small_part_of_a_table_keeps_its_tiers(tmp_path):
    topology = read_as(tmp_path, "ip,DSW,PSW,ASW\na,G,P1,S1\nb,G,P1,S1\nc,G,P2,S2\n")
    assert [port.leaf for port in topology.ports] == ["S1", "S1", "S2"]
    topology = read_as(tmp_path, "ip,ASW,PSW,DSW\na,S1,P1,G\nb,S1,P1,G\nc,S2,P2,G\n")
    assert [port.leaf for port in topology.ports] == ["S1", "S1", "S2"]


@pytest.mark.parametrize("name", ["slurm/tree.conf", "slurm/scontrol_show_topology.txt"])
def test_slurm_tree(name):
    topology = read(name, spines=4, gbps=200.0)
    assert topology.hosts == ("n1", "n2", "n3", "n4")
    assert tiers(topology) == [2, 4, 0]
    assert {cable.gbps for cable in topology.cables} == {200.0}
    assert "4" in topology.notes[1]
    assert problems(topology) == ()


def test_slurm_tree_of_uneven_depth(tmp_path):
    text = "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=s Switches=a\nSwitchName=top Switches=s,b"
    topology = read_as(tmp_path, text)
    assert problems(topology) == ()


def test_slurm_block():
    topology = read("slurm/block.conf", spines=2)
    assert len(topology.hosts) == 12
    assert tiers(topology) == [3, 2, 0]
    assert topology.switches[0].domains == ("block b0",)


def test_slurm_block_as_scontrol_shows_it(tmp_path):
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n"
    topology = read_as(tmp_path, text + "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4\n")
    assert [port.leaf for port in topology.ports] == ["b1", "b1", "b2", "b2"]


def test_slurm_lines_that_go_on_with_either_line_end(tmp_path):
    topology = read_as(tmp_path, "SwitchName=a Nodes=n1,\\\r\nn2\r\nSwitchName=s Switches=a\r\n")
    assert topology.hosts == ("n1", "n2")


def test_slurm_hosts_on_a_switch_above_switches_are_named(tmp_path):
    topology = read_as(tmp_path, "SwitchName=l Nodes=n1\nSwitchName=s Switches=l Nodes=n[1-2]\n")
    assert topology.hosts == ("n1",)
    assert topology.notes[-1] == "1 hosts that are below no leaf left out: n2"


def test_more_switches_than_a_network_has(tmp_path):
    (tmp_path / "t").write_text("".join(f"BlockName=b{number} Nodes=n{number}\n" for number in range(1001)))
    with pytest.raises(RecordError, match="more than 4000000 cables"):
        read_topology(tmp_path / "t", Assumed(spines=4096))
    with pytest.raises(TrafficError, match="more than 4000000"):
        clos(ClosShape(hosts=10**12, hosts_per_leaf=8, spines=4))


def test_a_nic_has_no_third_side():
    with pytest.raises(TrafficError, match="one port or two"):
        clos(ClosShape(hosts=17, hosts_per_leaf=8, spines=2, sides=3))


def test_ibnetdiscover():
    """A host on a spine does not make it a leaf; aggregation nodes are no hosts; parallel cables are counted."""
    topology = read("ibnetdiscover/two_tiers.txt")
    assert topology.hosts == tuple(f"node{number:02d}" for number in range(8))
    assert {(switch.name, switch.tier) for switch in topology.switches} == {
        ("leaf0", 1),
        ("leaf1", 1),
        ("spine0", 2),
        ("spine1", 2),
    }
    assert {(cable.count, cable.gbps) for cable in topology.cables} == {(2, 200.0)}
    assert {port.rail for port in topology.ports} == {0, 1}
    assert any("ufm01" in note for note in topology.notes)
    assert problems(topology) == ()


@pytest.mark.parametrize(("name", "nics", "gbps"), [("topo_4p2h_2nic", 2, 100.0), ("topo_16p1h", 8, 200.0)])
def test_nccl_xml_names_the_nics_of_a_host(name, nics, gbps):
    topology = read(f"rccl/{name}.xml")
    assert topology.hosts == (name,)
    assert [port.rail for port in topology.ports] == list(range(nics))
    assert {port.gbps for port in topology.ports} == {gbps}
    with pytest.raises(TrafficError, match="describes hosts only"):
        checked(topology)


def test_the_nics_of_a_host_go_into_every_host():
    topology = load_topology(DATA / "slurm/tree.conf", host_nics=DATA / "rccl/topo_4p2h_2nic.xml")
    assert [port.name for port in topology.ports[:2]] == ["n1/mlx5_0/0", "n1/mlx5_1/0"]
    assert len(topology.ports) == 8


SMALL = """
keepstep_topology: 1
name: small
gbps: 200
switches:
  - {name: "leaf[0-1]", tier: 1, domains: [row1]}
  - {name: "spine[0-2]", tier: 2}
hosts:
  - {name: "h[0-3]", leaf: leaf0}
  - name: h4
    ports: [{nic: mlx5_0, leaf: leaf1, side: 0}, {nic: mlx5_0, leaf: leaf1, side: 1, gbps: 100}]
cables:
  - {lower: "leaf[0-1]", upper: "spine[0-2]", gbps: 400, count: 2}
"""


def test_our_yaml(tmp_path):
    topology = read_as(tmp_path, SMALL)
    assert isinstance(topology, Topology)
    assert (len(topology.ports), len(topology.cables)) == (6, 6)
    assert {port.gbps for port in topology.ports} == {200.0, 100.0}
    assert read_yaml_topology(write_yaml_topology(topology)) == topology


SILENT = SMALL.replace("gbps: 200\n", "").replace(", gbps: 100", "").replace("gbps: 400, ", "")


def test_our_yaml_without_capacities_takes_those_given(tmp_path):
    (tmp_path / "t").write_text(SILENT)
    topology = read_topology(tmp_path / "t", Assumed(gbps=100.0, uplink_gbps=200.0))
    assert isinstance(topology, Topology)
    assert {port.gbps for port in topology.ports} == {100.0}
    assert {cable.gbps for cable in topology.cables} == {200.0}
    assert topology.notes == ("where the file gives no capacity, in Gbit/s: 100 a port, 200 a cable assumed",)


def test_a_capacity_of_zero_is_not_one_that_is_not_given(tmp_path):
    topology = read_as(tmp_path, SILENT.replace("count: 2", "gbps: 0"))
    assert isinstance(topology, Topology)
    assert problems(topology)[0] == "the cable leaf0 to spine0 has a capacity of 0 Gbit/s"
    assert topology.notes == ("where the file gives no capacity, in Gbit/s: 100 a port assumed",)


def test_a_clos_by_its_measures(tmp_path):
    shape = read_as(tmp_path, "keepstep_topology: 1\nname: lab\nclos: {hosts: 8, hosts_per_leaf: 4, spines: 4}\n")
    assert shape == ClosShape(hosts=8, hosts_per_leaf=4, spines=4, name="lab")
    assert problems(clos(shape)) == ()


names = st.text("abcdefghij0123456789-._", min_size=1, max_size=8).filter(lambda name: name.strip("-._"))


@given(st.lists(names, min_size=2, max_size=6, unique=True), st.integers(1, 3), st.floats(0.1, 1e4))
@settings(max_examples=60, deadline=None)
def test_yaml_written_is_read_back(words, sides, gbps):
    leaf, spine, *hosts = words
    ports = tuple(Port(host, "n", leaf, gbps, 0, side, ("row",)) for host in hosts for side in range(sides))
    topology = Topology("x", (Switch(leaf, 1), Switch(spine, 2, ("a", "b"))), ports, (Cable(leaf, spine, gbps, 2),))
    again = read_yaml_topology(write_yaml_topology(topology))
    assert isinstance(again, Topology)
    assert (again.switches, again.ports, again.cables) == (topology.switches, topology.ports, topology.cables)


LONE_SWITCH = 'switchguid=0x1(1)\nSwitch\t36 "S-0000000000000001"\t\t# "leaf0" enhanced port 0 lid 1 lmc 0\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "loop"),
        ("SwitchName=a Switches=a", "loop"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "listed twice"),
        ("SwitchName=s Switches=a", "'a', which is not listed"),
        ("SwitchName=a Nodes=n[1-", "bracket"),
        ("SwitchName=a Nodes=n1\nnonsense", "names no switch"),
        ("BlockName=a Nodes=n1\nBlockName=a Nodes=n2", "listed twice"),
        ("SwitchName=a Nodes=n1\nBlockSizes=4", "no block"),
        ("SwitchName=a Nodes=n1, n2", "'n2' is no KEY=VALUE"),
        ("keepstep_topology: 2", "reads 1"),
        ("keepstep_topology: 1\ncables: [{lower: a, upper: b, gbps: fast}]", r"gbps"),
        ("keepstep_topology: 1\nhosts: &x [{name: a, leaf: l}]\ncables: *x", "aliases"),
        ("keepstep_topology: 1\nname: " + "[" * 40 + "]" * 40, "nested"),
        ("keepstep_topology: 1\nname: {", "not YAML"),
        ("keepstep_topology: 1\nshoe: 3", "shoe"),
        ("host,leaf\nh1,l1\nh1,l2", "twice with different"),
        ("host,leaf\nh1,l1\nh2", "line 3"),
        ("host,pod,leaf\nh1,p1\nh2,p1,l1", "2 filled cells expected 3 .*line 2"),
        ("<system version='1'><cpu>", "not the XML"),
        ("<!DOCTYPE x [<!ENTITY a 'b'>]><system>&a;</system>", "not the XML"),
        ("<system><nic><net speed='fast'/></nic></system>", "number"),
        (LONE_SWITCH, r"'leaf0' has no way to any host \["),
        ("something else entirely", "no topology that is known"),
        ("", "no topology that is known"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(KeepstepError, match=words) as caught:
        read_as(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("a: [b\n", "not YAML: .* line 2"), ("a: [b]\n", "does not say")])
def test_a_yaml_file_that_is_no_topology(tmp_path, text, words):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(RecordError, match=words):
        read_topology(tmp_path / "t.yaml", Assumed())


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        read_topology(tmp_path / "none", Assumed())
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecordError, match="UTF-8"):
        read_topology(tmp_path / "bytes", Assumed())


def network(*, switches=(("l0", 1), ("l1", 1), ("s0", 2)), cables=None, ports=None) -> Topology:
    cables = (("l0", "s0", 100.0), ("l1", "s0", 100.0)) if cables is None else cables
    ports = (("a", "l0", 100.0), ("b", "l1", 100.0)) if ports is None else ports
    return Topology(
        "t",
        tuple(Switch(*switch) for switch in switches),
        tuple(Port(host, "n", leaf, gbps) for host, leaf, gbps in ports),
        tuple(Cable(*cable) for cable in cables),
    )


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (network(cables=(("l0", "l1", 100.0),)), "both of tier 1 and joined: a loop"),
        (network(cables=(("l0", "x", 100.0),)), "'x', which is not a switch"),
        (network(ports=(("a", "x", 1.0),)), "'x', which is not a switch"),
        (network(cables=(("l0", "s0", 0.0), ("l1", "s0", 100.0))), "capacity of 0"),
        (network(ports=(("a", "l0", -1.0),)), "capacity of -1"),
        (network(ports=(("a", "l0", float("nan")),)), "capacity of nan"),
        (network(cables=(("l0", "s0", 100.0, 0), ("l1", "s0", 100.0))), "0 cables"),
        (network(switches=(("l0", 1), ("l1", 1)), cables=()), "0 spines above 2 leaves"),
        (network(cables=(("l0", "s0", 100.0),)), "2 parts with no way between"),
        (network(ports=(("a", "s0", 1.0),)), "of tier 2, not into a leaf"),
        (network(ports=()), "no host"),
        (network(cables=(("l0", "s0", 1.0), ("l0", "s0", 1.0))), "listed 2 times"),
        (network(switches=(("l0", 1), ("l1", 1), ("s0", 3))), "not one tier above"),
    ],
)
def test_a_topology_that_cannot_be_planned_on(topology, words):
    assert any(words in problem for problem in problems(topology)), problems(topology)
    with pytest.raises(TrafficError):
        checked(topology)


def test_rails_and_planes_may_be_networks_of_their_own():
    assert problems(clos(ClosShape(hosts=8, hosts_per_leaf=4, spines=2, rails=2, sides=2, separate_rails=True))) == ()


JOB = """
keepstep_job: 1
job: big
hosts: "h[0-3]"
ranks_per_host: 2
collectives:
  - {group: dp, op: all_reduce, bytes: 1e9}
"""


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    topology = read_as(tmp_path, "keepstep_topology: 1\nclos: {hosts: 4, hosts_per_leaf: 2, spines: 1, port_gbps: 4e2}")
    assert isinstance(topology, ClosShape) and topology.port_gbps == 400.0
    assert read_job(JOB + "step_s: 8e-1\n").step_s == 0.8


def test_a_job_file():
    layout = read_job(JOB)
    assert layout.hosts == ("h0", "h1", "h2", "h3")
    assert layout.collectives[0].nbytes == 1e9


@pytest.mark.parametrize("hosts", ['"h0,h0"', "[h0, h0]", '["h[0-2]", h1]'])
def test_a_host_given_twice_in_any_way(hosts):
    with pytest.raises(TrafficError, match="lists host 'h[01]' twice"):
        demand_of(read_job(JOB.replace('"h[0-3]"', hosts)))


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not a job file"), (JOB + "colour: red\n", "colour"), (JOB.replace("all_reduce", "all_shout"), "all_shout")],
)
def test_a_job_file_that_is_wrong(text, words):
    with pytest.raises(RecordError, match=words):
        read_job(text)
