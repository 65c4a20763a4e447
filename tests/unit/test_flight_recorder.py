"""Flight Recorder dumps: real ones with injected faults, and the field names of every version."""

from __future__ import annotations

import gzip
import pickle
import shutil

import pytest
from dump_files import DATA, dump, entry, of_2_3, write
from reading_all import findings_of, suspects_of, unread_of
from test_plain_pickle import Runs

from keepstep.intake.flight_recorder import READER
from keepstep.records.evidence import CollectiveRecord, GroupProgress, Reporter, Transfer

JOBS = DATA / "flight_recorder"


def ranks_of(findings):
    return [[one.get("rank") for one in some] for finding in suspects_of(findings) for some in finding]


def test_a_gpu_error_names_the_rank_that_is_behind_and_no_victim():
    findings = findings_of(JOBS / "gpu_error_1st")
    assert {finding.kind for finding in findings} == {"noncommunication_hang"}
    assert ranks_of(findings)[0] == [12]
    assert {rank for some in ranks_of(findings) for rank in some} <= {12, 14}
    assert findings[0].confidence > findings[-1].confidence
    assert any("20536" in line and "20538" in line for line in findings[0].evidence)
    assert {0, 4, 8, 13, 15} <= set(findings[0].victims)


def test_two_ranks_without_entries_are_two_findings():
    findings = findings_of(JOBS / "lock_gil_1st")
    assert ranks_of(findings) == [[9], [14]]
    for finding in findings:
        assert finding.kind == "noncommunication_hang"
        assert any("empty" in line for line in finding.evidence)
        assert not {9, 14} & set(finding.victims)


def test_the_dumps_of_the_hit_ranks_missing_altogether(tmp_path):
    for path in (JOBS / "lock_gil_1st").glob("_dump_*"):
        if path.name not in ("_dump_9.pickle", "_dump_14.pickle"):
            shutil.copy(path, tmp_path)
    findings = findings_of(tmp_path)
    blamed = {rank for some in ranks_of(findings) for rank in some}
    assert {finding.kind for finding in findings} == {"reporter_silent"}
    assert blamed == {9, 14}


def test_a_truncated_dump_gives_what_it_has(tmp_path):
    for path in (JOBS / "lock_gil_1st").glob("_dump_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes()[: 3000 if path.name == "_dump_8.pickle" else None])
    assert {rank for some in ranks_of(findings_of(tmp_path)) for rank in some} == {9, 14}
    (state,) = [item.state for item in READER.read(tmp_path / "_dump_8.pickle") if isinstance(item, Reporter)]
    assert state == "truncated"


def hang(absent=2, world=4):
    """Finished collectives 1 to 4, then one that `absent` does not call."""
    dumps = {}
    for rank in range(world):
        entries = [entry(seq, seq=seq, state="completed") for seq in range(1, 5)]
        if rank != absent:
            entries.append(entry(9, seq=5))
        dumps[rank] = dump(entries, range(world))
    return dumps


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_did_not_come(tmp_path, as_json):
    findings = findings_of(write(tmp_path / "dumps", hang(), as_json=as_json))
    assert ranks_of(findings) == [[2]]


def test_the_names_of_torch_2_3(tmp_path):
    old = {rank: of_2_3(content["entries"]) for rank, content in hang().items()}
    assert ranks_of(findings_of(write(tmp_path / "dumps", old))) == [[2]]


def test_a_bare_list_of_entries(tmp_path):
    lists = {rank: content["entries"] for rank, content in hang().items()}
    assert ranks_of(findings_of(write(tmp_path / "dumps", lists, name="fr_trace_{}"))) == [[2]]


def test_members_as_a_list_and_ids_as_text(tmp_path):
    dumps = hang()
    for content in dumps.values():
        content["pg_config"]["0"]["ranks"] = [0, 1, 2, 3]
        for item in content["entries"]:
            item["process_group"] = "0"
            item["collective_seq_id"] = str(item["collective_seq_id"])
    assert ranks_of(findings_of(write(tmp_path / "dumps", dumps))) == [[2]]


def test_gzip_is_read(tmp_path):
    for rank, content in hang().items():
        (tmp_path / f"dump_{rank}.gz").write_bytes(gzip.compress(pickle.dumps(content, protocol=2)))
    assert ranks_of(findings_of(tmp_path)) == [[2]]


def test_gloo_takes_back_what_is_finished(tmp_path):
    dumps = hang()
    for content in dumps.values():
        content["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        for item in content["entries"]:
            item |= {"profiling_name": "gloo:all_reduce", "retired": item["state"] == "completed", "state": "scheduled"}
            item["time_discovered_completed_ns"] = None
    assert ranks_of(findings_of(write(tmp_path / "dumps", dumps))) == [[2]]


def test_a_finished_job_is_healthy(tmp_path):
    entries = [entry(seq, seq=seq, state="completed") for seq in range(1, 5)]
    findings = findings_of(write(tmp_path / "dumps", {rank: dump(entries, range(4)) for rank in range(4)}))
    assert [finding.kind for finding in findings] == ["healthy"]


def test_another_operation_on_one_rank(tmp_path):
    dumps = hang(absent=None)
    dumps[1]["entries"][-1]["profiling_name"] = "nccl:broadcast"
    (finding,) = findings_of(write(tmp_path / "dumps", dumps))
    assert (finding.kind, suspects_of([finding])) == ("collective_mismatch", [[[{"rank": 1}]]])


def test_the_other_end_of_a_transfer_did_not_come(tmp_path):
    one = dump([entry(1, seq=1, op="nccl:send 0->1", p2p=True)], (0, 1))
    two = dump([entry(1, seq=1, state="completed")], (0, 1))
    folder = write(tmp_path / "dumps", {0: one, 1: two})
    assert ranks_of(findings_of(folder)) == [[1]]
    (transfer,) = [item for item in READER.read(folder / "nccl_trace_rank_0") if isinstance(item, Transfer)]
    assert (transfer.source, transfer.destination) == (0, 1)


def test_group_places_become_global_ranks(tmp_path):
    content = dump([entry(1, seq=1, op="nccl:recv 1<-0", p2p=True)], (4, 12))
    (folder := tmp_path / "dumps").mkdir()
    (folder / "_dump_12").write_bytes(pickle.dumps(content, protocol=2))
    (transfer,) = [item for item in READER.read(folder / "_dump_12") if isinstance(item, Transfer)]
    assert (transfer.rank, transfer.source, transfer.destination) == (12, 4, 12)


def test_the_older_of_two_dumps_of_a_rank_is_left_out(tmp_path):
    folder = write(tmp_path / "dumps", hang())
    stale = dump([entry(1, seq=1)], range(4))
    (folder / "old_rank_1").write_bytes(pickle.dumps(stale, protocol=2))
    assert ranks_of(findings_of(folder)) == [[2]]


def test_the_stack_of_what_is_not_finished_is_evidence(tmp_path):
    folder = write(tmp_path / "dumps", hang())
    records = [item for item in READER.read(folder / "nccl_trace_rank_0") if isinstance(item, CollectiveRecord)]
    assert [(record.sequence, record.stack[0].function) for record in records] == [(5, "step")]


def test_a_name_that_is_not_the_rank_is_corrected_by_the_groups(tmp_path):
    content = dump([entry(1, seq=1)], (3,))
    (tmp_path / "dump_20260131").write_bytes(pickle.dumps(content, protocol=2))
    (rank,) = [item.rank for item in READER.read(tmp_path / "dump_20260131") if isinstance(item, Reporter)]
    assert rank == 3


def test_a_dump_that_does_not_say_its_rank_is_named(tmp_path):
    (tmp_path / "dump").write_bytes(pickle.dumps(dump([entry(1, seq=1)], (0, 1)), protocol=2))
    (problem,) = unread_of(tmp_path)
    assert "which rank" in problem.why


def test_clocks_that_disagree_by_minutes_change_nothing(tmp_path):
    dumps = hang()
    for rank, content in dumps.items():
        for item in content["entries"]:
            item["time_created_ns"] += rank * 300 * 10**9
    assert ranks_of(findings_of(write(tmp_path / "dumps", dumps))) == [[2]]


def test_a_malicious_dump_is_refused_and_the_others_are_read(tmp_path):
    folder = write(tmp_path / "dumps", hang())
    made = tmp_path / "made"
    for protocol in (0, 2, 4):
        (folder / f"dump_{10 + protocol}").write_bytes(pickle.dumps({"entries": [Runs(made)]}, protocol=protocol))
    assert ranks_of(findings_of(folder)) == [[2]]
    assert len(unread_of(folder)) == 3
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"entries": "text", "pg_config": 5, "pg_status": [1]},
        {"entries": [None, 3, {"profiling_name": None}, {"collective_seq_id": "x", "process_group": {}}]},
        {"entries": [{"collective_seq_id": 1, "process_group": ((), None), "frames": [3], "input_sizes": 7}]},
        {"pg_config": {"0": {"ranks": "[[[["}, "1": {"ranks": "[1, -4, true, null]"}}, "pg_status": {"0": {}}},
    ],
)
def test_fields_of_the_wrong_kind_are_no_traceback(content, tmp_path):
    folder = write(tmp_path / "dumps", {0: content})
    assert all(finding.kind in ("undetermined", "healthy") for finding in findings_of(folder))


def test_torn_json_gives_its_whole_entries(tmp_path):
    folder = write(tmp_path / "dumps", hang(), as_json=True)
    path = folder / "nccl_trace_rank_0.json"
    text = path.read_text()
    path.write_text(text[: len(text) - 200])
    (progress,) = [item for item in READER.read(path) if isinstance(item, GroupProgress)]
    assert (progress.positions[0].queued, max(progress.positions[0].signatures)) == (None, 4)
    assert ranks_of(findings_of(folder)) == [[2]]


@pytest.mark.parametrize("sequence", [2**63, 2**64 - 1, 2**70])
def test_sequence_numbers_beyond_63_bits(sequence, tmp_path):
    dumps = {rank: dump([entry(1, seq=sequence - (rank == 2))], range(4)) for rank in range(4)}
    assert findings_of(write(tmp_path / "dumps", dumps))


def test_a_rank_is_no_time_stamp(tmp_path):
    for name in ("dump_1767950000000000000000", "rank_99999999999999999999"):
        (tmp_path / name).write_bytes(pickle.dumps(dump([entry(1, seq=1)], ()), protocol=2))
    assert len(unread_of(tmp_path)) == 2


@pytest.mark.parametrize(("key", "value"), [("time_created_ns", 10**400), ("collective_seq_id", "\u00b2")])
def test_numbers_that_torch_does_not_write(key, value, tmp_path):
    dumps = {rank: dump([entry(1, seq=1, state="completed"), entry(2, seq=2)], range(2)) for rank in range(2)}
    dumps[1]["entries"][1][key] = value
    assert findings_of(write(tmp_path, dumps, as_json=True))
