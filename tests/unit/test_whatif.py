"""What-if figures of traces, against those their authors published."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from dump_files import DATA, SHARED
from reading_all import findings_of, suspects_of

from keepstep.diagnosis.trace_verdict import diagnose_trace
from keepstep.diagnosis.whatif import replay_of, what_if
from keepstep.errors import RecordError
from keepstep.intake.bytedance import READER
from keepstep.records.operation_trace import OperationTrace

HERE, THERE = DATA / "straggler", SHARED / "straggler"
TWO_PERCENT = 0.02


def trace_of(path):
    (trace,) = READER.read(path)
    return trace


def check_figures(folder, name):
    figures = what_if(trace_of(folder / f"trace-{name}.parquet"))
    published = json.loads((folder / f"result-{name}.json").read_text())
    mean = {key: np.mean(list(published[f"step_t_{key}"].values())) for key in ("base", "nodelay", "noblk")}
    assert figures.measured_s == pytest.approx(mean["base"], rel=TWO_PERCENT)
    assert figures.replayed_s == pytest.approx(mean["nodelay"], rel=TWO_PERCENT)
    assert figures.ideal_s == pytest.approx(mean["noblk"], rel=TWO_PERCENT)
    assert figures.slow_down == pytest.approx(published["blocking_slowdown"], rel=TWO_PERCENT)
    for mine, key in ((figures.by_dp, "dp_rank"), (figures.by_stage, "stage"), (figures.by_kind, "optype")):
        theirs = published[f"blocking_decompose_by_{key}"]
        assert {str(name) for name in mine} == set(theirs)
        assert {str(name): value for name, value in mine.items()} == pytest.approx(theirs, rel=TWO_PERCENT)
    for mine, file, key in ((figures.slowest_share, "mw", "Mw"), (figures.last_stage_share, "ms", "Ms")):
        theirs = json.loads((folder / f"{file}-{name}.json").read_text())[key]
        assert mine == pytest.approx(theirs, rel=TWO_PERCENT, abs=1e-4)


def test_published_figures_of_the_heavy_stage():
    check_figures(HERE, "ST")


@pytest.mark.skipif(not THERE.exists(), reason="the whole data set is not beside the checkout")
def test_published_figures_of_the_slow_worker():
    check_figures(THERE, "AR")


def test_a_heavy_last_stage_is_no_faulty_worker():
    (finding,) = findings_of(HERE / "trace-ST.parquet")
    assert (finding.kind, finding.suspects) == ("imbalance", ())
    assert any("last stage" in line for line in finding.evidence)


@pytest.mark.skipif(not THERE.exists(), reason="the whole data set is not beside the checkout")
def test_one_slow_worker():
    (finding,) = findings_of(THERE / "trace-AR.parquet")
    assert finding.kind == "compute_slow"
    assert suspects_of([finding]) == [[[{"dp": 0, "stage": 0}]]]


def changed(trace, **columns):
    fields = {name: getattr(trace, name) for name in trace.__dataclass_fields__}
    return OperationTrace(**fields | columns)


def compute(trace):
    numbers = [number for number, kind in enumerate(trace.kinds) if kind.endswith("-compute")]
    return np.isin(trace.kind, numbers)


def evened(trace):
    """The trace with the computation of the last stage brought down to that of the others."""
    heavy = compute(trace) & (trace.stage == trace.stage.max())
    return changed(trace, duration=np.where(heavy, trace.duration * 0.105 / 0.1715, trace.duration))


def test_a_worker_made_slow_is_found_wherever_it_is():
    trace = evened(trace_of(HERE / "trace-ST.parquet"))
    for dp, stage in ((0, 1), (1, 3)):
        slow = compute(trace) & (trace.dp == dp) & (trace.stage == stage)
        (finding,) = diagnose_trace(changed(trace, duration=np.where(slow, trace.duration * 2.5, trace.duration)))
        assert (finding.kind, suspects_of([finding])) == ("compute_slow", [[[{"dp": dp, "stage": stage}]]])


def test_uneven_sequences_are_imbalance():
    trace = evened(trace_of(HERE / "trace-ST.parquet"))
    rng = np.random.default_rng(3)
    batches = np.stack([trace.step, trace.dp, trace.microbatch])
    _, which = np.unique(batches, axis=1, return_inverse=True)
    length = np.exp(0.5 * rng.standard_normal(which.max() + 1))[which.reshape(-1)]
    (finding,) = diagnose_trace(
        changed(trace, duration=np.where(compute(trace), trace.duration * length, trace.duration))
    )
    assert (finding.kind, finding.suspects) == ("imbalance", ())
    assert any("sequences" in line for line in finding.evidence)


def test_an_even_trace_is_healthy():
    trace = evened(trace_of(HERE / "trace-ST.parquet"))
    duration = trace.duration.copy()
    for number in range(len(trace.kinds)):
        mine = (trace.kind == number) & compute(trace)
        duration[mine] = np.median(duration[mine]) if mine.any() else 0.0
    even = changed(trace, duration=duration)
    calm = trace.step > 100  # in the first steps the embedding gradients took long
    columns = {name: getattr(even, name)[calm] for name in trace.__dataclass_fields__ if name not in ("kinds", "path")}
    (finding,) = diagnose_trace(changed(even, **columns))
    assert finding.kind == "healthy"


def test_steps_that_lack_operations_are_left_out():
    trace = trace_of(HERE / "trace-ST.parquet")
    first = int(trace.step.min())
    keep = ~((trace.step == first) & (trace.dp == 1) & (trace.sequence == 2))
    columns = {name: getattr(trace, name)[keep] for name in trace.__dataclass_fields__ if name not in ("kinds", "path")}
    assert first not in replay_of(changed(trace, **columns)).steps


def test_a_trace_of_nothing_whole_is_no_verdict(tmp_path):
    table = pq.read_table(HERE / "trace-ST.parquet").slice(0, 50)
    pq.write_table(table, tmp_path / "trace.parquet")
    (finding,) = findings_of(tmp_path)
    assert finding.kind == "undetermined"
    with pytest.raises(RecordError):
        what_if(trace_of(tmp_path / "trace.parquet"))


def test_a_torn_file_is_named(tmp_path):
    (tmp_path / "trace.parquet").write_bytes((HERE / "trace-ST.parquet").read_bytes()[:5000])
    assert findings_of(tmp_path) == ()
