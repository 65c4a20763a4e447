"""Logs of a part of a job: ranks of whom there is no line are not suspected for it."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, named, timeout

WAITING = "".join(timeout(rank, 105) for rank in range(8))


def test_ranks_of_which_no_line_is_here_are_not_suspected(tmp_path):
    (finding,) = found_in("world_size=16\n" + WAITING, tmp_path)
    assert (finding.kind, finding.suspects) == ("undetermined", ())
    assert "ranks 8, 9, 10" in finding.next_probe


def test_a_rank_that_speaks_of_other_things_is_suspected(tmp_path):
    (finding,) = found_in(
        "world_size=10\n" + WAITING + "[rank9]: loading the tokenizer of worker 9, step 3\n", tmp_path
    )
    if finding.kind != "undetermined":
        assert named([finding]) == [[{"rank": 9}]]
        assert finding.confidence < 0.5  # rank 8 may be it as well


def test_the_only_other_rank_is_suspected_though_it_says_nothing(tmp_path):
    (finding,) = found_in("world_size=9\n" + WAITING, tmp_path)
    assert (finding.kind, named([finding])) == ("noncommunication_hang", [[{"rank": 8}]])


def init(rank, state, *, nranks=32, comm="0xabc"):
    return (
        f"n1:1{rank}:2{rank} [{rank % 8}] NCCL INFO comm {comm} rank {rank} nranks {nranks} cudaDev {rank % 8} nvmlDev "
        f"{rank % 8} busId 1b000 commId 0x{nranks} - Init {state}\n"
    )


CLOSED = "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"


@pytest.mark.parametrize("smaller", ["", "".join(init(rank, "START", nranks=8, comm="0xdef") for rank in range(8))])
def test_a_communicator_that_is_complete_has_all_its_ranks(smaller, tmp_path):
    """One node of four logs NCCL's start; that the others log nothing is no fault."""
    began = "".join(init(rank, "START") for rank in range(8))
    ended = "".join(init(rank, "COMPLETE") for rank in range(8))
    assert all(finding.kind != "startup_never_arrived" for finding in found_in(began + ended + smaller, tmp_path))


def test_a_majority_without_a_line_is_not_suspected(tmp_path):
    began = "".join(init(rank, "START") for rank in range(8))
    assert all(finding.kind != "startup_never_arrived" for finding in found_in(began + CLOSED, tmp_path))


def test_a_minority_that_did_not_begin_is_suspected(tmp_path):
    began = "".join(init(rank, "START", nranks=10) for rank in range(8))
    (finding,) = found_in(began + WAITING[:400] + timeout(0, 1), tmp_path)
    assert (finding.kind, named([finding])) == ("startup_never_arrived", [[{"rank": 8}], [{"rank": 9}]])
