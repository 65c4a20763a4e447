"""Towards what a catalogue of paths is refused before anything is measured."""

from __future__ import annotations

import pytest

from keepstep.errors import EnvironmentProblem
from keepstep.service.clock import SystemClock
from keepstep.service.path_probing import Target
from keepstep.service.path_survey import SurveyRequest, survey


def test_waiting_tells_no_paths_inside_one_host():
    here = Target("127.0.0.1", "127.0.0.1", 1)
    request = SurveyRequest(here, (42000, 42001), method="round_trip", token="t" * 20)
    with pytest.raises(EnvironmentProblem, match="the target is this host"):
        survey(request, clock=SystemClock())
