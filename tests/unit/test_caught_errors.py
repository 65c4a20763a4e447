"""Errors after which training went on: the program caught them, and nobody is at fault."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, ranks, timeout

ERROR = (
    "[rank2]: Traceback (most recent call last):\n"
    '[rank2]:   File "a.py", line 3, in f\n'
    "[rank2]: ValueError: bad sample, skipping\n"
)


def steps(first, last, ranks=4):
    return "".join(
        f"[rank{rank}] step {step} loss 1.0 time 0.1\n" for step in range(first, last) for rank in range(ranks)
    )


@pytest.mark.parametrize("end", ["", "Training finished\n"])
@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize("error", [ERROR, "[rank2]: torch.OutOfMemoryError: CUDA out of memory, batch left out\n"])
def test_training_went_on_after_an_error(error, before, end, tmp_path):
    (finding,) = found_in(steps(0, before) + error + steps(before, 100) + end, tmp_path)
    assert finding.kind == "healthy"
    assert any("went on after it" in line for line in finding.evidence)


@pytest.mark.parametrize(
    "after",
    [
        "",
        steps(40, 41),  # the others end their step
        steps(10, 60),  # the job began again from a checkpoint
        steps(40, 60) + timeout(0, 105),
    ],
    ids=["nothing", "one step", "again", "a time-out"],
)
def test_an_error_that_ended_something_is_the_cause(after, tmp_path):
    findings = found_in(steps(0, 40) + ERROR + after, tmp_path)
    assert (findings[0].kind, ranks(findings)) == ("crash", {2})


def test_an_error_after_the_end_of_training_is_a_cause(tmp_path):
    findings = found_in(steps(0, 40) + "Training finished\n" + ERROR, tmp_path)
    assert (findings[0].kind, ranks(findings)) == ("crash", {2})


def test_a_connection_that_was_opened_again(tmp_path):
    line = 'INFO: retry policy: on "connection reset by peer" retry 3 times\n'
    assert [finding.kind for finding in found_in(line + steps(0, 9), tmp_path)] == ["healthy"]


RETRIES = [
    "[rank1] urllib3 WARNING Retrying (Retry(total=4)) after connection broken by NewConnectionError",
    "WARNING: Ignored exception: KeyError: 'x'",
]


@pytest.mark.parametrize("line", RETRIES)
def test_what_is_tried_again_is_no_failure(line, tmp_path):
    assert [finding.kind for finding in found_in(f"{line}\n{steps(0, 3)}", tmp_path)] == ["healthy"]
