"""What `keepstep diagnose` is given: directories, damage, nonsense, colours, other jobs' files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random

import pytest
from diagnosed_text import dump, found_in, ranks, status, timeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.cli.entry import main
from keepstep.diagnosis.failure_report import failure_report
from keepstep.errors import KeepstepError, RecordError, UsageError
from keepstep.intake.reading import HEAD_BYTES
from keepstep.service.diagnosing import diagnose_paths

ONE_BEHIND = "".join(timeout(rank, 105) + status(rank, 107, 104) for rank in range(3)) + dump(3, 104, 104, 0)


def test_a_directory_that_mixes_everything(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "job.log").write_text(ONE_BEHIND)
    (tmp_path / "a" / "b" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "a" / "empty.log").write_text("")
    answer = diagnose_paths([tmp_path])
    assert ranks(answer.findings) == {3}
    assert sorted(os.path.basename(item.path) for item in answer.unread) == ["empty.log", "weights.bin"]
    assert all(item.why for item in answer.unread)


def test_one_file_for_each_rank(tmp_path):
    for rank in range(4):
        lines = [line for line in ONE_BEHIND.splitlines(True) if line.startswith(f"[rank{rank}]")]
        (tmp_path / f"rank_{rank}.log").write_text("".join(lines).replace(f"[rank{rank}]:", ""))
    assert ranks(diagnose_paths([tmp_path]).findings) == {3}


@pytest.mark.parametrize("ends", ["\r\n", "\r", "\n"])
def test_colours_line_ends_and_bytes_that_are_no_text(ends, tmp_path):
    coloured = "".join(f"\x1b[31m{line}\x1b[0m{ends}" for line in ONE_BEHIND.splitlines())
    path = tmp_path / "job.log"
    path.write_bytes(b"\xff\xfe-not-utf8 \x80\x81" + ends.encode() + coloured.encode())
    assert ranks(diagnose_paths([path]).findings) == {3}


def test_lines_of_several_ranks_on_one_line(tmp_path):
    assert ranks(found_in(ONE_BEHIND.replace("\n", ""), tmp_path)) == {3}


def test_a_compressed_log(tmp_path):
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(ONE_BEHIND.encode()))
    assert ranks(diagnose_paths([path]).findings) == {3}


def test_a_compressed_log_that_is_cut_off_gives_what_it_has(tmp_path):
    noise = "".join(random.Random(1).choices("abcdefgh ", k=100_000))
    content = gzip.compress((ONE_BEHIND + noise).encode())
    path = tmp_path / "job.log.gz"
    path.write_bytes(content[: len(content) - 2000])
    answer = diagnose_paths([path])
    assert ranks(answer.findings) == {3}
    assert "damaged" in answer.unread[0].why


def test_utf16(tmp_path):
    path = tmp_path / "job.log"
    path.write_bytes(ONE_BEHIND.encode("utf-16"))
    assert ranks(diagnose_paths([path]).findings) == {3}


def test_a_log_without_an_end(tmp_path):
    cut = ONE_BEHIND[: len(ONE_BEHIND) - 30]
    assert all(finding.kind != "healthy" for finding in found_in(cut, tmp_path))


def test_a_very_long_line(tmp_path):
    assert ranks(found_in("x" * 3_000_000 + "\n" + ONE_BEHIND, tmp_path)) == {3}


@pytest.mark.parametrize(
    "piece",
    [
        "comm 0x1 rank 1 nranks 2 commid ",
        "captures node1 behind ",
        "iteration 1 step 1 ",
        "ranks 1, 2, 3 never ",
        "[rank1]:[E1 x] before timing out Work",
    ],
)
def test_a_line_made_to_be_slow_is_read_all_the_same(piece, tmp_path):
    """Expressions whose cost grows with the square of a line, or worse, would not come back from this."""
    assert ranks(found_in(piece * 4000 + "\n" + ONE_BEHIND, tmp_path)) >= {3}


def test_links_out_of_the_directory_are_not_followed(tmp_path):
    """What is beside a job's files may be another job's."""
    (tmp_path / "other.log").write_text("[rank9]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.log").write_text("step 1 loss 2.0\nstep 2 loss 1.0\n")
    (tmp_path / "mine" / "link.log").symlink_to(tmp_path / "other.log")
    answer = diagnose_paths([tmp_path / "mine"])
    assert [finding.kind for finding in answer.findings] == ["healthy"]
    assert "leads out" in answer.unread[0].why


def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "job.log").write_text("step 1 loss 2.0\n")
    answer = diagnose_paths([tmp_path])
    assert [item.why for item in answer.unread] == ["not a file: a device, socket or pipe"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("it-was-executed",)


def test_a_malicious_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(RecordError):
        diagnose_paths([tmp_path / "_dump_0"])
    assert not (tmp_path / "it-was-executed").exists()


def test_mistakes_are_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        diagnose_paths([tmp_path / "none"])
    with pytest.raises(UsageError, match="nothing to read"):
        diagnose_paths([tmp_path])
    (tmp_path / "a.bin").write_bytes(b"\0\1\2\3" * 500)
    with pytest.raises(RecordError, match="nothing could be read"):
        diagnose_paths([tmp_path])


@pytest.mark.parametrize(("text", "code"), [("step 1 loss 2.0\nstep 2 loss 1.9\n", 0), (ONE_BEHIND, 1)])
def test_the_exit_code(text, code, tmp_path, capsys):
    (tmp_path / "job.log").write_text(text)
    assert main(["diagnose", str(tmp_path)]) == code
    assert main(["diagnose", str(tmp_path), "--format", "json"]) == code
    assert capsys.readouterr().out


def test_the_exit_code_of_a_mistake(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_report_has_no_control_characters(tmp_path):
    text = "[rank1]: \x1b]0;title\x07\x1b[2J\x00RuntimeError: bad \u202e value\n" + timeout(0, 3)
    report = failure_report(found_in(text, tmp_path))
    assert all(character == "\n" or character.isprintable() for character in report)
    assert "rank 1" in report


def test_the_report_answers_the_questions_of_a_user(tmp_path):
    report = failure_report(found_in(ONE_BEHIND, tmp_path))
    for label in (
        "What happened",
        "First out of pattern  rank 3",
        "Only waited",
        "ranks 0, 1, 2",
        "Whose problem",
        "How sure",
    ):
        assert label in report
    assert "What to do next" in report
    assert "To be certain" in report


PIECES = st.sampled_from(
    [
        *ONE_BEHIND.splitlines(),
        "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        'Thread 12 (idle): "MainThread"',
        "    wait (threading.py:302)",
        "rank 99999999999999999999: before forward",
        "srun: error: n1: tasks 0-99999999999: Killed",
        "{", "[", "}", "~~~~", "---", "Xid", "NVRM: Xid (PCI:x): 99999999999",
        "Rank 1 is running collective: , but Rank 2 is", "Detected mismatch between collectives on ranks.",
        "backward_ms: rank0 1 rank1 2 rank2 999999999999999999999999999", "world_size=99999999999",
        "Ranks 1-99999999999 failed to pass monitoredBarrier",
    ]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.one_of(PIECES, st.text(max_size=60)), min_size=1, max_size=12))
def test_any_mixture_of_lines_gives_an_answer(lines, tmp_path):
    """Never a traceback, and who is blamed never only waits as well."""
    path = tmp_path / "any.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")
    try:
        answer = diagnose_paths([path])
    except KeepstepError:
        return
    assert answer.findings
    assert failure_report(answer.findings, answer.unread)
    for finding in answer.findings:
        assert 0 <= finding.confidence <= 1
        assert not set(finding.victims) & ranks([finding])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(min_size=1, max_size=400),
    name=st.sampled_from(["x.log", "_dump_3", "a.csv", "b.json", "c.parquet", "d.ring", "e.gz"]),
)
def test_any_bytes_give_an_answer_or_a_reason(content, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    try:
        assert diagnose_paths([path]).findings
    except KeepstepError as error:
        assert error.what


def json_lines(*messages, steps=400, ranks=4):
    rows = [
        json.dumps(
            {"ts": f"2026-01-31T10:{step // 60:02}:{step % 60:02}Z", "rank": rank, "step": step, "step_time_ms": 500.5}
        )
        for step in range(steps)
        for rank in range(ranks)
    ]
    return "\n".join([*rows, *messages]) + "\n"


def test_messages_among_the_times_of_a_large_log_of_objects(tmp_path):
    told = [json.dumps({"rank": 1, "message": line.split("]:", 1)[1]}) for line in ONE_BEHIND.splitlines()[:1]]
    text = json_lines(*told)
    assert len(text) > HEAD_BYTES
    (tmp_path / "train.jsonl").write_text(text)
    answer = diagnose_paths([tmp_path / "train.jsonl"])
    assert answer.exit_code == 1
    (tmp_path / "train.jsonl").write_text(json_lines())
    assert diagnose_paths([tmp_path / "train.jsonl"]).exit_code == 0


def test_too_much_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.service.diagnosing._MOST_RECORDS", 3)
    monkeypatch.setattr("keepstep.service.diagnosing._MOST_STACKS", 1)
    for rank in range(6):
        content = {"pg_config": {}, "entries": [{"collective_seq_id": 1, "profiling_name": "nccl:barrier"}]}
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(content, protocol=2))
        (tmp_path / f"stack_{rank}.txt").write_text(
            f"Process {100 + rank}: python train.py\nPython v3.11\n\n"
            f'Thread {100 + rank} (idle): "MainThread"\n    wait (threading.py:320)\n    <module> (train.py:4)\n'
        )
    whys = [item.why for item in diagnose_paths([tmp_path]).unread]
    assert sorted(why for why in whys if "kept" in why) == ["only 1 stacks are kept", "only 3 records are kept"]
