"""A catalogue of paths as people read it."""

from __future__ import annotations

from keepstep.records.plan import Catalogue, PortPath
from keepstep.service.path_text import catalogue_text


def test_ports_in_use_are_said_and_not_passed_over():
    ports = tuple(PortPath(source_port=port, path=("spine0",)) for port in (42000, 42001, 42003))
    found = Catalogue("10.0.0.2", "10.1.0.2:7", 0.0, "ttl", ports, taken=(42002, 42004, 42005))
    assert "in use here, not looked at: ports 42002, 42004-42005" in catalogue_text(found)
    assert "in use" not in catalogue_text(Catalogue("10.0.0.2", "10.1.0.2:7", 0.0, "ttl", ports))
