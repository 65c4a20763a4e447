"""Tables of step times: as people write them, and what is a culprit in them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dump_files import DATA
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading_all import evidence_of, findings_of, suspects_of, unread_of

from keepstep.diagnosis.stragglers import diagnose_tables, diagnose_timings
from keepstep.records.evidence import StepTiming
from keepstep.records.timing_table import TimingTable

RANKS, STEPS = 8, 60


def times(seed=0, noise=0.03, ranks=RANKS, steps=STEPS):
    return 0.5 * (1 + noise * np.random.default_rng(seed).standard_normal((ranks, steps)))


def table(seconds, phase="step", **axes):
    ranks, steps = seconds.shape
    return TimingTable(
        phase,
        np.repeat(np.arange(ranks), steps),
        np.tile(np.arange(steps), ranks),
        seconds.ravel(),
        coordinates={name: np.repeat(np.array(values), steps) for name, values in axes.items()},
    )


def kinds(*tables):
    return [finding.kind for finding in diagnose_tables(tables)]


def blamed(*tables):
    return [one.rank for finding in diagnose_tables(tables) for some in finding.suspects for one in some]


def test_the_burst_of_worker_6():
    (finding,) = findings_of(DATA / "alibaba" / "job_1_norm.csv")
    assert (finding.kind, suspects_of([finding])) == ("compute_slow", [[[{"rank": 6}]]])
    assert any("burst" in line and "recovers" in line for line in finding.evidence)
    assert finding.cost is None  # the unit of the table is not known


@given(st.integers(0, 7), st.floats(1.3, 3.0), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_slow_rank_is_the_only_one_named(rank, factor, seed):
    seconds = times(seed)
    seconds[rank] *= factor
    assert blamed(table(seconds)) == [rank]


@given(st.integers(0, 1000), st.floats(0.0, 0.06))
@settings(max_examples=60, deadline=None)
def test_noise_blames_nobody(seed, noise):
    assert blamed(table(times(seed, noise))) == []


@given(st.integers(0, 500))
@example(481)
@settings(max_examples=40, deadline=None)
def test_uneven_sequences_blame_nobody(seed):
    rng = np.random.default_rng(seed)
    seconds = times(seed) * np.exp(0.2 * rng.standard_normal((RANKS, STEPS)))
    assert blamed(table(seconds * 0.4, "forward"), table(seconds * 0.8, "backward")) == []


@given(st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_a_straggler_that_rotates_is_imbalance(seed):
    seconds = times(seed)
    seconds[np.random.default_rng(seed).integers(0, RANKS, STEPS), np.arange(STEPS)] *= 1.6
    assert kinds(table(seconds)) == ["imbalance"]


def test_a_rank_that_becomes_slow():
    seconds = times()
    seconds[3, 40:] *= 1.4
    (finding,) = diagnose_tables([table(seconds)])
    assert [one.rank for some in finding.suspects for one in some] == [3]
    assert any("steps 4" in line for line in finding.evidence)


@pytest.mark.parametrize(("first", "last"), [(100, 200), (40, 110)])
def test_a_rank_that_is_a_little_slower_for_a_long_while(first, last):
    seconds = times(noise=0.02, steps=200)
    seconds[7, first:last] *= 1.2
    (finding,) = diagnose_tables([table(seconds, "compute")])
    assert [suspect.rank for suspect in finding.suspects[0]] == [7]
    assert f"steps {first // 10}" in finding.evidence[0]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_drift_a_little_blame_nobody(seed):
    generator = np.random.default_rng(seed)
    seconds = times(seed=seed, noise=0.03, steps=300)
    seconds *= 1 + np.cumsum(0.002 * generator.standard_normal(seconds.shape), axis=1).clip(-0.04, 0.04)
    assert blamed(table(seconds, "compute")) in ([], set())


def test_two_slow_ranks_are_two_findings():
    seconds = times(ranks=16)
    seconds[2] *= 1.3
    seconds[11] *= 1.8
    assert sorted(blamed(table(seconds))) == [2, 11]


def test_a_heavy_last_stage_is_imbalance_and_a_slow_rank_in_it_is_not_hidden():
    stage = [rank // 4 for rank in range(16)]
    seconds = times(ranks=16)
    seconds[12:] *= 1.5
    assert kinds(table(seconds, stage=stage)) == ["imbalance"]
    seconds[13] *= 1.4
    assert blamed(table(seconds, stage=stage)) == [13]


def test_a_heavy_last_stage_without_coordinates():
    seconds = times()
    seconds[6:] *= 1.5
    assert kinds(table(seconds)) == ["imbalance"]


def test_garbage_collection_now_and_then():
    seconds = times()
    seconds[2, ::20] *= 3
    assert blamed(table(seconds)) == []
    seconds[:, ::20] *= 3
    assert blamed(table(seconds)) == []


def test_the_first_step_compiles():
    seconds = times()
    seconds[:, 0] *= 40
    seconds[5, 0] *= 2
    assert kinds(table(seconds)) == ["healthy"]


def test_the_phase_says_the_layer():
    slow = times()
    slow[3] *= 2
    (finding,) = diagnose_tables([table(times(1), "forward"), table(slow, "data"), table(times(2), "step")])
    assert (finding.kind, finding.layer, [one.rank for some in finding.suspects for one in some]) == (
        "compute_slow",
        "dataloader",
        [3],
    )
    assert finding.cost == pytest.approx(0.5 * RANKS, rel=0.1)


def test_all_loaders_at_once_is_the_storage():
    seconds = times()
    seconds[:, 30:40] *= 4
    (finding,) = diagnose_tables([table(seconds, "data")])
    assert (finding.layer, finding.suspects) == ("storage", ())


def test_all_steps_at_once_cannot_tell():
    seconds = times()
    seconds[:, 30:40] *= 4
    assert kinds(table(seconds)) == ["undetermined"]


def test_who_waits_least_in_communication_is_late():
    seconds = times()
    seconds[4] *= 0.2
    assert blamed(table(seconds, "communication")) == [4]


def test_too_little_is_said():
    assert kinds(table(times(ranks=1))) == ["undetermined"]
    assert kinds(table(times(steps=2))) == ["undetermined"]


def test_single_timings():
    seconds = times()
    seconds[1] *= 1.5
    rows = [StepTiming(rank=rank, step=step, seconds=seconds[rank, step]) for rank in range(8) for step in range(STEPS)]
    (finding,) = diagnose_timings(rows)
    assert [one.rank for some in finding.suspects for one in some] == [1]


def rows(slow=5, factor=1.5, unit=1000.0):
    seconds = times()
    seconds[slow] *= factor
    return [(rank, step, seconds[rank, step] * unit) for step in range(STEPS) for rank in range(RANKS)]


def csv(header, lines, delimiter=","):
    return "\n".join([delimiter.join(header), *(delimiter.join(map(str, line)) for line in lines)]) + "\n"


@pytest.mark.parametrize("delimiter", [",", "\t", ";", " "])
@pytest.mark.parametrize(
    "header",
    [
        ("rank", "step", "step_time_ms"),
        ("worker", "iteration", "elapsed time per iteration (ms)"),
        ("Global Rank", "iter", "iterTime(ms)"),
        ("process_id", "global_step", "duration_ms"),
    ],
)
def test_names_of_columns(tmp_path, header, delimiter):
    if delimiter == " ":
        header = [name.replace(" ", "_") for name in header]
    (tmp_path / "times.csv").write_text(csv(header, rows(), delimiter))
    (finding,) = findings_of(tmp_path)
    assert suspects_of([finding]) == [[[{"rank": 5}]]]
    assert finding.cost == pytest.approx(0.25 * RANKS, rel=0.2)


def test_hosts_have_names(tmp_path):
    lines = [(f"gpu-node-{rank:02d}.cluster", step, ms) for rank, step, ms in rows()]
    (tmp_path / "times.tsv").write_text(csv(("hostname", "step", "step_time_ms"), lines, "\t"))
    assert suspects_of(findings_of(tmp_path)) == [[[{"node": "gpu-node-05.cluster"}]]]


def test_ranks_in_words(tmp_path):
    lines = [(f"rank_{rank}", step, ms) for rank, step, ms in rows()]
    (tmp_path / "times.csv").write_text(csv(("rank", "step", "time_ms"), lines))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_one_column_a_rank(tmp_path):
    seconds = times()
    seconds[5] *= 1.5
    header = ("step", *(f"rank{rank}" for rank in range(RANKS)))
    (tmp_path / "wide.csv").write_text(csv(header, [(step, *seconds[:, step]) for step in range(STEPS)]))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_phases_in_columns_and_in_rows(tmp_path):
    fine, slow = times(3), times(4)
    slow[2] *= 2
    wide = [(rank, step, fine[rank, step], slow[rank, step], 0.1) for rank in range(8) for step in range(STEPS)]
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "phases.csv").write_text(csv(("rank", "step", "forward_s", "dataloader_s", "opt_s"), wide))
    long = [
        (rank, step, name, value)
        for rank, step, *pair in wide
        for name, value in zip(("fwd", "data_load"), pair[:2], strict=True)
    ]
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "phases.csv").write_text(csv(("rank", "step", "phase", "seconds"), long))
    for name in ("wide", "long"):
        (finding,) = findings_of(tmp_path / name)
        assert (finding.layer, suspects_of([finding])) == ("dataloader", [[[{"rank": 2}]]])


def test_json_in_every_shape(tmp_path):
    objects = [{"rank": rank, "step": step, "step_time_ms": ms} for rank, step, ms in rows()]
    columns = {key: [item[key] for item in objects] for key in objects[0]}
    by_rank = {str(rank): [ms for other, _, ms in rows() if other == rank] for rank in range(RANKS)}
    shapes = {
        "list.json": json.dumps(objects),
        "inside.json": json.dumps({"job": "x", "records": objects}),
        "lines.jsonl": "\n".join(map(json.dumps, objects)),
        "columns.json": json.dumps(columns),
        "ranks.json": json.dumps({f"rank{rank}": series for rank, series in by_rank.items()}),
    }
    for name, text in shapes.items():
        (folder := tmp_path / name.replace(".", "-")).mkdir()
        (folder / name).write_text(text)
        assert suspects_of(findings_of(folder)) == [[[{"rank": 5}]]], name


def test_parquet_with_roles(tmp_path):
    table_of_rows = pa.table(
        {
            "rank": [rank for rank, _, _ in rows()],
            "pp_rank": [rank // 4 for rank, _, _ in rows()],
            "step": [step for _, step, _ in rows()],
            "compute_ms": [ms * (2 if rank >= 4 else 1) for rank, _, ms in rows()],
        }
    )
    pq.write_table(table_of_rows, tmp_path / "times.parquet")
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_one_file_a_rank(tmp_path):
    for rank in range(RANKS):
        mine = [row for row in rows() if row[0] == rank]
        (tmp_path / f"rank{rank}.csv").write_text(csv(("rank", "step", "step_time_ms"), mine))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_damaged_rows_are_left_out_and_said(tmp_path):
    text = csv(("rank", "step", "step_time_ms"), rows())
    lines = text.splitlines()
    lines[10:10] = ["garbage", "1,2,3,4,5"]
    lines[20] = "3,12,nan"
    (tmp_path / "times.csv").write_bytes("\r\n".join(lines).encode() + b"\r\n\xff\xfe")
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]
    assert "left out" in unread_of(tmp_path)[0].why


@pytest.mark.parametrize(
    "text",
    [
        "rank,step,step_time_ms\n",
        "a,b,c\n1,2,3\n",
        "rank,step,step_time_ms\nx,y,z\n",
        "JobID|State|Elapsed\n1|FAILED|00:10:00\n",
        "PAR1",
    ],
)
def test_other_tables_are_left_to_others(text, tmp_path):
    (tmp_path / "table.csv").write_text(text)
    assert [item for item in evidence_of(tmp_path) if isinstance(item, TimingTable)] == []


def one_file_a_rank(folder, **which):
    for rank in range(RANKS):
        mine = [row for row in rows(**which) if row[0] == rank]
        (folder / f"rank{rank}.csv").write_text(csv(("rank", "step", "step_time_ms"), mine))


def test_a_file_that_is_there_twice_doubles_no_time(tmp_path):
    one_file_a_rank(tmp_path, factor=1.0)
    (tmp_path / "rank3 (1).csv").write_text((tmp_path / "rank3.csv").read_text())
    (finding,) = findings_of(tmp_path)
    assert finding.kind == "healthy"
    assert any(line.startswith("rank 3: the same steps") for line in finding.evidence)
    one_file_a_rank(tmp_path)
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_steps_that_were_run_again_after_a_restart(tmp_path):
    again = [row for row in rows(factor=1.0) if 20 <= row[1] < 35]
    (tmp_path / "times.csv").write_text(csv(("rank", "step", "step_time_ms"), rows(factor=1.0) + again))
    assert [finding.kind for finding in findings_of(tmp_path)] == ["healthy"]


def test_micro_batches_are_added(tmp_path):
    parts = [(rank, step, ms / 4) for rank, step, ms in rows() for _ in range(4)]
    (tmp_path / "times.csv").write_text(csv(("rank", "step", "step_time_ms"), parts))
    (finding,) = findings_of(tmp_path)
    assert suspects_of([finding]) == [[[{"rank": 5}]]]
    assert finding.cost == pytest.approx(0.25 * RANKS, rel=0.2)
    assert not any("more than once" in line for line in finding.evidence)


def test_a_rank_that_no_job_has(tmp_path):
    (tmp_path / "times.csv").write_text(csv(("rank", "step", "step_time_ms"), [*rows(), ("1e300", 3, 500)]))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


FORMS = {
    "csv": lambda rows: "step,forward_ms,loss\n" + "".join(f"{step},{ms},1.5\n" for step, ms in rows),
    "jsonl": lambda rows: "".join(json.dumps({"step": step, "forward_ms": ms}) + "\n" for step, ms in rows),
    "json": lambda rows: json.dumps([{"step": step, "forward_ms": ms} for step, ms in rows]),
}


@pytest.mark.parametrize("name", ["rank{}.csv", "times_rank_{}.jsonl", "worker-{}.json", "rank={}/part.parquet"])
def test_a_file_that_is_named_for_its_rank(tmp_path, name):
    seconds = 1000 * times(ranks=4)
    seconds[2] *= 1.5
    for rank in range(4):
        path = tmp_path / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"step": range(STEPS), "forward_ms": seconds[rank]}), path)
        else:
            path.write_text(FORMS[path.suffix[1:]](list(enumerate(seconds[rank].tolist()))))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 2}]]]


@pytest.mark.parametrize("names", ["step,loss,lr", "step,time,loss", "time,forward_ms"])
def test_a_file_of_a_rank_without_steps_or_times_is_no_table(tmp_path, names):
    (tmp_path / "rank0.csv").write_text(f"{names}\n" + "".join(f"{n},{n},{n}\n" for n in range(9)))
    assert [item.why for item in unread_of(tmp_path)] == ["no known format"]


def test_tables_that_are_judged_apart_are_named(tmp_path):
    for name, factor in (("job1", 1.0), ("job2", 1.5)):
        seconds = times()
        seconds[3] *= factor
        rows = [f"{rank},{step},{seconds[rank, step]}" for rank in range(RANKS) for step in range(STEPS)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["rank,step,forward_s", *rows]) + "\n")
    (finding,) = findings_of(tmp_path)
    assert finding.evidence[-1] == f"seen in {tmp_path / 'job2.csv'}"


def test_a_parquet_file_that_was_cut_off_is_named_as_damaged(tmp_path):
    pq.write_table(pa.table({"rank": [0, 1] * 50, "step_time_ms": [1.0] * 100}), tmp_path / "times.parquet")
    content = (tmp_path / "times.parquet").read_bytes()
    (tmp_path / "times.parquet").write_bytes(content[: len(content) // 2])
    assert "damaged Parquet" in unread_of(tmp_path)[0].why
