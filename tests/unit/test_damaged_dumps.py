"""Damaged files of every format: never a traceback, and nobody is blamed by chance because a file was torn."""

from __future__ import annotations

import json

import pytest
from dump_files import DATA, dump, entry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading_all import findings_of

SAMPLES = {
    "_dump_12": (DATA / "flight_recorder" / "gpu_error_1st" / "_dump_12.pickle").read_bytes(),
    "dump_3.json": json.dumps(dump([entry(n, seq=n) for n in range(1, 5)], range(4))).encode(),
    "ras_straggler": (DATA / "ras" / "ncclexample-sleep-straggler-rank7.txt").read_bytes(),
    "ras_dead": (DATA / "ras" / "ncclexample-exit-dead-rank7.txt").read_bytes(),
    "times.csv": b"\n".join((DATA / "alibaba" / "job_1_norm.csv").read_bytes().split(b"\n")[:60]),
    "trace.parquet": (DATA / "straggler" / "trace-ST.parquet").read_bytes()[:20_000],
    "times.json": json.dumps(
        [{"rank": n % 4, "step": n // 4, "step_time_ms": 5.0 + n % 3} for n in range(40)]
    ).encode(),
    "inspector.log": b"\n".join(
        json.dumps(
            {
                "header": {"id": "a", "rank": 0, "n_ranks": 2},
                "coll_perf": {"coll": "x", "coll_sn": n, "coll_exec_time_us": 5},
            }
        ).encode()
        for n in range(5)
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_and_cuts(name, data, tmp_path):
    content = bytearray(SAMPLES[name])
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path / name
    path.write_bytes(bytes(content[:cut] if data.draw(st.booleans()) else content))
    findings = findings_of(path)
    assert all(0 <= finding.confidence <= 1 for finding in findings)


@given(content=st.binary(max_size=300), name=st.sampled_from(sorted(SAMPLES)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nonsense_says_nothing(content, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    assert all(not finding.suspects for finding in findings_of(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**18) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["entries", "pg_config", "pg_status", "ranks", "process_group", "collective_seq_id", "state", "frames"]
                + [
                    "communicators",
                    "missing_ranks",
                    "status",
                    "rank",
                    "host",
                    "collective_counts",
                    "size",
                    "event",
                    "peer",
                ]
                + ["header", "coll_perf", "coll_sn", "metadata", "step", "step_time_ms", "worker", "0", "1"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=25,
)


@given(value=json_values, name=st.sampled_from(["dump_1.json", "ras.json", "times.json"]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_of_any_shape(value, name, tmp_path):
    path = tmp_path / name
    path.write_text(json.dumps(value))
    assert findings_of(path) is not None
