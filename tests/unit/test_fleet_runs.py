"""Attempts become job runs; failures get causes, events and victims; imports are idempotent and incremental."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from fleet_data import DATA, asked, fleet_of, written

from keepstep.errors import UsageError
from keepstep.fleet.taxonomy import OWNERS, parse_taxonomy
from keepstep.service.fleet_derive import current, default_taxonomy
from keepstep.service.fleet_import import Reading, import_sources
from keepstep.service.fleet_query import incident_answer, incident_list, sql_answer
from keepstep.store.fleet_tables import FleetStore

BEGIN = datetime.datetime(2026, 3, 1)
HEAD = "Cluster|JobID|JobName|User|State|ExitCode|Submit|Start|End|ElapsedRaw|NNodes|AllocTRES|NodeList|Priority"


def at(minutes: float) -> str:
    return (BEGIN + datetime.timedelta(minutes=minutes)).isoformat(timespec="seconds")


def job(
    number,
    begin,
    end,
    state="COMPLETED",
    *,
    name="",
    nodes="n1",
    submit=None,
    code="0:0",
    user="ann",
    gpus=8,
    priority=1,
):
    """One line of sacct; times in minutes."""
    start = "Unknown" if begin is None else at(begin)
    gone = "Unknown" if end is None else at(end)
    length = int(((end or begin or 0) - (begin or 0)) * 60)
    came = at(submit if submit is not None else begin)
    times = f"{came}|{start}|{gone}|{length}"
    return f"c|{number}|{name or f'j{number}'}|{user}|{state}|{code}|{times}|1|gres/gpu={gpus}|{nodes}|{priority}"


def check(node, minutes, name="check_gpu_ecc", *, seconds=0, result=2):
    when = (BEGIN + datetime.timedelta(minutes=minutes, seconds=seconds)).isoformat() + "+00:00"
    return json.dumps(
        {"node": node, "cluster": "c", "health_check": name, "result": result, "_msg": "m", "end_time": when}
    )


def fleet(tmp_path: Path, *jobs: str, checks=(), events=()) -> FleetStore:
    files = [written(tmp_path, "sacct.txt", "\n".join([HEAD, *jobs, ""]))]
    if checks:
        files.append(written(tmp_path, "checks.jsonl", "\n".join(checks)))
    if events:
        files.append(
            written(tmp_path, "events.txt", "\n".join(["Cluster|NodeName|TimeStart|TimeEnd|State|Reason", *events]))
        )
    return fleet_of(tmp_path / "fleet", *files)


FACTS = "SELECT {} FROM attempts JOIN attempt_facts USING (attempt_id) ORDER BY start, job_id"


@pytest.mark.parametrize(
    ("minutes", "seconds", "inside"),
    [(-10, 0, True), (-10, -1, False), (5, 0, True), (5, 1, False), (0, 0, True)],
)
def test_edges_of_the_attribution_window(tmp_path, minutes, seconds, inside):
    """A check at end - 10:00 and at end + 5:00 explains the failure; one second more does not (oracle 4)."""
    store = fleet(tmp_path, job(1, 0, 60, "FAILED", code="1:0"), checks=[check("n1", 60 + minutes, seconds=seconds)])
    assert asked(store, FACTS.format("cause, owner")) == [
        ("gpu_memory", "hardware") if inside else ("program_error", "user_program")
    ]


def test_a_check_on_another_node_or_one_that_only_warns_explains_nothing(tmp_path):
    checks = [check("n2", 60), check("n1", 60, result=1)]
    store = fleet(tmp_path, job(1, 0, 60, "FAILED", code="1:0"), checks=checks)
    assert asked(store, FACTS.format("cause")) == [("program_error",)]


def test_only_failures_have_causes(tmp_path):
    states = ("COMPLETED", "CANCELLED by 7", "TIMEOUT", "PREEMPTED", "REQUEUED", "NODE_FAIL")
    jobs = [job(number, 0, 60, state) for number, state in enumerate(states, 1)]
    store = fleet(tmp_path, *jobs, checks=[check("n1", 60)])
    assert asked(store, FACTS.format("job_id, failed, infrastructure")) == [
        (str(number), state == "NODE_FAIL", state == "NODE_FAIL") for number, state in enumerate(states, 1)
    ]


def test_the_first_cause_goes_before_what_the_scheduler_did(tmp_path):
    events = [f"c|n1|{at(60)}|{at(90)}|DOWN*|Not responding", f"c|n1|{at(61)}|{at(90)}|DRAIN|Kill task failed"]
    store = fleet(tmp_path, job(1, 0, 60, "NODE_FAIL"), checks=[check("n1", 62)], events=events)
    assert asked(store, FACTS.format("cause, owner")) == [("gpu_memory", "hardware")]
    alone = (
        fleet(tmp_path / "b", job(1, 0, 60, "NODE_FAIL"), events=events) if (tmp_path / "b").mkdir() is None else None
    )
    assert asked(alone, FACTS.format("cause")) == [("prolog_or_epilog",)]


def test_one_event_that_ends_ten_jobs_is_one_event(tmp_path):
    jobs = [job(number, 0, 60 + number / 60, "FAILED", code="1:0", gpus=1) for number in range(1, 11)]
    store = fleet(tmp_path, *jobs, checks=[check("n1", 61)])
    assert asked(store, "SELECT cause, attempts, gpus, nodes FROM failure_events") == [("gpu_memory", 10, 10, "n1")]
    assert asked(store, "SELECT sum(independent::INT), sum(first_cause::INT), sum(failed::INT) FROM attempt_facts") == [
        (1, 1, 10)
    ]


def test_a_storage_outage_ends_jobs_on_many_nodes_and_is_one_event(tmp_path):
    jobs = [job(number, 0, 60 + number / 10, "FAILED", code="1:0", nodes=f"n{number}") for number in range(1, 6)]
    store = fleet(tmp_path, *jobs, checks=[check(f"n{number}", 60, "check_fs_mount") for number in range(1, 6)])
    assert asked(store, "SELECT cause, owner, attempts FROM failure_events") == [("storage", "storage", 5)]


def test_two_faults_of_one_node_on_two_days_are_two_events(tmp_path):
    store = fleet(
        tmp_path, job(1, 0, 60, "FAILED"), job(2, 1500, 1560, "FAILED"), checks=[check("n1", 60), check("n1", 1560)]
    )
    assert asked(store, "SELECT count(*), sum(attempts) FROM failure_events") == [(2, 2)]


def test_requeued_lives_are_one_run(tmp_path):
    store = fleet(tmp_path, job(1, 0, 60, "NODE_FAIL"), job(1, 63, 90, submit=60), job(2, 0, 9, nodes="n2"))
    assert asked(store, "SELECT attempts, requeues, retries, failures, state FROM job_runs ORDER BY attempts DESC") == [
        (2, 1, 0, 1, "COMPLETED"),
        (1, 0, 0, 0, "COMPLETED"),
    ]
    assert asked(store, FACTS.format("job_id, life")) == [("1", 0), ("2", 0), ("1", 1)]


def test_an_id_that_comes_back_years_later_is_another_job(tmp_path):
    store = fleet(tmp_path, job(1, 0, 60, "NODE_FAIL"), job(1, 600_000, 600_060))
    assert asked(store, "SELECT count(*), max(attempts) FROM job_runs") == [(2, 1)]


def test_a_resized_job_is_no_requeue(tmp_path):
    store = fleet(tmp_path, job(1, 0, 10, "RESIZING", gpus=24), job(1, 10, 60, gpus=16))
    assert asked(store, "SELECT attempts, requeues, gpus FROM job_runs") == [(2, 0, 24)]


def test_the_parts_of_a_heterogeneous_job_are_one_run_and_their_gpus_add_up(tmp_path):
    store = fleet(tmp_path, job("8+0", 0, 60, gpus=8), job("8+1", 0, 60, gpus=24, nodes="n[2-4]"))
    assert asked(store, "SELECT attempts, requeues, gpus, gpu_us FROM job_runs") == [(2, 0, 32, 32 * 3600 * 10**6)]


def test_tasks_of_an_array_are_runs_of_their_own(tmp_path):
    store = fleet(tmp_path, *[job(f"9_{task}", 0, 60, "FAILED", name="sweep", code="1:0") for task in range(4)])
    assert asked(store, "SELECT count(*), sum(independent) FROM job_runs") == [(4, 4)]


@pytest.mark.parametrize(("pause", "same"), [(0, True), (60, True), (61, False)])
def test_a_retry_by_the_user_within_the_window_is_the_same_run(tmp_path, pause, same):
    store = fleet(tmp_path, job(1, 0, 60, "FAILED", name="llm", code="1:0"), job(2, 60 + pause, 200, name="llm"))
    assert asked(store, "SELECT count(*), sum(retries) FROM job_runs") == [(1, 1) if same else (2, 0)]


def test_another_users_job_of_the_same_name_is_no_retry(tmp_path):
    store = fleet(tmp_path, job(1, 0, 60, "FAILED", name="llm"), job(2, 61, 200, name="llm", user="bob"))
    assert asked(store, "SELECT count(*) FROM job_runs") == [(2,)]


def test_a_crash_loop_counts_once(tmp_path):
    """36 lives of one job that fails the same way are one independent failure."""
    lives = [job(1, 10 * life, 10 * life + 5, "FAILED", code="1:0", submit=max(10 * life - 5, 0)) for life in range(36)]
    store = fleet(tmp_path, *lives)
    assert asked(store, "SELECT attempts, failures, independent, crash_loop FROM job_runs") == [(36, 36, 1, True)]


def test_hardware_that_fails_again_under_one_run_is_no_crash_loop(tmp_path):
    lives = [
        job(1, 100 * life, 100 * life + 60, "NODE_FAIL", submit=max(100 * life - 40, 0), nodes=f"n{life}")
        for life in range(3)
    ]
    store = fleet(tmp_path, *lives)
    assert asked(store, "SELECT failures, independent, crash_loop FROM job_runs") == [(3, 3, False)]


def test_a_preemption_is_linked_to_the_failed_job_behind_it(tmp_path):
    store = fleet(
        tmp_path,
        job(1, 0, 60, "NODE_FAIL", nodes="n[1-2]", gpus=16),
        job(2, 0, 63, "PREEMPTED", nodes="n3", user="bob"),
        job(1, 63, 90, nodes="n[2-3]", gpus=16, submit=60),
        job(3, 0, 70, "PREEMPTED", nodes="n4", user="eve"),
        job(4, 71, 80, nodes="n4", user="zoe"),
    )
    query = """
        SELECT v.job_id, t.job_id, f.job_id FROM attempt_facts x JOIN attempts v USING (attempt_id)
        LEFT JOIN attempts t ON t.attempt_id = x.preempted_by LEFT JOIN attempts f ON f.attempt_id = x.victim_of
        WHERE x.ending = 'preempted' ORDER BY v.job_id
    """
    assert asked(store, query) == [("2", "1", "1"), ("3", "4", None)]


def test_out_of_memory_that_only_the_step_tells(tmp_path):
    step = f"c|1.0|python||CANCELLED|0:125|{at(0)}|{at(0)}|{at(60)}|3600|1||n1|"
    store = fleet(tmp_path, job(1, 0, 60, "FAILED", code="9:0"), step)
    assert asked(store, FACTS.format("cause, owner")) == [("host_memory", "user_program")]


def test_importing_again_changes_nothing(tmp_path):
    files = [
        DATA / name
        for name in ("a_sacct_P.txt", "a_sacct_P_X_duplicates.txt", "a_sacct.json.gz", "a_sacctmgr_event.txt")
    ]
    store = fleet_of(tmp_path / "fleet", *files)
    before = {name: store.table(name).to_pylist() for name in store.manifest.tables}
    summary = import_sources(files, tmp_path / "fleet", reading=Reading())
    assert all(source.known for source in summary.sources)
    copy = written(tmp_path, "copy.txt", (DATA / "a_sacct_P.txt").read_text() + "\n")
    again = fleet_of(tmp_path / "fleet", copy)
    assert {name: again.rows(name) for name in before} == {name: len(rows) for name, rows in before.items()}
    assert again.rows("attempts") == 20


def test_files_in_any_order_give_the_same_tables(tmp_path):
    files = [
        DATA / name for name in ("a_sacct_P_X_duplicates.txt", "a_sacctmgr_event.txt", "c_sacct_P_X_duplicates.txt")
    ]
    one, two = fleet_of(tmp_path / "one", *files), fleet_of(tmp_path / "two", *reversed(files))
    columns = ["attempt_id", "run_id", "life", "cause", "independent", "event_id", "preempted_by"]
    assert one.table("attempt_facts", columns).equals(two.table("attempt_facts", columns))


def test_a_job_that_waited_ran_and_ended_over_three_imports_is_one_attempt(tmp_path):
    for line in (
        job(1, None, None, "PENDING", submit=0),
        job(1, 5, None, "RUNNING", submit=0),
        job(1, 5, 60, submit=0),
    ):
        store = fleet(tmp_path, line)
        assert store.rows("attempts") == 1
    assert asked(store, 'SELECT state, "end" FROM attempts') == [("COMPLETED", BEGIN + datetime.timedelta(minutes=60))]
    older = fleet_of(
        tmp_path / "fleet", written(tmp_path, "late.txt", "\n".join([HEAD, job(1, 5, None, "RUNNING", submit=0), ""]))
    )
    assert asked(older, "SELECT state FROM attempts") == [("COMPLETED",)]


def test_what_was_kept_aside_goes_when_the_file_is_mended(tmp_path):
    broken = fleet(tmp_path, job(1, 60, 0), "half a line")
    assert broken.rows("kept_aside") == 2
    assert fleet(tmp_path, job(1, 0, 60)).rows("kept_aside") == 0


def test_a_drain_begins_when_it_was_set(tmp_path):
    node = f"NodeName=n1 Arch=x\n   State=IDLE+DRAIN\n   Reason=bad cable [root@{at(10)}]\n"
    event = "\n".join(
        ["Cluster|NodeName|TimeStart|TimeEnd|State|Reason", f"c|n1|{at(90)}|{at(120)}|DRAIN|bad cable", ""]
    )
    store = fleet_of(
        tmp_path / "fleet", written(tmp_path, "n.txt", node), written(tmp_path, "e.txt", event), cluster="c"
    )
    assert asked(store, 'SELECT start, "end" FROM node_intervals') == [
        (BEGIN + datetime.timedelta(minutes=10), BEGIN + datetime.timedelta(minutes=120))
    ]


def test_the_site_may_edit_the_taxonomy(tmp_path):
    store = fleet(tmp_path, job(1, 0, 60, "FAILED"), checks=[check("n1", 60, "our_own_check")])
    assert asked(store, FACTS.format("cause")) == [("check_failed",)]
    own = '[[cause]]\nname = "flux"\nowner = "hardware"\nchecks = ["our_own"]\n'
    text = default_taxonomy().replace("[[cause]]", own + "\n[[cause]]", 1)
    (tmp_path / "fleet" / "taxonomy.toml").write_text(text)
    assert asked(current(tmp_path / "fleet"), FACTS.format("cause, owner")) == [("flux", "hardware")]


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "version = 3",
        'version = "1"\n[[cause]]\nname = "a"\nowner = "nobody"',
        'version = "1"\n[[cause]]\nname = "a"\nowner = "hardware"\nchecks = ["("]',
    ],
)
def test_a_taxonomy_that_is_none_is_said_in_a_line(text):
    with pytest.raises(UsageError, match="not a"):
        parse_taxonomy(text)


def test_every_owner_has_a_cause():
    taxonomy = parse_taxonomy(default_taxonomy())
    assert {cause.owner for cause in taxonomy.causes} == set(OWNERS)
    assert taxonomy.of_check("check_gpu_xid", "", xid=31).owner == "user_program"
    assert taxonomy.of_check("check_gpu_xid", "", xid=48).owner == "hardware"


def test_queries_read_the_tables_and_nothing_else(tmp_path):
    directory = tmp_path / "fleet"
    fleet(tmp_path, job(1, 0, 60))
    assert sql_answer(directory, "SELECT count(*) AS n FROM attempts").rows == ((1,),)
    for query in (
        f"SELECT * FROM read_csv('{DATA / 'a_sacct_P.txt'}')",
        "SELECT * FROM '/etc/passwd'",
        f"COPY attempts TO '{tmp_path / 'x.csv'}'",
        "CREATE TABLE t AS SELECT 1",
        "SET threads = 8",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "SELECT 1; SELECT 2",
        "SELECT nothing",
        "",
    ):
        with pytest.raises(UsageError) as caught:
            sql_answer(directory, query)
        assert "\n" not in str(caught.value)


def test_one_call_tells_the_story_of_a_failure(tmp_path):
    fleet(
        tmp_path,
        job(1, 0, 60, "NODE_FAIL", nodes="n[1-2]"),
        job(1, 63, 90, nodes="n[2-3]", submit=60),
        job(2, 0, 63, "PREEMPTED", nodes="n3", user="bob"),
        checks=[check("n1", 61)],
    )
    story = incident_answer(tmp_path / "fleet", "1")
    assert (story.cause, story.node, story.excluded, story.preempted) == (
        "gpu_memory",
        "n1",
        "n1 (not in the next life)",
        ("2",),
    )
    assert story.next_attempt == "1 (COMPLETED) on n[2-3]"
    assert [row[0] for row in incident_list(tmp_path / "fleet").rows] == ["1"]
    with pytest.raises(UsageError, match="no incident"):
        incident_answer(tmp_path / "fleet", "77")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.txt", "", "the file is empty"),
        ("odd.bin", "\x01\x02 what", "not written by a tool that is known"),
        ("cut.json", '{"jobs": [{"job_id": 1', "kept aside"),
        ("bare.txt", "JobID|State\n1|COMPLETED\n", "columns missing: Start, End"),
        ("wide.txt", "JobID|" * 20_000 + "\n", "more than 65536 bytes"),
    ],
)
def test_bad_files_are_said_and_do_not_stop_the_others(tmp_path, name, text, said):
    from keepstep.service.fleet_import import summary_text

    good = written(tmp_path, "good.txt", "\n".join([HEAD, job(1, 0, 60), ""]))
    summary = import_sources([written(tmp_path, name, text), good], tmp_path / "fleet", reading=Reading())
    assert said in summary_text(summary, json=False)
    assert FleetStore(tmp_path / "fleet").rows("attempts") == 1


def test_two_clusters_keep_their_jobs_apart(tmp_path):
    lines = [job(1, 0, 60, "NODE_FAIL"), job(1, 61, 90, submit=60).replace("c|", "d|", 1)]
    assert asked(fleet(tmp_path, *lines), "SELECT count(*), max(attempts) FROM job_runs") == [(2, 1)]


def test_reading_the_same_file_in_another_zone_takes_the_place_of_the_first_reading(tmp_path):
    file = written(tmp_path, "sacct.txt", "\n".join([HEAD, job(1, 0, 60), ""]))
    fleet_of(tmp_path / "fleet", file)
    store = fleet_of(tmp_path / "fleet", file, zone="Europe/Berlin")
    assert asked(store, "SELECT start FROM attempts") == [(BEGIN - datetime.timedelta(hours=1),)]
    assert len(store.manifest.sources) == 1


def test_a_check_does_not_explain_what_ended_out_of_memory(tmp_path):
    store = fleet(tmp_path, job(1, 0, 60, "OUT_OF_MEMORY", code="0:125"), checks=[check("n1", 60)])
    assert asked(store, FACTS.format("cause")) == [("host_memory",)]
