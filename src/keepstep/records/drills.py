"""Faults on purpose: the names of all drills, what each needs to be told, and what is asked for by a person."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["BAD_RELEASES", "DRILLS", "MISMATCHES", "START_DRILLS", "Carrier", "DrillKind", "DrillRequest", "may_cost"]

Carrier = Literal["agent", "member", "node", "start"]
"""Who carries a drill out: the agent (by signal), the training process itself, the agents of whole nodes, or the agent
when it starts a rank."""

MISMATCHES = ("op", "shape", "extra")
"""How one rank may disagree: it calls another collective, another number of elements, or one collective too many."""

BAD_RELEASES = ("die", "slow")
"""What ranks on nodes of a bad release do."""


_Steps = Annotated[int, msgspec.Meta(le=1 << 53)]


class DrillKind(msgspec.Struct, frozen=True):
    """One kind of drill. `needs` names what must be given, `may` what can be given besides `rank`; `says` is its help.

    `lasts` says that it goes on until it is stopped, so that `steps` and `stop` make sense; `costs`, that it can cost a
    member or a link, and so be the cause of an incident.
    """

    by: Carrier
    says: str
    needs: tuple[str, ...] = ("rank",)
    may: tuple[str, ...] = ()
    lasts: bool = True
    costs: bool = False


class DrillRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person asks of a running job: inject `fault` at `step` (-1: now) for `steps` steps (0: until stopped).

    `rank` is whom it hits; `source` and `destination` are the ends of a directed link, `node` a host, `domain` all
    hosts with that KIND=LABEL. `factor` is how many times as long a step then takes, `rate` a limit in bytes per second
    (0: not given). `how` is one of `MISMATCHES` or `BAD_RELEASES`. With `stop` the drill is ended.
    """

    fault: str
    rank: int | None = None
    step: _Steps = -1
    steps: _Steps = 0
    factor: float = 0.0
    rate: float = 0.0
    source: int | None = None
    destination: int | None = None
    node: str = ""
    how: str = ""
    stop: bool = False
    domain: str = ""


_LINK = ("source", "destination")

DRILLS: dict[str, DrillKind] = {
    "kill": DrillKind("agent", "SIGKILL to a rank", lasts=False, costs=True),
    "freeze": DrillKind("agent", "SIGSTOP to a rank", costs=True),
    "slow-compute": DrillKind("member", "a rank computes --factor times as long", may=("factor",)),
    "busy-gil": DrillKind("member", "a thread of a rank keeps Python's lock", may=("factor",)),
    "slow-data": DrillKind("member", "the loader of a rank makes its steps --factor times as long", may=("factor",)),
    "stop-data": DrillKind("member", "the loader of a rank gives no more batches", costs=True),
    "throttle-link": DrillKind(
        "member",
        "one directed link has --rate bytes/s, or makes steps --factor times as long",
        _LINK,
        ("factor", "rate"),
    ),
    "cut-link": DrillKind("member", "nothing passes one directed link any more", _LINK, costs=True),
    "throttle-node": DrillKind(
        "member", "all links of one node to others have --rate bytes/s", ("node",), ("factor", "rate")
    ),
    "mismatch": DrillKind("member", "a rank calls something else than the others", may=("how",), lasts=False),
    "flip-bit": DrillKind("member", "one bit in the weights of a rank is flipped", lasts=False),
    "throttle-state": DrillKind("member", "a rank gives its state away slowly", may=("factor", "rate")),
    "corrupt-checkpoint": DrillKind(
        "member", "one byte of a rank's part of the newest checkpoint is flipped", lasts=False
    ),
    "lose-node": DrillKind(
        "node", "a node is gone: its agent and all its processes", ("node",), lasts=False, costs=True
    ),
    "lose-domain": DrillKind(
        "node", "all nodes with --domain KIND=LABEL are gone", ("domain",), lasts=False, costs=True
    ),
    "bad-release": DrillKind(
        "node",
        "all ranks on nodes with --domain die again and again, or are slow",
        ("domain",),
        ("how", "factor"),
        costs=True,
    ),
    "never-start": DrillKind("start", "a rank hangs before it calls join()", lasts=False, costs=True),
    "wrong-version": DrillKind(
        "start", "a rank says that it runs another version of keepstep", lasts=False, costs=True
    ),
}
"""Every drill by its name."""

START_DRILLS = tuple(name for name, kind in DRILLS.items() if kind.by == "start")
"""Drills that only `keepstep run --drill NAME:RANK` can give."""


def may_cost(fault: str) -> bool:
    """Whether a drill of that name can be the cause of an incident; one that is not known may be."""
    return fault not in DRILLS or DRILLS[fault].costs
