"""Transcripts: lines with `>` are events, the lines after each are all that the machines then do.

Shows G-1 (roll forward or redo), G-6 (user errors swap nothing), G-8 (fenced members are told to go), G-9 (orders of
a deposed leader), G-10 (late answers are dropped), G-11 (losses during a swap), G-13 (diverged replicas are named) and
G-14 (torn checkpoints are named and skipped) on the control plane's own decisions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playbook import play

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


def test_there_are_transcripts():
    assert len(TRANSCRIPTS) >= 20


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path, rewrite):
    text = path.read_text()
    played = play(text)
    if rewrite:
        path.write_text(played)
    else:
        assert played == text
