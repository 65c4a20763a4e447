"""What is said of the final weights of a job."""

from __future__ import annotations

import itertools

import msgspec

from keepstep.control.job import new_job
from keepstep.control.job_state import JobSpec, JobState
from keepstep.control.outcome import final_weights
from keepstep.control.roster import Member, Status


def ended(*told: tuple[int, str]) -> JobState:
    """A job of three ranks whose members came in this order and told these hashes."""
    members = [
        Member(f"m{number}", rank, "n0", Status.GONE, weights_sha256=sha256)
        for number, (rank, sha256) in enumerate(told)
    ]
    state = new_job(JobSpec("j", 3, 1, "1", b"s"), 1)
    return msgspec.structs.replace(state, members={member.name: member for member in members})


def test_equal_weights_have_one_hash():
    assert final_weights(ended((0, "aa"), (1, "aa"), (2, "aa"))) == "aa"
    assert final_weights(ended((0, "aa"), (1, ""), (2, ""))) == "aa", "some ranks ended without a word"
    assert final_weights(ended((0, ""), (1, ""), (2, ""))) == ""


def test_shards_have_one_hash_whatever_processes_held_the_ranks_before():
    shards = ((0, "aa"), (1, "bb"), (2, "cc"))
    found = {final_weights(ended(*order)) for order in itertools.permutations(shards)}
    assert len(found) == 1 and found.isdisjoint({"aa", "bb", "cc", ""})
    assert final_weights(ended((0, ""), *shards)) in found, "rank 0 was held by a process that is gone"
    assert final_weights(ended((0, "aa"), (1, "cc"), (2, "bb"))) not in found


def test_a_hash_of_some_shards_is_none():
    assert final_weights(ended((0, "aa"), (1, "bb"))) == ""
