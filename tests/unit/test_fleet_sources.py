"""Sources other than sacct's text: its JSON, nodes, health checks, Kubernetes, traces, runs of keepstep."""

from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pytest
from fleet_data import DATA, data_bytes, read_text, rows_of

from keepstep.errors import RecordError
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.source_kind import kind_of

AT = 1_790_000_000_000_000


@pytest.mark.parametrize(("cluster", "lives"), [("a", 20), ("c", 23)])
def test_json_and_text_of_the_same_jobs_are_the_same_attempts(cluster, lives):
    """22.05 writes states as text and numbers plainly, 24.11 writes lists and {set, infinite, number}."""
    found = read_text(data_bytes(f"{cluster}_sacct.json.gz")).attempts
    text = read_text(data_bytes(f"{cluster}_sacct_P_X_duplicates.txt")).attempts
    same = ("job_id", "state", "submit", "start", "end", "gpus", "nodes")
    by_id = {row[0]: row for row in rows_of(text, "attempt_id", *same)}
    assert found.num_rows == lives
    assert [row for row in rows_of(found, "attempt_id", *same) if by_id[row[0]] != row] == []


def test_an_exit_code_that_says_success_of_a_failed_job_is_not_believed():
    found = read_text(data_bytes("a_sacct.json.gz")).attempts
    failed = found.filter(pa.compute.equal(found["state"], "FAILED"))
    assert set(failed["exit_code"].to_pylist()) == {None}


def test_json_that_is_cut_off_gives_its_whole_jobs():
    taken = read_text(data_bytes("a_sacct.json.gz")[:100_000], kind="sacct-json")
    assert (taken.attempts.num_rows, [one.reason for one in taken.aside]) == (
        6,
        ["the document is cut off or damaged after 6 elements"],
    )


@pytest.mark.parametrize("text", ['{"jobs": 3}', '{"jobs": [', "[" * 100_000, '{"errors": []}'])
def test_json_that_holds_no_jobs_is_said_in_a_line(text):
    try:
        assert read_text(text, kind="sacct-json").attempts.num_rows == 0
    except RecordError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "job", [{}, {"job_id": "x"}, {"job_id": 1, "state": 7}, {"job_id": 1, "state": {"current": ["FAILED"]}, "time": 3}]
)
def test_jobs_that_make_no_sense_are_kept_aside(job):
    taken = read_text(json.dumps({"jobs": [job, 5]}), kind="sacct-json")
    assert (taken.attempts.num_rows, len(taken.aside)) == (0, 2)


def test_events_of_nodes_and_the_size_of_the_cluster():
    taken = read_text(data_bytes("a_sacctmgr_event.txt"))
    assert sorted(rows_of(taken.tables["node_intervals"], "node", "kind", "reason")) == [
        ("n2", "drain", "nccl-fault: rank 9 late on comm 0x1 seq 5512"),
        ("n3", "down", "Not responding"),
        ("n4", "down", "Not responding"),
    ]
    assert rows_of(taken.tables["capacity"], "gpus", "node_count", "end") == [(32, 4, None)]


@pytest.mark.parametrize("name", ["a_scontrol_show_node.txt", "c_scontrol_show_node.json.gz"])
def test_nodes_of_scontrol(name):
    taken = read_text(data_bytes(name))
    assert rows_of(taken.tables["inventory"], "node", "gpus", "features") == [
        ("n1", 8, "rack0"),
        ("n2", 8, "rack0"),
        ("n3", 8, "rack1"),
        ("n4", 8, "rack1"),
    ]


def test_a_drained_node_says_when_it_was_set():
    lines = (
        "NodeName=n2 Arch=x86_64",
        "   CfgTRES=cpu=16,gres/gpu=8",
        "   State=IDLE+DRAIN ThreadsPerCore=1",
        "   Reason=bad gpu = 3 [root@2026-03-01T10:00:00]",
        "",
    )
    text = "\n".join(lines)
    taken = read_text(text)
    assert rows_of(taken.tables["node_intervals"], "node", "kind", "reason", "set_by", "start") == [
        ("n2", "drain", "bad gpu = 3", "root", datetime.datetime(2026, 3, 1, 10))
    ]


def test_faults_of_infinitehbd_are_paired_as_the_oracle_says():
    table = read_text(data_bytes("infinitehbd.json.gz")).tables["node_intervals"]
    days = sorted((end - start).total_seconds() / 86400 for start, end in rows_of(table, "start", "end"))
    assert (table.num_rows, len(set(table["interval_id"].to_pylist())), len(set(table["node"].to_pylist()))) == (
        584,
        584,
        231,
    )
    assert (round(sum(days) / 584, 2), round((days[291] + days[292]) / 2, 2), round(days[-1], 2)) == (
        5.54,
        0.85,
        130.96,
    )
    assert sum(day == 0 for day in days) == 14


def test_an_end_without_a_start_is_kept_aside():
    fault = {"node_id": "a", "event_time": 1.0, "fault_type": {"Level": "L", "Class": "C", "Desc": "D"}}
    events = [
        {**fault, "event_type": "fault_end"},
        {**fault, "event_type": "fault_start"},
        {**fault, "event_time": -1, "event_type": "fault_start"},
    ]
    taken = read_text(json.dumps(events))
    assert (taken.tables["node_intervals"].num_rows, len(taken.aside)) == (1, 2)


def test_figures_of_acme():
    table = read_text(data_bytes("acme_cluster_summary.csv")).tables["summaries"]
    figures = {(cluster, name): value for cluster, name, value in rows_of(table, "cluster", "figure", "value")}
    assert (figures["Seren", "fail_rate_gpu"], figures["Kalos", "fail_rate_gpu"]) == (0.429, 0.397)
    assert (figures["Seren", "fail_rate_gpu_time"], figures["Kalos", "fail_rate_gpu_time"]) == (0.124, 0.080)


ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration
57,u9,2,16,256,Pretrain,FAILED,2023-07-01 00:05:47+08:00,2023-07-01 00:06:47+08:00,2023-07-01 01:06:47+08:00,3600
58,u9,1,8,128,Debug,COMPLETED,2023-07-01 00:05:47+08:00,2023-07-01 00:06:47+08:00,2023-07-01 00:00:00+08:00,3600
59,u1,1,0,4,Other,NAPPING,2023-07-01 00:05:47+08:00,2023-07-01 00:06:47+08:00,2023-07-01 00:10:00+08:00,3600
"""
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0000,12000,16384,1,1000,,LS,Running,0,12537496,0
openb-pod-0001,6000,12288,1,460,,LS,Failed,427061,12902960,427061
"""


def test_jobs_of_public_traces():
    acme = read_text(ACME)
    assert rows_of(acme.attempts, "job_id", "state", "gpus", "node_count", "start") == [
        ("57", "FAILED", 16, 2, datetime.datetime(2023, 6, 30, 16, 6, 47))
    ]
    assert [one.reason.split(":")[0] for one in acme.aside] == ["the end is before the start", "no state known here"]
    openb = read_text(OPENB)
    assert rows_of(openb.attempts, "job_id", "state", "gpus") == [
        ("openb-pod-0000", "RUNNING", 1),
        ("openb-pod-0001", "FAILED", 1),
    ]


def test_philly_has_an_attempt_for_each_life():
    life = {
        "start_time": "2017-10-09 07:05:03",
        "end_time": "2017-10-09 08:05:03",
        "detail": [{"ip": "m1", "gpus": ["g0", "g1"]}],
    }
    later = {**life, "start_time": "2017-10-09 09:00:00", "end_time": "2017-10-09 10:00:00"}
    job = {
        "status": "Pass",
        "vc": "v",
        "jobid": "application_1",
        "attempts": [life, later],
        "submitted_time": "2017-10-09 07:02:59",
        "user": "u",
    }
    taken = read_text(json.dumps([job, {"status": "Odd"}]), kind="philly")
    assert rows_of(taken.attempts, "state", "gpus", "nodes") == [("FAILED", 2, "m1"), ("COMPLETED", 2, "m1")]
    assert len(taken.aside) == 1


NHC = """20260301 10:00:00 [slurm] /usr/libexec/nhc/node-mark-offline n7 check_hw_ib:  No IB port mlx5_0:1 is ACTIVE
2026-03-01T10:05:00+00:00 n8 nhc[811]: ERROR:  nhc:  Health check failed:  check_gpu_xid:  GPU 3 reported XID 79
20260301 11:00:00 [slurm] /usr/libexec/nhc/node-mark-online n7
ERROR:  nhc:  Health check failed:  check_fs_mount:  /home not mounted
nothing of interest
"""


def test_results_of_nhc():
    taken = read_text(NHC, kind="nhc")
    assert rows_of(taken.tables["health_results"], "node", "check", "status", "xid") == [
        ("n7", "check_hw_ib", 2, None),
        ("n8", "check_gpu_xid", 2, 79),
        ("n7", "node", 0, None),
    ]
    assert [one.reason for one in taken.aside] == ["a result that names no node: give --node"]


def test_results_of_gcm():
    lines = [
        {
            "node": "n1",
            "cluster": "c",
            "health_check": "check_dcgmi",
            "type": "prolog",
            "result": 2,
            "_msg": "XID 48",
            "job_id": 7,
            "end_time": 1_790_000_000.25,
        },
        {"node": "n1", "health_check": "check_dcgmi", "result": 9, "end_time": 1_790_000_000.0},
        {"health_check": "check_dcgmi", "result": 0, "end_time": 1_790_000_000.0},
    ]
    taken = read_text("\n".join(map(json.dumps, lines)) + "\nno json\n")
    assert rows_of(taken.tables["health_results"], "node", "status", "xid", "job_id", "phase") == [
        ("n1", 2, 48, "7", "prolog")
    ]
    assert len(taken.aside) == 3


@pytest.mark.parametrize("version", [2, 4])
def test_results_of_dcgm(version):
    result = (
        {"gpu_ids": "3", "status": "Fail", "warnings": "double bit error"}
        if version == 2
        else {"entity_id": 3, "status": "Fail", "warnings": [{"warning": "double bit error", "error_id": 7}]}
    )
    root = "DCGM GPU Diagnostic" if version == 2 else "DCGM Diagnostic"
    document = {
        root: {
            "test_categories": [
                {
                    "category": "Hardware",
                    "tests": [{"name": "Memory", "results": [result, {"gpu_ids": "4", "status": "Pass"}]}],
                }
            ]
        }
    }
    taken = read_text("Successfully ran diagnostic.\n" + json.dumps(document), kind="dcgm", node="n1", at=AT)
    assert rows_of(taken.tables["health_results"], "check", "device", "status", "message") == [
        ("dcgm Memory", "3", 2, "double bit error"),
        ("dcgm Memory", "4", 0, ""),
    ]
    with pytest.raises(RecordError, match="give --node and --at"):
        read_text(json.dumps(document), kind="dcgm")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("gcm_eth_learn_down_intf", "", {("enp225s0f0", "eth_operstate")}),
        ("gcm_learn_good", "", set()),
        ("gcm_learn_ib_intf_operstate_down", "", {("ib4", "ib_operstate")}),
        ("gcm_learn_ib_intf_bad_rate", "", set()),
        (
            "gcm_learn_ib_intf_bad_rate",
            "gcm_learn_good",
            {(f"mlx5_{i}:1", "ib_rate") for i in (0, 1, 2, 3, 6, 7, 8, 9)},
        ),
    ],
)
def test_snapshots_of_a_node_name_what_is_wrong(name, good, bad):
    """A rate is judged only against a good node; the fault is in the name of the file."""
    node = "" if "ib" in name or "good" in name else "n1"
    taken = read_text(
        data_bytes(f"{name}.json.gz"), node=node, at=AT, good=data_bytes(f"{good}.json.gz") if good else b""
    )
    table = taken.tables["health_results"]
    assert {
        (device, check) for device, check, status in rows_of(table, "device", "check", "status") if status == 2
    } == bad
    assert set(table["node"].to_pylist()) <= {"n1", "node1720", "node2183"}


def pod(**changes):
    status = {
        "phase": "Failed",
        "startTime": "2026-03-01T10:00:05Z",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-03-01T10:00:00Z"}],
        "containerStatuses": [
            {
                "restartCount": 2,
                "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-03-01T11:00:00Z"}},
            }
        ],
    }
    spec = {"nodeName": "n1", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "8", "cpu": "500m"}}}]}
    meta = {
        "name": "p",
        "namespace": "team",
        "uid": "u-1",
        "creationTimestamp": "2026-03-01T09:59:00Z",
        "labels": {"job-name": "llm"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status | changes}


def event(reason, when, kind="Node", **about):
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "reason": reason,
        "involvedObject": {"kind": kind, "name": "n1", **about},
        "firstTimestamp": when,
        "message": "m",
    }


def test_pods_events_and_nodes_of_kubernetes():
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1"},
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "conditions": []},
    }
    items = [
        pod(),
        event("NodeNotReady", "2026-03-01T10:59:00Z"),
        event("NodeReady", "2026-03-01T11:30:00Z"),
        node,
        {"kind": "Service", "metadata": {}},
    ]
    taken = read_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    assert rows_of(taken.attempts, "name", "state", "gpus", "nodes", "exit_code", "restarts") == [
        ("llm", "OUT_OF_MEMORY", 8, "n1", 137, 2)
    ]
    assert rows_of(taken.tables["node_intervals"], "node", "kind", "start", "end") == [
        ("n1", "down", datetime.datetime(2026, 3, 1, 10, 59), datetime.datetime(2026, 3, 1, 11, 30))
    ]
    assert (rows_of(taken.tables["inventory"], "node", "gpus"), len(taken.aside)) == ([("n1", 8)], 1)


def test_a_preempted_pod_ended_so_whatever_its_phase_says():
    lines = [pod(reason="", containerStatuses=[]), event("Preempted", "2026-03-01T11:00:00Z", kind="Pod", uid="u-1")]
    assert rows_of(read_text("\n".join(map(json.dumps, lines))).attempts, "state") == [("PREEMPTED",)]


def test_a_training_log_gives_progress():
    lines = [
        '{"time": 1790000000.5, "job": "12", "step": 7, "step_s": 1.5, "tokens": 99}',
        '{"time": 1790000001, "job": "12", "what": "checkpoint", "step": 7}',
        '{"step": 8}',
    ]
    taken = read_text("\n".join(lines))
    assert rows_of(taken.tables["progress"], "scheduler_job", "what", "step", "step_us", "tokens") == [
        ("12", "step", 7, 1_500_000, 99),
        ("12", "checkpoint", 7, None, None),
    ]
    assert len(taken.aside) == 1


def test_modes_of_a_policy_come_from_a_table():
    taken = read_text(
        "mode,start,end\nobserve,2026-01-01T00:00:00,2026-02-01T00:00:00\nautomatic,2026-02-01T00:00:00,\n"
    )
    assert rows_of(taken.tables["policy_modes"], "mode", "end") == [
        ("observe", datetime.datetime(2026, 2, 1)),
        ("automatic", None),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,07],m4", ("n1", "n2", "n3", "n07", "m4")),
        ("r[1-2]n[08-09]-ib", ("r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib")),
        ("None assigned", ()),
        ("n1", ("n1",)),
    ],
)
def test_lists_of_hosts(text, names):
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[1-999999999]", "n]1[", "n[a]"])
def test_lists_of_hosts_that_are_none(text):
    with pytest.raises(RecordError):
        expand_hosts(text)


@pytest.mark.parametrize(
    "path",
    sorted(path for path in DATA.iterdir() if path.suffix in (".txt", ".csv", ".gz")),
    ids=lambda path: path.name,
)
def test_every_file_is_known_by_its_beginning(path):
    expected = {
        "sacct_P": "sacct",
        "sacct.json": "sacct-json",
        "sacctmgr": "sacctmgr-events",
        "scontrol_show_node.txt": "scontrol-nodes",
        "node.json": "nodes-json",
        "infinitehbd": "fault-trace",
        "acme": "trace-csv",
        "gcm_eth": "interfaces",
        "gcm_learn": "sysfs",
        "gcm_": "sacct",
    }
    kind = kind_of(data_bytes(path.name)[:65536])
    assert kind == next(kind for part, kind in expected.items() if part in path.name)


def test_what_nobody_writes_is_not_guessed():
    assert (kind_of(b"hello\nworld\n"), kind_of(b""), kind_of(b"\x89PNG\r\n")) == (None, "empty", None)


@pytest.mark.parametrize("number", ["1e18", "1e999", str(10**30), "-1", "true", "null", '"x"'])
def test_numbers_that_are_none_do_not_end_in_a_traceback(number):
    lines = (
        f'{{"time": 1790000000, "job": "1", "step": {number}, "tokens": {number}, "attempt": {number}, "members": 9}}'
    )
    taken = read_text(lines, kind="training-log")
    assert taken.tables["progress"].num_rows + len(taken.aside) == 1


def test_a_csv_without_the_columns_of_a_job_is_refused():
    with pytest.raises(RecordError, match="columns of no trace"):
        read_text("job_id,user,start_time,end_time\n1,u,2,3\n", kind="trace-csv")
