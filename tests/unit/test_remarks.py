"""Remarks of scripts and settings are no words of a person about a job, and no lines of a log."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in

from keepstep.diagnosis.hang_words import counted, waiting

SETTINGS = """# Regions are made in /dev/shm.
# If it is low, the browser crashes due
# to insufficient shared memory

shm=1
"""


@pytest.mark.parametrize("text", [SETTINGS, "#!/bin/sh\n# CUDA out of memory is what we avoid\nexport A=1\n"])
def test_remarks_say_nothing(text, tmp_path):
    assert [finding.kind for finding in found_in(text, tmp_path, "settings")] == ["undetermined"]


def test_headings_still_make_markdown(tmp_path):
    text = "# It hangs\n\nranks 0, 1 and 2 never finish loading the data set\n\n~~~\nstep 1 loss 2\n~~~\n"
    (finding,) = found_in(text, tmp_path, "note.txt")
    assert finding.kind == "noncommunication_hang"


def test_one_rank_waits_and_two_wait():
    assert (waiting([3]), waiting([1, 0])) == ("rank 3 waits", "ranks 0, 1 wait")
    assert (counted([3]), counted([1, 0])) == ("1 rank waits", "2 ranks wait")
