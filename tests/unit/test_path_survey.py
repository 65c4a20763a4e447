"""Towards what a catalogue of paths is refused before anything is measured, and ports that others use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from keepstep.errors import EnvironmentProblem
from keepstep.service import path_survey
from keepstep.service.clock import SystemClock
from keepstep.service.path_probing import Target
from keepstep.service.path_survey import SurveyRequest, survey


def test_waiting_tells_no_paths_inside_one_host():
    here = Target("127.0.0.1", "127.0.0.1", 1)
    request = SurveyRequest(here, (42000, 42001), method="round_trip", token="t" * 20)
    with pytest.raises(EnvironmentProblem, match="the target is this host"):
        survey(request, clock=SystemClock())


@contextlib.contextmanager
def held(count: int) -> Iterator[tuple[int, ...]]:
    """Ports of this host that something uses."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        yield tuple(sock.getsockname()[1] for sock in socks)


def test_ports_in_use_are_neither_bad_nor_in_the_way_of_others(monkeypatch):
    with held(12) as used, socket.create_server(("127.0.0.1", 0)) as listener:
        with held(1) as (free,):
            pass  # nobody uses it any more
        target = Target("127.0.0.1", "127.0.0.1", listener.getsockname()[1])
        monkeypatch.setattr(path_survey, "raw_allowed", lambda: True)
        monkeypatch.setattr(path_survey, "hops_by_port", lambda *given, **more: {free: "10.0.0.1"})
        found = survey(SurveyRequest(target, (*used, free), method="ttl"), clock=SystemClock())
        assert [(one.source_port, one.state) for one in found.ports] == [(free, "good")]
        assert found.taken == tuple(sorted(used))
        monkeypatch.setattr(path_survey, "hops_by_port", lambda *given, **more: {})
        with pytest.raises(EnvironmentProblem, match="all source ports are in use"):
            survey(SurveyRequest(target, used, method="ttl"), clock=SystemClock())
