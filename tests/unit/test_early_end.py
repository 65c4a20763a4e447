"""One rank ends by itself while the others wait for it: it is named where lines or the journal of a run say so."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, ranks, status, timeout
from dump_files import dump, entry, write
from test_diagnose_runs import STARTED, run_of

from keepstep.records.events import FactRecord
from keepstep.records.lifecycle import JobEnded
from keepstep.records.messages import MemberExited, MemberStarted
from keepstep.service.diagnosing import diagnose_paths

WAITING = "".join(timeout(rank, 105) + status(rank, 107, 104) for rank in range(3))
NOT_DESTROYED = (
    "[rank3]:[W1101 09:50:00.000000000 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
    "destroyed before we destruct ProcessGroupNCCL. On normal program exit, the application should call "
    "destroy_process_group\n"
)
START = "".join(
    f"n1:10{rank}:20{rank} [{rank}] NCCL INFO comm 0x5{rank} rank {rank} nranks 4 cudaDev {rank} busId 1000 "
    "commId 0xab - Init COMPLETE\n"
    for rank in range(4)
)


def destroyed(rank: int, size: int) -> str:
    return f"n1:103:203 [3] NCCL INFO comm 0x53 rank {rank} nranks {size} cudaDev 3 busId 1000 - Destroy COMPLETE\n"


ENDS = {
    "torch warns": (NOT_DESTROYED, 0.8),
    "torch warns, 2.7": (
        "[rank3]:[W1101 09:50:00.0 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called "
        "before program exit, which can leak resources.\n",
        0.8,
    ),
    "NCCL, the communicator of all": (START + destroyed(3, 4), 0.8),
    "a launcher": ("launcher: rank 3 exited with code 0\n", 0.8),
    "its training ended": ("[rank3]: Training completed after 104 steps\n", 0.6),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_rank_that_ended_is_named(name, tmp_path) -> None:
    text, sure = ENDS[name]
    (finding,) = found_in(text + WAITING, tmp_path)
    assert (finding.kind, finding.layer, finding.victims) == ("noncommunication_hang", "application", (0, 1, 2))
    assert ranks([finding]) == {3} and finding.confidence == pytest.approx(sure)
    assert any("ended" in line for line in finding.evidence)


NOBODY = {
    "as many ended as wait": NOT_DESTROYED.replace("rank3", "rank2") + NOT_DESTROYED + timeout(0, 9) + timeout(1, 9),
    "another code": "launcher: rank 3 exited with code 01\n" + WAITING,
    "a communicator of some ranks": START + destroyed(1, 2) + WAITING,
    "training ended for those who wait, too": WAITING
    + "".join(f"[rank{rank}]: Training completed\n" for rank in (1, 2, 3)),
    "it was started again": NOT_DESTROYED + "[rank3]: step 90 loss 2.0\n" + WAITING,
    "it goes on behind its training": "[rank3]: Training completed\n[rank3]: Running evaluation\n" + WAITING,
}


@pytest.mark.parametrize("name", NOBODY)
def test_where_lines_do_not_show_it_nobody_is_said_to_have_ended(name, tmp_path) -> None:
    found = found_in(NOBODY[name], tmp_path)
    assert not [line for finding in found for line in finding.evidence if "while others still call" in line]


def test_a_rank_that_ended_with_an_error_crashed(tmp_path) -> None:
    text = "[rank3]: Traceback (most recent call last):\n[rank3]: KeyError: 'y'\n" + NOT_DESTROYED + WAITING
    (finding,) = found_in(text, tmp_path)
    assert (finding.kind, ranks([finding])) == ("crash", {3})


def test_another_rank_of_which_nothing_is_known_leaves_a_doubt(tmp_path) -> None:
    (finding,) = found_in("[rank4]: step 104 loss 2.0\n" + NOT_DESTROYED + WAITING, tmp_path)
    assert ranks([finding]) == {3} and finding.confidence == pytest.approx(0.6)


def dumps(folder, heard=(0, 1, 2)):
    entries = [entry(seq, seq=seq, state="completed" if seq < 5 else "scheduled") for seq in range(1, 6)]
    return write(folder, {rank: dump(entries, range(4)) for rank in heard})


def test_dumps_of_all_others_name_the_one_without(tmp_path) -> None:
    (finding,) = diagnose_paths([dumps(tmp_path / "alone")]).findings
    assert (finding.kind, ranks([finding]), finding.layer) == ("reporter_silent", {3}, "undetermined")
    (tmp_path / "alone" / "rank3.log").write_text(NOT_DESTROYED)
    (finding,) = diagnose_paths([tmp_path / "alone"]).findings
    assert (finding.kind, ranks([finding]), finding.layer) == ("noncommunication_hang", {3}, "application")
    assert finding.confidence == pytest.approx(0.8) and finding.victims == (0, 1, 2)


def test_the_journal_of_a_run_says_who_ended(tmp_path) -> None:
    started = [FactRecord(node="n1", fact=MemberStarted(f"m{rank}", rank, "n1", 10 + rank)) for rank in range(4)]
    gone = [FactRecord(node="n1", fact=MemberExited("m3", 3, 0, 0, protected=False))]
    gone += [FactRecord(node="n1", fact=MemberExited(f"m{rank}", rank, 0, 6, protected=False)) for rank in range(3)]
    run = run_of(tmp_path / "run", STARTED, *started, *gone, JobEnded(job="gpt", exit_code=134, why="rank 0 aborted"))
    (run / "logs").mkdir()
    for rank in range(3):
        (run / "logs" / f"m{rank}.log").write_text(timeout(rank, 105) + status(rank, 107, 104))
    (finding,) = diagnose_paths([run]).findings
    assert (finding.kind, ranks([finding])) == ("noncommunication_hang", {3})
    assert any("rank 3 (m3) exited with code 0" in line for line in finding.evidence)
