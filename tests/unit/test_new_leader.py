"""A controller that takes over gives everybody the patience that its predecessor had begun to lose."""

from __future__ import annotations

import msgspec
from test_job_shell import SPEC

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobState, TakeOver, Tick
from keepstep.control.roster import Member, NodeSpec, Status
from keepstep.records.messages import KillMember

LONG_S = 1000.0


def led_by_the_next(state: JobState) -> JobState:
    """`state` when another controller leads it, long after everything in it."""
    return decide(state, Event("", "", TakeOver(2)), now=LONG_S).state


def test_who_waits_for_machines_waits_again():
    spec = msgspec.structs.replace(SPEC, shortage_s=30.0)
    state = led_by_the_next(msgspec.structs.replace(new_job(spec, 1), attempt=1, short=1.0))
    assert decide(state, Event("", "", Tick()), now=LONG_S + 29.0).state.exit_code is None
    assert decide(state, Event("", "", Tick()), now=LONG_S + 31.0).state.exit_code == 75


def test_a_leaver_that_was_released_may_still_end_by_itself():
    members = {
        name: Member(name, rank, "n1", status, released=released)
        for name, rank, status, released in (
            ("m0", 0, Status.RUNNING, 0.0),
            ("m1", 1, Status.LEAVING, 1.0),
            ("m2", 1, Status.RUNNING, 0.0),
        )
    }
    nodes = (NodeSpec("n1", 2, 1),)
    state = msgspec.structs.replace(new_job(SPEC, 1), phase="running", nodes=nodes, members=members, version=3)
    state = led_by_the_next(state)
    for since_s, killed in ((1.0, False), (SPEC.patience_s + 1.0, True)):
        orders = decide(state, Event("", "", Tick()), now=LONG_S + since_s).orders
        assert any(isinstance(directed.order, KillMember) for directed in orders) is killed
