"""When an agent reads the rings of its members: together, and nobody waits long for the others."""

from __future__ import annotations

import pytest

from keepstep.service.look_times import LOOK_NS, are_due, pause_s

MS = 1_000_000


@pytest.mark.parametrize(
    ("waits_ms", "due"),
    [
        ([], False),
        ([5, 9], False),
        ([0, -3], True),
        ([-3, 40], False),  # the other one is nearly there
        ([-3, 400], True),  # the other one is not
        ([-200, 40], True),  # waited long enough
    ],
)
def test_members_are_read_together(waits_ms, due):
    now = 10**12
    assert are_due([now + wait * MS for wait in waits_ms], now) is due


@pytest.mark.parametrize(("waits_ms", "pause_ms"), [([], 62.5), ([-3, 40], 40), ([10, 25], 25), ([-3, 90], 62.5)])
def test_the_next_look_is_when_the_last_of_them_is_due(waits_ms, pause_ms):
    now = 10**12
    assert pause_s([now + wait * MS for wait in waits_ms], now) * 1e3 == pytest.approx(pause_ms)
    assert pause_s([], now) * 1e9 == LOOK_NS
