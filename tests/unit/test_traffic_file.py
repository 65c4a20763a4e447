"""The file of `keepstep controller --traffic`: what is wrong is one clear line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.errors import KeepstepError
from keepstep.service.path_desk import read_traffic_file

TOPOLOGY = "keepstep_topology: 1\nclos: {hosts: 8, hosts_per_leaf: 4, spines: 4}\n"
HOPS = '[hops]\n"10.10.0.2" = "spine0"\n'


def read(folder: Path, head: str, hops: str = HOPS):
    (folder / "topology.yaml").write_text(TOPOLOGY)
    (folder / "traffic.toml").write_text(head + hops)
    return read_traffic_file(folder / "traffic.toml")


def test_a_whole_file(tmp_path: Path) -> None:
    found, planner = read(tmp_path, 'topology = "topology.yaml"\nstage = "low_priority"\n')
    assert found.stage == "low_priority" and found.hops == {"10.10.0.2": "spine0"}
    assert len(planner.network.topology.hosts) == 8


@pytest.mark.parametrize(
    ("head", "hops", "words"),
    [
        ("", HOPS, "names a topology or a site"),
        ('topology = "topology.yaml"\nsite = "x"\n', HOPS, "names a topology or a site"),
        ('topology = "nothing.yaml"\n', HOPS, "nothing.yaml"),
        ('site = "nothing"\n', HOPS, "no site there"),
        ('topology = "topology.yaml"\n', '[hops]\n"10.10.0.2" = "spine9"\n', "name no switch of the topology: spine9"),
        ('topology = "topology.yaml"\nstage = "now"\n', HOPS, "bad traffic file"),
        ('topology = "topology.yaml"\nttl = 0\n', HOPS, "ttl 0"),
        ('topology = "topology.yaml"\nports = "42000-42003"\n', HOPS, "at least 16 ports"),
        ('topology = "topology.yaml"\nports = "80-90"\n', HOPS, "between 1024 and 65535"),
        ('topology = "topology.yaml"\nwhat = 1\n', HOPS, "known keys"),
        ('topology = "topology.yaml"\nleast_bytes = -1\n', HOPS, "least_bytes -1"),
        ('topology = "topology.yaml"\nleast_bytes = nan\n', HOPS, "least_bytes nan"),
        ('topology = "topology.yaml"\nlarge_ranks = -3\n', HOPS, "large_ranks -3"),
        ('topology = "topology.yaml"\n', '[hops]\nnonsense = "spine0"\n', "'nonsense' in hops is no IPv4 address"),
        ('topology = "topology.yaml"\n', '[hops]\n"10.10.0.2" = "leaf0"\n', "hops name leaves"),
        ("topology = \n", "", "bad traffic file"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, head: str, hops: str, words: str) -> None:
    with pytest.raises(KeepstepError) as wrong:
        read(tmp_path, head, hops)
    assert words in str(wrong.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match="cannot read the traffic file"):
        read_traffic_file(tmp_path / "none.toml")
