"""Kinds of public reports: what NCCL, launchers and detectors in the job say, and ordinary lines that mean nothing."""

from __future__ import annotations

import gzip

import pytest
from diagnosed_text import found_in, named, ranks, status, timeout

from keepstep.intake.log_patterns import PatternIndex, pattern
from keepstep.intake.timings import READER
from keepstep.service.diagnosing import diagnose_paths

NOT_A_CAUSE = {
    "a network plugin that is not installed": (
        "n1:1:1 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open "
        "shared object file: No such file or directory\n"
    ),
    "a plugin, older wording": (
        "n1:1:1 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or "
        "directory No plugin found, using internal implementation\n"
    ),
    "a library of another framework": (
        "W tensorflow/stream_executor/dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: "
        "libnvinfer.so.7: cannot open shared object file: No such file or directory\n"
    ),
}

NAMED = {
    "NCCL found a mismatch": (
        "n5:77:90 [3] init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and "
        "around rank 39. You can use NCCL_DEBUG=INFO\n",
        "collective_mismatch",
        "application",
        [[{"rank": 39}]],
    ),
    "NCCL suspects a mismatch": (
        "n5:77:90 [0] init.cc:1256 NCCL WARN Your program may be hanging, this may be caused by a collective mismatch "
        "around rank 1. Please check your collective calls\n",
        "collective_mismatch",
        "application",
        [[{"rank": 1}]],
    ),
    "a queue pair, wording of 2026": (
        "host-01:4455:4500 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on "
        "dev mlx5_1:1, curr state INIT, next state RTR\n",
        "startup_never_arrived",
        "configuration",
        [[{"node": "host-01"}]],
    ),
    "no devices on a node": (
        "r8i1n3: RuntimeError: No CUDA GPUs are available\n",
        "startup_died",
        "configuration",
        [[{"node": "r8i1n3"}]],
    ),
    "peer access": (
        "n1:253:271 [2] include/alloc.h:48 NCCL WARN Cuda failure 'peer access is not supported between these two "
        "devices'\n",
        "startup_died",
        "configuration",
        [[{"node": "n1", "pid": 253}]],
    ),
    "a straggler detector, as a set": (
        "[2024-11-02 10:00:00] rank0: STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected "
        "ranks: {StragglerId(rank=13, node='node1'), StragglerId(rank=2, node='node0')}\n",
        "compute_slow",
        "hardware_gpu",
        [[{"rank": 2}], [{"rank": 13}]],
    ),
    "a straggler detector, as a list": (
        "STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: [162]\n",
        "compute_slow",
        "hardware_gpu",
        [[{"rank": 162}]],
    ),
    "a desync report of one that did not finish": (
        "[E ProcessGroupNCCL.cpp:719] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
        "OpType=ALLREDUCE, TensorShape=[4096], Timeout(ms)=600000) ran for 600755 milliseconds before timing out.\n"
        "\t   - [3] joined but didn't finish collective #4 (count from 1)\n",
        "noncommunication_hang",
        "undetermined",
        [[{"rank": 3}]],
    ),
    "the device of a fault by the rank that failed": (
        "NVRM: Xid (PCI:0000:4f:00): 31, pid=4455, name=python, MMU Fault: ENGINE GRAPHICS\n"
        "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n",
        "crash",
        "application",
        [[{"rank": 3}]],
    ),
    "Gloo's mesh": (
        "[rank2]: RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error\n",
        "startup_never_arrived",
        "configuration",
        [[{"rank": 2}]],
    ),
    "a child of Lightning": (
        "[rank: 1] Child process with PID 4455 terminated with code -11. Forcefully terminating all other processes\n",
        "crash",
        "software_library",
        [[{"rank": 1}]],
    ),
    "a node that Ray lost": ("The actor died because its node has died. Node Id: 9f\n", "crash", "undetermined", []),
}

UNACKNOWLEDGED = (
    "n1:10:20 [3] transport/net_ib.cc:2200 NCCL WARN NET/IB: Got completion from peer 10.0.0.7<43211> with "
    "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) reqSize=65536 vendor_err=129 req_type=Send localGid "
    "::ffff:10.0.0.1 remoteGids::ffff:10.0.0.7 hca mlx5_3\n"
)
WORKER = """We train on 4 GPUs and it hangs at a random step.

```
Process 52422: python train.py
Thread 52422 (idle): "MainThread"
    get (multiprocessing/queues.py:107)
    _try_get_data (torch/utils/data/dataloader.py:990)
    __next__ (torch/utils/data/dataloader.py:521)
    train (train.py:90)
```
"""


@pytest.mark.parametrize("name", NOT_A_CAUSE)
def test_a_library_that_is_optional_is_no_cause(name, tmp_path):
    found = found_in(NOT_A_CAUSE[name] + "step 1/100 loss 2.5\nstep 100/100 loss 1.2\nTraining finished\n", tmp_path)
    assert [finding.kind for finding in found] == ["healthy"]


@pytest.mark.parametrize("name", NAMED)
def test_what_a_library_or_launcher_names(name, tmp_path):
    text, kind, layer, suspects = NAMED[name]
    (finding,) = found_in(text, tmp_path)
    assert (finding.kind, finding.layer, named([finding])) == (kind, layer, suspects)


def test_connections_that_close_after_the_end_of_training_are_nothing(tmp_path):
    closed = "[rank3]:[W1030 10:00:00.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=70): Broken pipe\n"
    assert found_in("step 10/10 loss 1\nTraining finished\n" + closed, tmp_path)[0].kind == "healthy"
    assert found_in("step 10/20 loss 1\n" + closed, tmp_path)[0].kind == "undetermined"


def test_both_ends_of_a_transfer_that_nobody_acknowledged_are_one_set(tmp_path):
    (finding,) = found_in(UNACKNOWLEDGED + "".join(timeout(rank, 77) for rank in range(4)), tmp_path)
    assert (finding.layer, finding.victims) == ("hardware_link", (0, 1, 2, 3))
    assert named([finding]) == [[{"node": "10.0.0.7"}, {"node": "n1", "device": "mlx5_3"}]]
    assert finding.confidence <= 0.5


def test_the_end_that_several_transfers_share(tmp_path):
    (finding,) = found_in("".join(UNACKNOWLEDGED.replace("n1:", f"n{host}:", 1) for host in (1, 2, 3)), tmp_path)
    assert named([finding]) == [[{"node": "10.0.0.7"}]]


def test_a_refused_transfer_is_not_called_a_broken_link(tmp_path):
    refused = (
        "H1:19:20 [1] net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<53> with error 4, opcode 3"
    )
    assert [finding.layer for finding in found_in(refused + ", len 3, vendor err 81 (Send)\n", tmp_path)] == [
        "undetermined"
    ]


def test_a_group_whose_members_the_log_does_not_name_is_not_blamed_beside_an_origin(tmp_path):
    def inside(rank: int, group: str, queued: int, finished: int) -> str:
        return (
            f"[rank{rank}]:[E626 05:06:30.1 ProcessGroupNCCL.cpp:2268] [PG ID {group} Rank 0]  failure detected by "
            f"watchdog at work sequence id: {finished + 1} PG status: last enqueued work: {queued}, last completed "
            f"work: {finished}\n"
        )

    text = "".join(inside(rank, "2 PG GUID 5(DATA)", 412, 409) for rank in (0, 4, 8))
    text += inside(12, "3 PG GUID 9(TENSOR)", 2031, 2030) + inside(13, "3 PG GUID 9(TENSOR)", 2030, 2030)
    found = found_in(text, tmp_path)
    assert [finding.kind for finding in found] == ["noncommunication_hang"]
    assert ranks(found) == {13}


def test_one_stack_in_the_loader_of_a_job_that_hangs(tmp_path):
    (finding,) = found_in(WORKER, tmp_path, "report.md")
    assert (finding.kind, finding.layer) == ("noncommunication_hang", "dataloader")
    assert finding.confidence <= 0.5
    (alone,) = found_in(WORKER.replace("it hangs at a random step", "this is its stack"), tmp_path, "other.md")
    assert alone.kind == "undetermined"


def test_a_way_between_devices_that_was_switched_off(tmp_path):
    note = "The server stands still with two GPUs. After I switched off ACS and IOMMU in the BIOS it works.\n"
    assert found_in(f"# Report\n\n{note}", tmp_path, "a.md")[0].layer == "configuration"
    assert found_in("# Report\n\nI disabled both ACS and IOMMU. It stands still all the same.\n", tmp_path, "b.md")[
        0
    ].kind == ("undetermined")


def test_lines_of_a_log_are_no_table(tmp_path):
    text = "h:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 time 5\nh:1:2 [1] NCCL INFO comm 0x2 rank 1 nranks 2 time 6\n"
    path = tmp_path / "nccl.log"
    path.write_text(text + "something else\n")
    assert not READER.recognises(path, path.read_bytes())


def test_lines_that_only_differ_in_numbers_are_looked_at_where_it_matters(tmp_path):
    noise = "".join(f"[rank{number % 8}]: built index {number:#x} in {number}.5 seconds\n" for number in range(50))
    text = noise + WORKER.split("```\n")[1] + noise + "".join(timeout(rank, 77) for rank in range(4)) + noise
    found = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in found] == [("noncommunication_hang", "dataloader")]
    trace = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py", line 3, in f\n[rank1]: KeyError: 4\n'
    (finding,) = found_in(noise + trace + noise, tmp_path)
    assert ranks([finding]) == {1}


def test_a_table_between_lines_that_say_nothing(tmp_path):
    noise = "".join(f"built index {number} in {number}.5 seconds\n" for number in range(20))
    rows = "rank,compute_ms\n" + "".join(f"{rank},{10 if rank != 2 else 31}.0\n" for rank in range(6))
    assert ranks(found_in(noise + rows + noise + rows.replace(",31", ",32") + noise, tmp_path)) == {2}


def test_patterns_are_found_by_words_short_and_long():
    index = PatternIndex([pattern("one", "%", expression="%"), pattern("two", "percent|per", expression="PER")])
    assert [one.kind for one in index.fitting("5 % percent")] == ["one", "two"]
    assert [one.kind for one in index.fitting("%")] == ["one"]
    assert index.fitting("pe") == ()


def test_a_short_log_whose_compressed_file_is_cut_off(tmp_path):
    lines = "".join(timeout(rank, 200 + part) for part in range(200) for rank in range(3))
    whole = gzip.compress(lines.encode())
    (tmp_path / "job.log.gz").write_bytes(whole[: len(whole) // 2])
    answer = diagnose_paths([tmp_path / "job.log.gz"])
    assert answer.read[0][1] == "log text"
    assert "damaged after line" in answer.unread[0].why


def test_a_device_that_only_numbers_suspect_is_not_almost_certain(tmp_path):
    text = "".join(timeout(rank, 9) + status(rank, 9, 8) for rank in (0, 1, 3))
    (finding,) = found_in(text + timeout(2, 8, op="ALLGATHER") + status(2, 8, 7), tmp_path)
    assert (ranks([finding]), finding.layer) == ({2}, "hardware_gpu")
    assert finding.confidence <= 0.7
    assert "another one" in finding.evidence[-1]
