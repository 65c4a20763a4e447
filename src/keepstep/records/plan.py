"""The plan of the network: which way each flow goes, how full the links are, and what was left to chance, and why.

Plans live in a journal: one `TrafficChange` for every arrival, departure or failure, its routes in pieces that fit
a line. Replaying them gives the plan in force.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from keepstep.records.identity import Record

__all__ = [
    "Advice",
    "Catalogue",
    "ChangeKind",
    "Plan",
    "PortPath",
    "Route",
    "TrafficChange",
    "TrafficOutcome",
    "TrafficRoutes",
]

ChangeKind = Literal["topology", "arrive", "leave", "fail", "restore", "refused"]


class Route(msgspec.Struct, frozen=True, omit_defaults=True):
    """The way of one flow: the switches from leaf to leaf. `cable` tells parallel ones apart, equal on every hop."""

    flow: str
    path: tuple[str, ...]
    cable: int = 0


class Advice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether one collective is worth a plan. `inputs` are the numbers the reason rests on."""

    job: str
    use: str
    plan: bool
    reason: str
    inputs: dict[str, float] = {}


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """All routes in force. `max_load` is the largest number of planned flows on one cable (or the largest share of a
    link's capacity, where `measure` is "bytes"), `bound` what no plan can go below, and `gap` = max_load / bound - 1.
    """

    version: int
    measure: Literal["flows", "bytes"]
    routes: tuple[Route, ...]
    max_load: float
    bound: float
    gap: float
    method: str
    advice: tuple[Advice, ...] = ()


class PortPath(msgspec.Struct, frozen=True, omit_defaults=True):
    """What probing found for one source port: its path, and whether it is well. `round_trip_s` 0: not measured."""

    source_port: int
    path: tuple[str, ...]
    state: Literal["good", "slow", "bad"] = "good"
    round_trip_s: float = 0.0


class Catalogue(msgspec.Struct, frozen=True, omit_defaults=True):
    """Source port -> path from one port to another, as probed at `wall` (s since 1970) with `method`.

    `taken` are ports that could not be looked at, because something else on the host uses them.
    """

    source: str
    destination: str
    wall: float
    method: Literal["ttl", "round_trip", "counters", "declared"]
    ports: tuple[PortPath, ...]
    taken: tuple[int, ...] = ()

    def source_ports(self, path: tuple[str, ...]) -> tuple[int, ...]:
        """The ports whose bytes take `path` and are well, in order."""
        return tuple(found.source_port for found in self.ports if found.path == path and found.state == "good")

    def age_s(self, now: float) -> float:
        """Seconds since it was probed, by a wall clock that reads `now`."""
        return now - self.wall


class TrafficChange(Record, frozen=True, kw_only=True, tag=True):
    """The plan of a site changed, or would have (`applied` false), or could not (`change` refused, with `reason`)."""

    change: Annotated[ChangeKind, Meta(description="what happened")]
    version: Annotated[int, Meta(ge=0, description="of the plan after it")] = 0
    stage: Annotated[str, Meta(description="stage of the roll-out; empty: none")] = ""
    applied: Annotated[bool, Meta(description="false: only what would have been done")] = True
    reason: Annotated[str, Meta(description="in words")] = ""
    demand: Annotated[str, Meta(description="digest of what the job asks for, a file beside the journal")] = ""
    links: Annotated[
        tuple[str, ...], Meta(description="links or switches down after it; with `fail` and `restore`")
    ] = ()
    measure: Annotated[str, Meta(description="flows or bytes; with `topology`")] = ""
    topology: Annotated[str, Meta(description="digest of the topology it is for, a file beside the journal")] = ""
    added: Annotated[int, Meta(ge=0, description="flows that got a route")] = 0
    removed: Annotated[int, Meta(ge=0, description="flows that went")] = 0
    moved: Annotated[int, Meta(ge=0, description="other flows that got another route")] = 0
    max_load: Annotated[float, Meta(description="after it")] = 0.0
    bound: Annotated[float, Meta(description="what no plan can go below")] = 0.0
    predicted: Annotated[float | None, Meta(description="rate of the slowest flow, planned / unplanned")] = None


class TrafficRoutes(Record, frozen=True, kw_only=True, tag=True):
    """Routes that changed with version `version`, a piece at a time."""

    version: Annotated[int, Meta(ge=0, description="of the plan")]
    routes: Annotated[tuple[Route, ...], Meta(description="new ways")] = ()


class TrafficOutcome(Record, frozen=True, kw_only=True, tag=True):
    """What a change that was planned or only advised brought, as measured afterwards."""

    version: Annotated[int, Meta(ge=0, description="of the plan it judges")]
    stage: Annotated[str, Meta(description="stage of the roll-out")] = ""
    predicted: Annotated[float | None, Meta(description="as in the change")] = None
    measured: Annotated[float | None, Meta(description="the same ratio, measured")] = None
    note: Annotated[str, Meta(description="in words")] = ""
