"""sacct's text: line breaks and delimiters in fields, bad bytes, running jobs, zones, missing columns."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from fleet_data import data_bytes, read_text, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import RecordError
from keepstep.intake.delimited_rows import Layout, read_rows
from keepstep.intake.sacct_fields import FREE_TEXT, USED, delimiter_of
from keepstep.intake.sacct_values import duration_us, gpus_of, job_name_of, looks_right, state_of

HEAD = "JobID|JobName|User|State|Submit|Start|End|ElapsedRaw|NNodes|AllocTRES|NodeList|Comment\n"


def row(
    job="7", name="a", state="COMPLETED", start="2026-03-01T10:00:00", end="2026-03-01T11:00:00", elapsed="3600", **more
):
    fields = {"submit": start, "nodes": "1", "tres": "cpu=8,gres/gpu=8", "list": "n1", "comment": ""} | more
    return "|".join(
        [
            job,
            name,
            "ann",
            state,
            fields["submit"],
            start,
            end,
            elapsed,
            fields["nodes"],
            fields["tres"],
            fields["list"],
            fields["comment"],
        ]
    )


@pytest.mark.parametrize("cluster", ["a", "c"])
def test_every_job_of_the_test_clusters_is_taken(cluster):
    text, lives = (
        read_text(data_bytes(f"{cluster}_sacct_P.txt")),
        read_text(data_bytes(f"{cluster}_sacct_P_X_duplicates.txt")),
    )
    assert (text.aside, lives.aside) == ((), ())
    assert {"a": (18, 25, 20), "c": (23, 29, 26)}[cluster] == (
        text.attempts.num_rows,
        text.steps.num_rows,
        lives.attempts.num_rows,
    )


def test_pipes_in_the_submit_line_do_not_shift_the_columns():
    taken = read_text(data_bytes("c_sacct_P.txt"))
    first = taken.attempts.filter(pa.compute.equal(taken.attempts["job_id"], "1")).to_pylist()[0]
    assert (first["gpus"], first["nodes"], first["group_key"], first["state"]) == (32, "n[1-4]", "llm-7b", "COMPLETED")


def test_a_line_break_inside_a_field_is_joined_as_gcm_expects_it():
    """The expected text of GCM writes the break as two characters; ours is a blank. All else is equal, row by row."""
    given_, expected = (read_text(data_bytes(f"gcm_one-multiline{end}.txt")) for end in ("", "-expected"))
    assert given_.attempts.equals(expected.attempts)
    assert given_.steps.equals(expected.steps)
    assert (given_.attempts.num_rows, given_.steps.num_rows, given_.aside) == (2, 2, ())


def test_half_a_line_is_kept_aside_and_the_lines_around_it_are_taken():
    taken = read_text(data_bytes("gcm_output-with-invalid-lines.txt"))
    assert [(one.line, one.reason) for one in taken.aside] == [(2, "93 fields where 109 are expected")]
    whole = read_text(HEAD + row("1") + "\nmple|x|y\n" + row("2") + "\n")
    assert rows_of(whole.attempts, "job_id") == [("1",), ("2",)]
    assert [one.line for one in whole.aside] == [3]


def test_steps_of_arrays_belong_to_the_task():
    taken = read_text(data_bytes("gcm_output.txt.gz"))
    assert (taken.attempts.num_rows, taken.steps.num_rows, taken.aside) == (0, 68, ())
    assert set(rows_of(taken.steps, "job_id", "step")) == {("8012944_24093", "0")}


def test_few_columns_are_enough_and_the_others_are_named_with_their_command():
    taken = read_text(data_bytes("gcm_midnight.txt.gz"))
    assert (taken.attempts.num_rows, taken.steps.num_rows, taken.aside) == (306, 880, ())
    assert "AllocTRES (GPUs)" in taken.notes[0]
    assert "sacct -a -D -P" in taken.notes[0]
    assert set(taken.attempts["gpus"].to_pylist()) == {None}


def test_columns_that_nothing_can_do_without_are_named():
    with pytest.raises(RecordError, match=r"columns missing: End .*sacct -a -D -P"):
        read_text("JobID|State|Start\n1|COMPLETED|2026-03-01T10:00:00\n")


@pytest.mark.parametrize("delimiter", ["|", "|#", ",", ";", "\t", "::", "^|^"])
@pytest.mark.parametrize("closed", [False, True])
def test_any_delimiter(delimiter, closed):
    end = delimiter if closed else ""
    lines = [
        line.replace("cpu=8,", "").replace("|", delimiter) + end for line in (HEAD.strip(), row("1"), row("2", "b"))
    ]
    taken = read_text("\n".join(lines) + "\n")
    assert rows_of(taken.attempts, "job_id", "name", "gpus") == [("1", "a", 8), ("2", "b", 8)]


def test_a_delimiter_in_a_name_is_resolved_where_only_one_field_can_hold_it():
    taken = read_text(HEAD + row(name="train|big|v2") + "\n")
    assert (rows_of(taken.attempts, "name", "gpus", "nodes"), taken.aside) == ([("train|big|v2", 8, "n1")], ())


def test_bad_bytes_become_a_mark_and_are_counted():
    taken = read_text((HEAD + row(name="caf\xe9") + "\n").encode("latin-1"))
    assert (taken.bad_bytes, rows_of(taken.attempts, "name")) == (1, [("caf�",)])


@pytest.mark.parametrize("line_end", ["\r\n", "\n\n"])
def test_other_ends_of_lines(line_end):
    assert read_text(line_end.join([HEAD.strip(), row("1"), row("2"), ""])).attempts.num_rows == 2


def test_a_running_job_has_no_end_and_was_last_seen_after_its_elapsed_time():
    taken = read_text(HEAD + row(state="RUNNING", end="Unknown", elapsed="1800") + "\n")
    (one,) = taken.attempts.to_pylist()
    assert (one["end"], one["last_seen"]) == (None, datetime.datetime(2026, 3, 1, 10, 30))


def test_unknown_times_are_null():
    taken = read_text(
        HEAD + row(state="PENDING", start="Unknown", end="Unknown", elapsed="0", submit="2026-03-01T10:00:00") + "\n"
    )
    (one,) = taken.attempts.to_pylist()
    assert (one["start"], one["end"], one["last_seen"], one["submit"]) == (
        None,
        None,
        None,
        datetime.datetime(2026, 3, 1, 10),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"end": "2026-03-01T09:00:00"}, "the end is before the start"),
        ({"elapsed": "-5"}, "negative duration"),
        ({"state": "DANCING"}, "no state of Slurm"),
        ({"job": "seven"}, "no job id"),
        ({"start": "yesterday"}, "no time in"),
        ({"start": "2026-13-45T10:00:00"}, "no time in"),
    ],
)
def test_what_makes_no_sense_is_kept_aside_with_the_reason(changes, reason):
    taken = read_text(HEAD + row("1") + "\n" + row(**changes) + "\n")
    assert taken.attempts.num_rows == 1
    assert [one.reason.startswith(reason) for one in taken.aside] == [True]


def test_a_clock_jump_is_noted():
    taken = read_text(HEAD + row(elapsed="60") + "\n")
    assert rows_of(taken.attempts, "time_note") == [("end - start is 3600 s, the scheduler counted 60 s",)]


def test_the_hour_that_comes_twice_is_told_apart_by_the_elapsed_time():
    """Europe/Berlin goes through 02:00-03:00 twice on 2026-10-25."""
    first = row("1", start="2026-10-25T01:30:00", end="2026-10-25T02:30:00", elapsed="3600")
    second = row("2", start="2026-10-25T01:30:00", end="2026-10-25T02:30:00", elapsed="7200")
    across = row("3", start="2026-10-25T01:30:00", end="2026-10-25T03:30:00", elapsed="10800")
    taken = read_text(HEAD + "\n".join([first, second, across, ""]), zone="Europe/Berlin")
    hours = [(one["end"] - one["start"]).total_seconds() / 3600 for one in taken.attempts.to_pylist()]
    assert (hours, taken.gaps, set(taken.attempts["time_note"].to_pylist())) == ([1, 2, 3], 0, {""})


def test_a_local_time_that_does_not_exist_is_counted():
    text = HEAD + row(start="2026-03-29T02:30:00", end="2026-03-29T04:00:00", elapsed="1800") + "\n"
    assert (read_text(text, zone="Europe/Berlin").gaps > 0, read_text(text).gaps) == (True, 0)


@pytest.mark.parametrize("start", ["1772359200", "2026-03-01T10:00:00+0000", "2026-03-01T11:00:00+01:00"])
def test_times_that_name_their_zone(start):
    taken = read_text(HEAD + row(start=start, end="1772362800") + "\n", zone="America/New_York")
    assert rows_of(taken.attempts, "start") == [(datetime.datetime(2026, 3, 1, 10),)]


def test_a_line_of_a_million_columns_is_one_row_kept_aside():
    taken = read_text(HEAD + "x|" * 1_000_000 + "\n" + row("2") + "\n")
    assert (taken.attempts.num_rows, len(taken.aside)) == (1, 1)


def test_a_header_of_a_million_columns_is_refused():
    with pytest.raises(RecordError, match="more than 65536 bytes"):
        read_text("JobID|" * 1_000_000 + "\n1|\n", kind="sacct")


def test_parts_of_ids():
    assert (job_name_of("15_3.batch").task, job_name_of("15_3.batch").step) == (3, "batch")
    assert (job_name_of("8+1").offset, job_name_of("9_[4-7%2]").pending_tasks, job_name_of("a1")) == (
        1,
        "[4-7%2]",
        None,
    )


def test_heterogeneous_parts_and_arrays_have_their_own_ids():
    taken = read_text(HEAD + "\n".join(row(job) for job in ("8+0", "8+1", "9_0", "9_1", "9_[2-5]")) + "\n")
    assert rows_of(taken.attempts, "het_job", "het_offset", "array_job", "array_task") == [
        (8, 0, None, None),
        (8, 1, None, None),
        (None, None, 9, 0),
        (None, None, 9, 1),
        (None, None, None, None),
    ]
    assert len(set(taken.attempts["attempt_id"].to_pylist())) == 5


def test_values():
    assert state_of("CANCELLED by 1234") == ("CANCELLED", "1234")
    assert (state_of("OUT_OF_ME+"), state_of("NF"), state_of("F+")) == (("OUT_OF_MEMORY", ""), ("NODE_FAIL", ""), None)
    assert (duration_us("1-02:03:04"), duration_us("03:04.5"), duration_us("x")) == (93784 * 10**6, 184_500_000, None)
    assert (
        gpus_of("cpu=4,gres/gpu:a100=4,gres/gpu:h100=2"),
        gpus_of("gres/gpu:h100=8,gres/gpu=8"),
        gpus_of("cpu=1"),
        gpus_of(""),
    ) == (6, 8, 0, None)
    assert delimiter_of("jobs of last week") is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_characters="\x1f\x00\r", exclude_categories=("Cs",)), max_size=12),
        min_size=1,
        max_size=6,
    )
)
def test_no_row_is_lost_whatever_stands_in_a_name(names):
    """Each row is either taken or kept aside; a name is any text, with line breaks and delimiters."""
    import io

    columns = ("jobid", "jobname", "state", "start", "end")
    layout = Layout(columns, "|", False, USED, FREE_TEXT, looks_right)
    lines = [f"{job}|{name}|FAILED|2026-03-01T10:00:00|Unknown" for job, name in enumerate(names)]
    blocks = list(read_rows(io.BytesIO(("\n".join(lines) + "\n").encode()), layout))
    taken = {cell for block in blocks for cell in block.rows["jobid"].to_pylist()}
    aside = [one for block in blocks for one in block.aside]
    assert {str(job) for job in range(len(names))} - taken == set() or aside
    simple = {str(job) for job, name in enumerate(names) if "|" not in name and "\n" not in name}
    assert simple - taken == set() or any("\n" in name for name in names)
