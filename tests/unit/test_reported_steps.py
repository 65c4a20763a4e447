"""Steps as agents report them: whole ones in windows, the one under way where nothing ends."""

from __future__ import annotations

import msgspec
from test_job_shell import HELLO, SPEC

from keepstep.control.job import new_job
from keepstep.records.summary import HostSample, MemberProgress, MemberSummary, WatchReport
from keepstep.records.watch_messages import Watched
from keepstep.service.reported_steps import ReportedSteps

STATE = new_job(SPEC, 1)


def window(rank: int, last: int, *, generation: int = 0) -> MemberSummary:
    return MemberSummary(rank, generation, last, last, 0, 0, 0, 0, 0, b"", b"", b"")


def told(*windows: MemberSummary, progress: tuple[MemberProgress, ...] = ()) -> Watched:
    return Watched(WatchReport(node="n1", wall=1.0, mono_ns=1, windows=windows, progress=progress))


def test_a_whole_step_and_one_under_way():
    reported = ReportedSteps()
    reported.take(HELLO, STATE)
    assert reported.steps() == {}
    reported.take(told(window(0, 8), window(1, 7)), STATE)
    assert reported.steps() == {0: 9, 1: 8}
    reported.take(told(progress=(MemberProgress(1, 0, 9, 0, 0, 0, 0, 0, HostSample()),)), STATE)
    assert reported.steps() == {0: 9, 1: 9}


def test_a_late_report_of_an_older_generation_says_nothing():
    reported = ReportedSteps()
    later = msgspec.structs.replace(STATE, generation=2)
    reported.take(told(window(0, 4, generation=2)), later)
    reported.take(told(window(0, 8, generation=1)), later)
    assert reported.steps() == {0: 5}


def test_a_restart_begins_anew():
    reported = ReportedSteps()
    reported.take(told(window(0, 8)), STATE)
    reported.take(HELLO, msgspec.structs.replace(STATE, attempt=1))
    assert reported.steps() == {}
