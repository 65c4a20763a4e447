"""Tables of times with noise in small phases, other units, pauses, values that are no times, or no times at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reading_all import findings_of, unread_of
from test_timings import table, times

from keepstep.diagnosis.stragglers import diagnose_tables
from keepstep.errors import RecordError
from keepstep.intake.column_names import meaning_of
from keepstep.service.diagnosing import diagnose_paths


def noisy(mean, deviation, seed=0):
    return np.maximum(0.0, np.random.default_rng(seed).normal(mean, deviation, (8, 60)))


def test_noise_of_a_small_phase_is_no_uneven_work():
    (finding,) = diagnose_tables([table(noisy(0.1, 0.005), "forward"), table(noisy(0.02, 0.003, 1), "data")])
    assert finding.kind == "healthy"


def test_uneven_work_in_a_large_phase_is_told():
    (finding,) = diagnose_tables([table(noisy(0.1, 0.015), "forward"), table(noisy(0.02, 0.003, 1), "data")])
    assert finding.kind == "imbalance"


def test_a_loader_that_is_slow_in_turn_costs_steps():
    data = noisy(0.02, 0.001)
    data[np.arange(60) % 8, np.arange(60)] = 0.1
    (finding,) = diagnose_tables([table(noisy(0.1, 0.005), "forward"), table(data, "data")])
    assert finding.kind == "imbalance"


@pytest.mark.parametrize("odd", [[2], [0, 1, 2, 4, 5, 6, 7]], ids=["one", "all but one"])
@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_members_in_another_unit_are_not_slow(odd, slow):
    seconds = times()
    seconds[5] *= slow
    seconds[odd] *= 1000
    findings = diagnose_tables([table(seconds, "compute")])
    assert [[one.rank for some in finding.suspects for one in some] for finding in findings] == [
        [5] if slow > 1 else []
    ]
    assert any("another unit" in line for finding in findings for line in finding.evidence)
    assert all(finding.confidence <= 0.6 for finding in findings)


def test_a_loader_that_takes_a_thousand_times_as_long_is_slow():
    seconds = times()
    seconds[2] *= 1000
    (finding,) = diagnose_tables([table(seconds, "data")])
    assert (finding.kind, finding.suspects[0][0].rank) == ("compute_slow", 2)


def test_pauses_are_told():
    seconds = times()
    seconds[0, 20::20] = 30.0
    seconds[:, 7] = 20.0
    (finding,) = diagnose_tables([table(seconds, "compute")])
    assert finding.kind == "healthy"
    text = "\n".join(finding.evidence)
    assert "rank 0 paused in 2 of 60 steps (20, 40)" in text and "all members paused in 1 of 60" in text


def test_a_start_up_that_was_left_out_is_told():
    seconds = times()
    seconds[:, 0] = 20.0
    (finding,) = diagnose_tables([table(seconds, "compute")])
    assert "left out, as start-up" in "\n".join(finding.evidence)


def test_whole_steps_need_phases():
    (finding,) = diagnose_tables([table(times())])
    assert (finding.kind, finding.confidence) == ("healthy", 0.5)
    assert "phases" in finding.next_probe


def rows(header, line):
    return header + "\n" + "".join(line(rank, step) + "\n" for step in range(30) for rank in range(4))


def test_values_that_are_no_times_are_told(tmp_path):
    text = rows(
        "rank,step,compute_ms,data_ms",
        lambda rank, step: f"{rank},{step},{-100 if rank == 1 else 100},{'inf' if rank else 'nan'}",
    )
    (tmp_path / "t.csv").write_text(text)
    first, second = (item.why for item in unread_of(tmp_path))
    assert "column compute_ms: 30 of 120 values are negative or infinite; nothing is left of 1" in first
    assert "column data_ms: none of its 120 values is a time" in second
    assert [finding.kind for finding in findings_of(tmp_path)] == ["healthy"]


def test_empty_fields_are_nothing_to_tell(tmp_path):
    text = rows("rank,step,compute_ms,checkpoint_ms", lambda rank, step: f"{rank},{step},100,{'' if step % 10 else 5}")
    (tmp_path / "t.csv").write_text(text)
    assert not unread_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (rows("rank,step,tokens_per_s", lambda rank, step: f"{rank},{step},1000.5"), "without a column of times"),
        (rows("rank,step,memory_mb", lambda rank, step: f"{rank},{step},20000"), "without a column of times"),
        (rows("rank,step,loss", lambda rank, step: f"{rank},{step},2.5"), "without a column of times"),
        (
            "rank,step,compute_ms\n0,0,\n,,\na,b,c\n1,99999999999999999999999,1e309\n",
            "times are no numbers: column compute_ms, row 3: 'c'",
        ),
        ("[" * 90_000, "JSON that cannot be read"),
        ('{"a": [1, 2', "JSON that cannot be read"),
    ],
    ids=["rate", "memory", "loss", "words", "deep", "cut"],
)
def test_what_is_neither_times_nor_a_log_is_named(text, says, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(RecordError, match=says):
        diagnose_paths([tmp_path])


@pytest.mark.parametrize(
    "text", ["[rank0] hello\n[rank1] hello\n", '{"msg": "hello"}\n{"msg": "again"}\n', "[1, 2] hello\n"]
)
def test_a_log_that_says_nothing_is_a_log(text, tmp_path):
    (tmp_path / "x.log").write_text(text)
    assert [finding.kind for finding in diagnose_paths([tmp_path]).findings] == ["undetermined"]


MOMENTS = "rank,step,compute_start,compute_end,comm_start,comm_end"


def moments(rank, step):
    begin, compute = 1.7e9 + 300 * rank + step, 0.16 if rank == 3 else 0.12 + (rank + step) % 3 / 1000
    return f"{rank},{step},{begin:.4f},{begin + compute:.4f},{begin + compute:.4f},{begin + 0.163:.4f}"


def test_two_moments_of_a_phase_are_a_time(tmp_path):
    (tmp_path / "t.csv").write_text(rows(MOMENTS, moments))
    (finding,) = findings_of(tmp_path)
    assert (finding.kind, finding.suspects[0][0].rank) == ("compute_slow", 3)


def test_two_moments_of_the_step_are_its_time():
    found = meaning_of(["rank", "step", "step_start", "step_end", "fwd_begin_ms", "fwd_finish_ms", "end_to_end_ms"])
    assert found.ends == {"step_start": "step_end", "fwd_begin_ms": "fwd_finish_ms"}
    assert (found.whole, found.phases, found.alone) == ("step_start", {"fwd_begin_ms": "forward"}, [])


def test_a_moment_alone_is_no_time(tmp_path):
    assert not meaning_of(["rank", "step", "compute_start", "comm_ts"]).useful
    (tmp_path / "t.csv").write_text(rows("rank,step,data_ms,comm_end,fwd_start", lambda *at: f"{at[0]},{at[1]},5,9,9"))
    (item,) = unread_of(tmp_path)
    assert "left out: comm_end, fwd_start" in item.why


def test_rows_whose_times_cannot_be_found_are_no_log(tmp_path):
    found = [{"rank": at % 4, "step": at // 4, "a": {"b": {"forward": 1.0}}} for at in range(80)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, found)))
    with pytest.raises(RecordError, match="without a column for the rank and one for the time"):
        diagnose_paths([tmp_path])
