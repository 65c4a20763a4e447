"""Probing on real routers: the answer for a port is the spine its bytes really take, with and without raw sockets."""

from __future__ import annotations

import collections
import itertools
import json
import subprocess

import pytest
from fabric_lab import Fabric, FabricPlan

PORTS = "41000-41031"
LISTEN = """
import sys
from keepstep.service.path_load import LoadSink
sink = LoadSink((sys.argv[1], 7000), token="t" * 20)
print("ready", flush=True)
sys.stdin.read()
"""
SURVEY = """
import msgspec, sys
from keepstep.service.clock import SystemClock
from keepstep.service.path_probing import resolved
from keepstep.service.path_survey import SurveyRequest, port_range, survey
target = resolved(sys.argv[1], 7000)
request = SurveyRequest(target, port_range(sys.argv[2]), method=sys.argv[3], token="t" * 20)
print(msgspec.json.encode(survey(request, clock=SystemClock())).decode())
"""
SEND = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 7001), source_address=(sys.argv[2], int(sys.argv[3])))
sock.sendall(bytes(300_000))
sock.shutdown(socket.SHUT_WR)
sock.recv(1)
"""
SWALLOW = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
while True:
    sock, _ = listener.accept()
    try:
        while sock.recv(1 << 16):
            pass
    except OSError:  # a probe hangs up with a reset
        pass
    sock.close()
"""


def listening(fabric: Fabric, python: list[str], code: str, host: int) -> None:
    there = fabric.hosts[host]
    process = fabric.start(
        there.namespace, [*python, code, there.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"


def survey(fabric: Fabric, python: list[str], method: str, ports: str = PORTS) -> dict:
    done = fabric.run(fabric.hosts[0].namespace, [*python, SURVEY, fabric.hosts[4].address, ports, method])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_path(catalogue: dict) -> dict[str, list[int]]:
    found: dict[str, list[int]] = collections.defaultdict(list)
    for port in catalogue["ports"]:
        found[port["path"][0] if port["path"] else ""].append(port["source_port"])
    return found


def test_the_answer_for_a_port_is_the_spine_its_bytes_take(fabrics, python) -> None:
    fabric = fabrics(FabricPlan())
    listening(fabric, python, LISTEN, 4)
    catalogue = survey(fabric, python, "ttl")
    found = by_path(catalogue)
    assert len(catalogue["ports"]) == 32
    assert set(found) == {fabric.spine_address(spine, leaf=0) for spine in range(4)}
    listening(fabric, python, SWALLOW, 4)
    # Another listening port means another hash: ask for that one.
    code = SURVEY.replace("7000", "7001")
    there, here = fabric.hosts[4].address, fabric.hosts[0]
    again = json.loads(fabric.run(here.namespace, [*python, code, there, "43000-43007", "ttl"]).stdout)
    for port in again["ports"]:
        before = fabric.uplink_bytes(0)
        sent = fabric.run(here.namespace, [*python, SEND, there, here.address, str(port["source_port"])])
        assert sent.returncode == 0, sent.stderr
        after = fabric.uplink_bytes(0)
        taken = max(after, key=lambda spine: after[spine] - before[spine])
        assert port["path"] == [fabric.spine_address(taken, leaf=0)]


def test_a_spine_that_is_gone_is_not_in_the_catalogue_and_one_that_swallows_is_bad(fabrics, python) -> None:
    fabric = fabrics(FabricPlan())
    listening(fabric, python, LISTEN, 4)
    gone = fabric.spine_address(1, leaf=0)
    before = by_path(survey(fabric, python, "ttl"))
    fabric.swallow(1)
    catalogue = survey(fabric, python, "ttl")
    states = {port["source_port"]: port.get("state", "good") for port in catalogue["ports"]}
    assert all(states[port] == "bad" for port in before[gone])
    assert all(state == "good" for port, state in states.items() if port not in before[gone])
    fabric.fail_spine(1)
    assert gone not in by_path(survey(fabric, python, "ttl"))


def test_ports_are_told_apart_by_waiting_where_raw_sockets_are_not_allowed(fabrics, python) -> None:
    fabric = fabrics(FabricPlan(host_mbit=1000))
    listening(fabric, python, LISTEN, 4)
    truth = {
        port: path for path, ports in by_path(survey(fabric, python, "ttl", "41000-41015")).items() for port in ports
    }
    pairs = list(itertools.combinations(truth, 2))
    tries = []
    for _ in range(3):  # waiting is measured: whatever else runs on the machine may spoil one survey, not every one
        groups = by_path(survey(fabric, python, "round_trip", "41000-41015"))
        told = {port: group for group, ports in groups.items() for port in ports}
        right = sum((truth[a] == truth[b]) == (told.get(a) == told.get(b)) for a, b in pairs)
        tries.append((right, dict(groups)))
        if right >= 0.9 * len(pairs):
            break
    assert right >= 0.9 * len(pairs), (truth, tries)


@pytest.mark.parametrize("where", ["nobody", "nowhere"])
def test_towards_nothing(fabrics, python, where: str) -> None:
    fabric = fabrics(FabricPlan())
    target = fabric.hosts[5].address if where == "nobody" else "10.0.0.99"
    done = fabric.run(fabric.hosts[0].namespace, [*python, SURVEY, target, PORTS, "ttl"])
    assert "nobody answers there" in done.stderr


def test_a_target_nearer_than_the_spines_is_said_to_be_so(fabrics, python) -> None:
    fabric = fabrics(FabricPlan())
    listening(fabric, python, LISTEN, 1)
    target = fabric.hosts[1].address
    done = fabric.run(fabric.hosts[0].namespace, [*python, SURVEY, target, "41000-41003", "ttl"])
    assert "no switch answers after 2 hops: the target is nearer" in done.stderr
