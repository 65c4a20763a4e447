"""InfiniBand ports in a snapshot of /sys whose rate is below what the interface on the same adapter says."""

from __future__ import annotations

import json

import pytest

from keepstep.intake.health_text import health_events


def snapshot(rates: list[str], speed: str = "200000\n") -> bytes:
    document = {}
    for number, rate in enumerate(rates):
        at = f"/sys/bus/pci/devices/0000:{number:02x}:00.0"
        document[f"{at}/infiniband/mlx5_{number}/ports/1/rate"] = rate
        document[f"{at}/infiniband/mlx5_{number}/ports/1/state"] = "4: ACTIVE\n"
        document[f"{at}/net/ib{number}/speed"] = speed
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("rates", "speed", "slow"),
    [
        (["100 Gb/sec (4X EDR)\n"] * 2, "200000\n", ["mlx5_0:1", "mlx5_1:1"]),
        (["200 Gb/sec (4X HDR)\n"] * 2, "200000\n", []),
        (["200 Gb/sec (4X HDR)\n"] * 2, "", []),
        (["200 Gb/sec (4X HDR)\n"] * 2, "-1\n", []),
        (["200 Gb/sec (4X HDR)\n", "100 Gb/sec (4X EDR)\n", "200 Gb/sec (4X HDR)\n"], "", ["mlx5_1:1"]),
    ],
)
def test_a_port_below_its_interface_or_its_peers_is_slow(rates: list[str], speed: str, slow: list[str]) -> None:
    found = [event for event in health_events(snapshot(rates, speed), path="x") if event.kind == "nic_rate"]
    assert [event.fields["device"] for event in found] == slow
    assert {event.fields["wanted"] for event in found} <= {"200"}
