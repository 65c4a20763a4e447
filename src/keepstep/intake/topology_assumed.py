"""What a topology file does not say, and what is taken instead: capacities, and how many switches a name stands for."""

from __future__ import annotations

import msgspec

__all__ = ["Assumed"]


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """Given by a person. `gbps` of a NIC port, `uplink_gbps` of a cable between switches (0: as `gbps`), `spines` that
    every switch above the leaves stands for."""

    gbps: float = 100.0
    uplink_gbps: float = 0.0
    spines: int = 1

    @property
    def cable_gbps(self) -> float:
        """Of a cable between switches."""
        return self.uplink_gbps or self.gbps
