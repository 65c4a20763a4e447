"""A rank that calls another collective than the rest: one finding says who called what, nobody is replaced."""

from __future__ import annotations

import pytest
from watched import running, suspects


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "rank 1: all_reduce, 9 elements of float32"),
        pytest.param("op", "rank 1: broadcast, 8 elements of float32, root 0", marks=pytest.mark.long),
        pytest.param("extra", "rank 1: all_reduce, 3 elements of float32", marks=pytest.mark.long),
    ],
)
def test_a_mismatch_is_one_finding_and_a_clean_end(tmp_path, how, words):
    with running(tmp_path / "run", "live.py", "--wrong", f"1:20:{how}", options=("--standby", 1)) as job:
        assert job.finish() == 1, job.text()
    found = job.findings("collective_mismatch")
    assert {f["number"] for f in found} == {found[0]["number"]}
    assert suspects(found[-1]) == [[{"rank": 1}]] and words in found[-1]["evidence"]
    assert found[-1]["layer"] == "application"
    assert not [i for i in job.records("Incident") if i.get("members_changed")]
