"""Tables are read in blocks, and no more of them than fits: what they say does not depend on where a block ends."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading_all import evidence_of, findings_of, suspects_of, unread_of
from test_timings import RANKS, STEPS, csv, rows

from keepstep.errors import RecordError
from keepstep.intake import table_files
from keepstep.intake.timings import READER
from keepstep.records.timing_table import TimingTable

HEADER = ("rank", "step", "step_time_ms")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 700)
    monkeypatch.setattr(table_files, "_PIECE_BYTES", 300)


def objects():
    return [dict(zip(HEADER, row, strict=True)) for row in rows()]


def table_of(folder):
    (table,) = [item for item in evidence_of(folder) if isinstance(item, TimingTable)]
    return table


@pytest.mark.parametrize("delimiter", [",", " "])
def test_csv_in_many_blocks(delimiter, tmp_path, small_blocks):
    text = csv(HEADER, rows(), delimiter)
    (tmp_path / "times.csv").write_text("# made by hand\n" + text.replace("\n3", "\n\n# a remark\n3", 1))
    assert len(table_of(tmp_path).seconds) == RANKS * STEPS
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_json_lines_in_many_blocks(tmp_path, small_blocks):
    (tmp_path / "times.jsonl").write_text("\n".join(map(json.dumps, objects())))
    assert len(table_of(tmp_path).seconds) == RANKS * STEPS
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_words_among_the_numbers_of_one_block(form, tmp_path, small_blocks):
    if form == "csv":
        text = csv(HEADER, [*rows(), (0, STEPS, "unknown"), ("rank_1", STEPS, 500)])
    else:
        more = [
            {"rank": 0, "step": STEPS, "step_time_ms": "unknown"},
            {"rank": "rank_1", "step": STEPS, "step_time_ms": 500},
        ]
        text = "\n".join(map(json.dumps, [*objects(), *more]))
    (tmp_path / f"times.{form}").write_text(text)
    table = table_of(tmp_path)
    assert (len(table.seconds), table.names) == (RANKS * STEPS + (form == "csv"), ())
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_rows_that_are_left_out_are_counted_over_all_blocks(tmp_path, small_blocks):
    lines = csv(HEADER, rows()).splitlines()
    lines[100:100] = lines[300:300] = ["1,2,3,4"]
    (tmp_path / "times.csv").write_text("\n".join(lines) + "\n")
    assert unread_of(tmp_path)[0].why.startswith("2 rows")


def test_a_compressed_table_that_is_cut_off(tmp_path, small_blocks):
    (tmp_path / "times.csv.gz").write_bytes(gzip.compress(csv(HEADER, rows()).encode())[:-400])
    assert 100 < len(table_of(tmp_path).seconds) < RANKS * STEPS
    assert "cut off" in unread_of(tmp_path)[0].why


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_more_rows_than_are_read(form, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "MOST_VALUES", 900)
    path = tmp_path / f"times.{form}"
    if form == "parquet":
        columns = {name: [row[at] for row in rows()] for at, name in enumerate(HEADER)}
        pq.write_table(pa.table(columns | {"note": ["x"] * len(rows())}), path)
    else:
        path.write_text(csv(HEADER, rows()) if form == "csv" else "\n".join(map(json.dumps, objects())))
    assert len(table_of(tmp_path).seconds) == 300
    assert unread_of(tmp_path)[0].why == "Only the first 300 rows were read."


def test_columns_that_are_no_numbers_and_no_words(tmp_path):
    columns = {name: [row[at] for row in rows()] for at, name in enumerate(HEADER)}
    pq.write_table(pa.table(columns | {"iter": [[1, 2]] * len(rows()), "dp": [{"a": 1}] * len(rows())}), tmp_path / "a")
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_a_time_stamp_in_the_place_of_the_step(tmp_path):
    lines = [(rank, f"2026-01-31 10:{step // 60:02}:{step % 60:02}", ms) for rank, step, ms in rows()]
    (tmp_path / "times.csv").write_text(csv(("rank", "timestamp", "step_time_ms"), lines))
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("rank,step,step_time_ms\n", "a table without rows"),
        ("rank,step,step_time_ms\na,b,c\n1,2\n,,\n0,0,-1\n1,0,inf\n", "a table whose times are no numbers"),
    ],
)
def test_a_table_with_nothing_to_compare_is_a_table_all_the_same(tmp_path, content: str, said: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)
    assert READER.recognises(path, content.encode())
    with pytest.raises(RecordError, match=said):
        list(READER.read(path))


@pytest.mark.parametrize("name", ["step_time", "step_time_ms"])
@pytest.mark.parametrize("form", ["s", "ms", "us", "ns", "csv", "jsonl"])
def test_columns_of_durations_are_times(form, name, tmp_path):
    if form in ("csv", "jsonl"):
        words = [(rank, step, f"0 days 00:00:{ms / 1000:09.6f}") for rank, step, ms in rows()]
        lines = [dict(zip(("rank", "step", name), row, strict=True)) for row in words]
        text = csv(("rank", "step", name), words) if form == "csv" else "\n".join(map(json.dumps, lines))
        (tmp_path / f"times.{form}").write_text(text)
    else:
        per_s = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[form]
        factor = 1000 if form == "s" else 1  # in whole seconds
        took = pa.array([round(ms / 1000 * factor * per_s) for *_, ms in rows()], type=pa.duration(form))
        columns = {"rank": [rank for rank, *_ in rows()], "step": [step for _, step, _ in rows()], name: took}
        pq.write_table(pa.table(columns), tmp_path / "times.parquet")
    table = table_of(tmp_path)
    assert len(table.seconds) == RANKS * STEPS and table.unit_known
    assert float(table.seconds[0]) == pytest.approx(rows()[0][2] / 1000 * (1000 if form == "s" else 1), rel=0.01)
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]


def test_words_in_a_column_of_durations_are_left_out(tmp_path):
    lines = [(rank, step, f"0 days 00:00:{ms / 1000:09.6f}" if step else "") for rank, step, ms in rows()]
    (tmp_path / "times.csv").write_text(csv(HEADER, [*lines, (0, STEPS, "a rest of days")]))
    assert len(table_of(tmp_path).seconds) == RANKS * (STEPS - 1)


def test_tables_with_headers_that_were_put_together(tmp_path, small_blocks):
    parts = [csv(HEADER, [row for row in rows() if row[0] == rank]) for rank in range(RANKS)]
    (tmp_path / "all.csv").write_text("\ufeff".join(parts))
    assert len(table_of(tmp_path).seconds) == RANKS * STEPS
    assert [item.why for item in unread_of(tmp_path)] == [f"{RANKS - 1} lines that repeat the header were passed over."]


@pytest.mark.parametrize("form", ["lines", "list"])
@pytest.mark.parametrize("outer", ["timers", "step_times"])
def test_times_in_an_object_of_each_row(outer, form, tmp_path):
    found = [{"rank": rank, "step": step, outer: {"forward": ms, "data": 3.0}} for rank, step, ms in rows()]
    text = "\n".join(map(json.dumps, found)) if form == "lines" else json.dumps(found)
    (tmp_path / "times.json").write_text(text)
    assert {item.phase for item in evidence_of(tmp_path) if isinstance(item, TimingTable)} == {"forward", "data"}
    assert suspects_of(findings_of(tmp_path)) == [[[{"rank": 5}]]]
