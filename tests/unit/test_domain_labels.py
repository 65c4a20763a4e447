"""Labels of nodes: from TOML, from topologies of other tools, from flags; what cannot be is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep import __version__
from keepstep.errors import UsageError
from keepstep.intake.domain_file import read_domains
from keepstep.service.domain_labels import domains_of_files, labels_of_flags, labels_of_this_node, own_release

TOML = """
[rack]
r1 = "n[0-1]"
r2 = ["n2", "n[03-04]"]

[power]
a = "n0,n2"
"""
SLURM = """
SwitchName=leaf1 Nodes=n[0-1]
SwitchName=leaf2 Nodes=n[2-3]
SwitchName=top1 Switches=leaf[1-2]
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestFiles:
    def test_our_own_names_nodes_in_ranges(self, tmp_path: Path):
        found = read_domains(written(tmp_path / "racks.toml", TOML))
        assert found["n0"] == {"rack": "r1", "power": "a"}
        assert found["n03"] == {"rack": "r2"}
        assert set(found) == {"n0", "n1", "n2", "n03", "n04"}

    def test_slurm_switches_are_domains_in_tiers(self, tmp_path: Path):
        found = read_domains(written(tmp_path / "topology.conf", SLURM))
        assert found["n0"] == {"switch": "leaf1", "switch2": "top1"}
        assert found["n3"] == {"switch": "leaf2", "switch2": "top1"}

    def test_slurm_blocks_are_domains(self, tmp_path: Path):
        text = "BlockName=b1 Nodes=n[0-1]\nBlockName=b2 Nodes=n2\nBlockSizes=2"
        assert read_domains(written(tmp_path / "topology.conf", text))["n1"]["switch"] == "b1"

    def test_a_host_on_two_leaves_survives_the_loss_of_one(self, tmp_path: Path):
        text = """keepstep_topology: 1
switches: [{name: "leaf[0-1]", tier: 1}]
hosts:
  - {name: a, ports: [{leaf: leaf0}, {leaf: leaf1}], domains: [rack r1]}
  - {name: b, leaf: leaf0, domains: [power=x]}
"""
        found = read_domains(written(tmp_path / "net.yaml", text))
        assert found == {"a": {"rack": "r1"}, "b": {"switch": "leaf0", "power": "x"}}

    def test_two_files_add_up(self, tmp_path: Path):
        paths = [written(tmp_path / "racks.toml", TOML), written(tmp_path / "topology.conf", SLURM)]
        domains = domains_of_files(map(str, paths))
        assert domains.of("n0") == {"node=n0", "rack=r1", "power=a", "switch=leaf1", "switch2=top1"}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("rack = 3", "no table"),
            ("[rack", "not TOML"),
            ("[rack]\nr1 = 3", "nodes are a text"),
            ('[rack]\nr1 = ""', "names no node"),
            ('[rack]\nr1 = "n[0-"', "bracket"),
            ('[rack]\nr1 = "n1"\nr2 = "n1"', "n1 is in rack r1 and in rack r2"),
            ('[node]\nr1 = "n1"', "domain of its own"),
            ('[Rack]\nr1 = "n1"', "no kind of domain"),
            ('[rack]\n"a=b" = "n1"', "no label"),
        ],
    )
    def test_a_bad_file_is_one_line(self, tmp_path: Path, text: str, says: str):
        path = written(tmp_path / "bad.toml", text)
        with pytest.raises(UsageError, match=says) as caught:
            read_domains(path)
        assert "bad.toml" in str(caught.value) and "\n" not in str(caught.value).strip()

    def test_files_that_contradict_are_refused(self, tmp_path: Path):
        one = written(tmp_path / "one.toml", '[rack]\nr1 = "n1"')
        two = written(tmp_path / "two.toml", '[rack]\nr2 = "n1"')
        with pytest.raises(UsageError, match="n1 is in rack r2, an earlier file says r1"):
            domains_of_files([str(one), str(two)])

    @pytest.mark.parametrize("name", ["absent.toml", "absent.conf"])
    def test_a_file_that_is_not_there(self, tmp_path: Path, name: str):
        with pytest.raises(UsageError, match="cannot be read"):
            read_domains(tmp_path / name)


class TestFlags:
    def test_flags_are_pairs(self):
        assert labels_of_flags(["rack=r1", "power=feed a"]) == {"rack": "r1", "power": "feed a"}

    @pytest.mark.parametrize("words", [["rack"], ["=r1"], ["rack="], ["rack=a", "rack=b"], ["node=n1"], ["Rack=a"]])
    def test_nonsense_is_refused(self, words: list[str]):
        with pytest.raises(UsageError):
            labels_of_flags(words)

    def test_a_node_tells_its_release(self):
        assert f"keepstep-{__version__}" in own_release() and "python-" in own_release()
        assert labels_of_this_node([])["release"] == own_release()
        assert labels_of_this_node(["release=r7"])["release"] == "r7"
