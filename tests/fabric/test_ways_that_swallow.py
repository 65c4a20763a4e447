"""A spine that swallows what it is given: new connections come through all the same, over the other ways."""

from __future__ import annotations

import subprocess

from fabric_lab import Fabric, FabricPlan

CONNECT = """
import socket, sys
from keepstep.records.messages import Address
from keepstep.training.connecting import connect_address

sys.stdin.readline()
own, other = Address("m0", "h0", "", sys.argv[1], 0), Address("m4", "h4", "", sys.argv[2], int(sys.argv[3]))
ports = tuple(map(int, sys.argv[4:]))
for _ in range(8):
    connect_address(own, other, timeout_s=30, ports=ports).close()
print("through")
"""
LISTEN = """
import socket, time

server = socket.create_server(("", 5000), backlog=64)
print("there", flush=True)
time.sleep(600)
"""


def connected(fabric: Fabric, python: list[str], *ports: int) -> str:
    here, there = fabric.hosts[0], fabric.hosts[4]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    listener = fabric.start(there.namespace, [*python, LISTEN], **pipes)
    assert listener.stdout.readline() == "there\n"
    reach = [here.address, there.address, "5000", *map(str, ports)]
    caller = fabric.start(here.namespace, [*python, CONNECT, *reach], **pipes)
    fabric.swallow(1)
    return caller.communicate("go\n", timeout=120)[0]


def test_connections_leave_a_way_that_swallows(fabrics, python) -> None:
    assert connected(fabrics(FabricPlan()), python) == "through\n"


def test_connections_leave_the_ports_planned_for_them_where_nothing_answers(fabrics, python) -> None:
    """Planned ports are tried one behind the other for five seconds: some of them lead over other spines."""
    assert connected(fabrics(FabricPlan()), python, *range(42000, 42016)) == "through\n"
