"""Flight Recorder dumps of Gloo: no device is at fault in them, and what failed counts as finished."""

from __future__ import annotations

import pytest
from dump_files import dump, entry, write
from reading_all import findings_of, suspects_of

from keepstep.intake.flight_recorder import READER
from keepstep.records.evidence import GroupProgress


def gloo(number, group="0", *, seq, retired=True, op="gloo:all_reduce", **rest):
    """Gloo leaves the state at `scheduled` and takes entries back when they are over, failed ones too."""
    purpose = "default_pg" if group == "0" else "undefined"
    return entry(number, group, seq=seq, op=op, retired=retired, process_group=(group, purpose), **rest)


def job(last):
    """Four finished collectives on each of four ranks, then what `last` gives."""
    groups = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in GROUPS.items()}
    dumps = {}
    for rank in range(4):
        entries = [gloo(seq, seq=seq) for seq in range(1, 5)] + last.get(rank, [])
        made = dump(entries, range(4))
        made["pg_config"] |= groups
        dumps[rank] = made
    return dumps


GROUPS = {"1": "[0, 1]", "2": "[2, 3]", "3": "[0, 2]", "4": "[1, 3]"}


def test_a_process_that_is_behind_is_no_gpu(tmp_path):
    last = {rank: [gloo(9, seq=5, retired=rank != 3), gloo(10, seq=6, retired=False)] for rank in range(4)}
    (finding,) = findings_of(write(tmp_path / "d", job(last)))
    assert (finding.layer, suspects_of([finding])) == ("undetermined", [[[{"rank": 3}]]])
    assert finding.confidence <= 0.6
    assert not any("device" in line for line in finding.evidence)


def test_what_not_all_called_has_failed(tmp_path):
    """Rank 2 sleeps; rank 1 gave up in group 4 when rank 3 left, which waited for rank 2."""
    last = {
        0: [gloo(9, "1", seq=1), gloo(10, "3", seq=1, retired=False)],
        1: [gloo(9, "1", seq=1), gloo(10, "4", seq=1)],
        3: [gloo(9, "2", seq=1, retired=False)],
    }
    for rank in (2, 3):
        last.setdefault(rank, [])
    first = {rank: [gloo(5, name, seq=0) for name in GROUPS if str(rank) in GROUPS[name]] for rank in range(4)}
    (finding,) = findings_of(write(tmp_path / "d", job({rank: first[rank] + last[rank] for rank in range(4)})))
    assert (finding.kind, suspects_of([finding])) == ("noncommunication_hang", [[[{"rank": 2}]]])
    assert set(finding.victims) == {0, 1, 3}
    assert any("has failed" in line for line in finding.evidence)


def test_a_call_that_only_one_rank_made_blames_no_innocent_one(tmp_path):
    """Rank 3 waits in a barrier of all; what the others call in pairs fails when a peer leaves."""
    first = {rank: [gloo(5, name, seq=0) for name in GROUPS if str(rank) in GROUPS[name]] for rank in range(4)}
    last = {
        0: [gloo(9, "1", seq=1), gloo(10, "3", seq=1)],
        1: [gloo(9, "1", seq=1), gloo(10, "4", seq=1, retired=False)],
        2: [gloo(9, "2", seq=1)],
        3: [gloo(9, seq=5, op="gloo:barrier", retired=False)],
    }
    findings = findings_of(write(tmp_path / "d", job({rank: first[rank] + last[rank] for rank in range(4)})))
    assert [finding.kind for finding in findings] == ["collective_mismatch"]
    assert {"rank": 3} in suspects_of(findings)[0][0] and findings[0].confidence <= 0.8


def test_a_dump_that_was_cut_off_anywhere_blames_nobody(tmp_path):
    """Also between what was called last and what was finished last."""
    status = {"0": {"last_enqueued_collective": 4, "last_started_collective": -1, "last_completed_collective": 4}}
    dumps = job({})
    for rank, made in dumps.items():
        dumps[rank] = {
            **{key: made[key] for key in ("version", "pg_config")},
            "pg_status": status,
            "entries": made["entries"],
        }
    folder = write(tmp_path / "d", dumps)
    path = folder / "nccl_trace_rank_1"
    content = path.read_bytes()
    for size in range(20, len(content), 7):
        path.write_bytes(content[:size])
        assert not any(suspects_of(findings_of(folder))), size


@pytest.mark.parametrize("as_json", [False, True])
def test_counts_of_a_dump_that_was_cut_off_are_those_of_the_process(as_json, tmp_path):
    """`pg_status` comes before the entries, of which the newest are missing."""
    status = {"0": {"last_enqueued_collective": 40, "last_started_collective": -1, "last_completed_collective": 40}}
    dumps = {rank: dump([gloo(seq, seq=seq) for seq in range(1, 41)], range(4)) for rank in range(4)}
    for rank, made in dumps.items():
        dumps[rank] = {"version": made["version"], "pg_config": made["pg_config"], "pg_status": status} | {
            "entries": made["entries"]
        }
    folder = write(tmp_path / "d", dumps, as_json=as_json)
    path = folder / ("nccl_trace_rank_1.json" if as_json else "nccl_trace_rank_1")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    (progress,) = (item for item in READER.read(path) if isinstance(item, GroupProgress))
    assert (progress.positions[0].queued, progress.positions[0].finished) == (40, 40)
    assert [finding.kind for finding in findings_of(folder)] == ["healthy"]


def test_the_dump_of_another_start_is_told(tmp_path):
    """Rank 2 finished what no other rank called, an hour later."""
    dumps = {rank: dump([gloo(seq, seq=seq, retired=seq < 13) for seq in range(1, 14)], range(4)) for rank in (0, 1, 3)}
    later = [gloo(seq, seq=seq) for seq in range(1, 21)]
    for one in later:
        one["time_created_ns"] += 3600 * 10**9
    dumps[2] = dump(later, range(4))
    (finding,) = findings_of(write(tmp_path / "d", dumps))
    assert finding.kind == "undetermined"
    assert any("two jobs, or of two starts" in line for line in finding.evidence)
