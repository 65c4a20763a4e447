"""Kinds of evidence in many wordings, years, launchers and sizes: layer, kind and who; and texts that say nothing."""

from __future__ import annotations

import pytest
from diagnosed_text import WATCHDOG, dump, found_in, named, ranks, status, timeout


def pg_timeout(rank, prefix, queued, finished):
    return (
        f"[rank{rank}]:[E1101 10:00:00.1 ProcessGroupNCCL.cpp:1664] [PG {prefix}] "
        f"Timeout at NCCL work: {finished + 1}, "
        f"last enqueued NCCL work: {queued}, last completed NCCL work: {finished}.\n"
    )


def pg_told(rank, prefix, finished):
    return (
        f"[rank{rank}]:[E1101 10:00:01.1 ProcessGroupNCCL.cpp:1414] [PG {prefix}] Received a dump signal due to a "
        f"collective timeout from this local rank. Last enqueued NCCL work: {finished}, "
        f"last completed NCCL work: {finished}.\n"
    )


HANGS = {
    "2025 one rank behind": (
        "".join(timeout(r, 105) + status(r, 107, 104) for r in range(3)) + dump(3, 104, 104, 0),
        {"noncommunication_hang"},
        {3},
    ),
    "2024 wording, 8 ranks": (
        "".join(
            f"[rank{r}]:[E ProcessGroupNCCL.cpp:563] [Rank {r}] {WATCHDOG}WorkNCCL(SeqNum=4486, "
            "OpType=ALLTOALL, NumelIn=46684160, "
            "NumelOut=46684160, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n"
            f"[rank{r}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {r}] Timeout at NCCL work: 4486, "
            "last enqueued NCCL work: 4489, "
            "last completed NCCL work: 4485.\n"
            for r in (0, 1, 2, 3, 4, 6, 7)
        )
        + "[rank5]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 5] Received a dump signal due to a "
        "collective timeout from  rank 2 and "
        "we will try our best to dump the debug info. Last enqueued NCCL work: 4485, last completed NCCL work: 4485.\n",
        {"noncommunication_hang"},
        {5},
    ),
    "monitored barrier, one": (
        "RuntimeError: [Rank 0]: Rank 3 failed to pass monitoredBarrier in 30000 ms\n"
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while "
        "waiting for send/recv from rank 0.\n",
        {"noncommunication_hang"},
        {3},
    ),
    "monitored barrier, several": (
        "RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms\n",
        {"noncommunication_hang"},
        {4, 5, 6, 7},
    ),
    "desync report": (
        f"[E ProcessGroupNCCL.cpp:828] [Rank 1] {WATCHDOG}WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
        "TensorShape=[1024], Timeout(ms)=10000) ran "
        "for 10012 milliseconds before timing out.\n"
        "\t - [1] Timeout at collective: ALLREDUCE, #7\n"
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "\t     [2] finished collective #6, but didn't join collective #7 (count from 1)\n",
        {"noncommunication_hang"},
        {2},
    ),
    "desync report, never": (
        (
            "\t - To our best knowledge, ranks [1, 5] are the lagging ranks that caused this timeout. "
            "They never joined any collectives\n"
        ),
        {"noncommunication_hang"},
        {1, 5},
    ),
    "all but one timed out, world known": (
        "INFO: world_size=4\n" + "".join(timeout(r, 12).replace("SeqNum=12, ", "") for r in (0, 1, 3)),
        {"noncommunication_hang"},
        {2},
    ),
    "torch 2.4, one of a nested group": (
        pg_timeout(0, "0 (default_pg) Rank 0", 7, 6)
        + pg_timeout(1, "0 (default_pg) Rank 1", 7, 6)
        + pg_timeout(2, "3 (TENSOR_MODEL_PARALLEL_GROUP) Rank 0", 41, 40)
        + pg_told(0, "2 (TENSOR_MODEL_PARALLEL_GROUP) Rank 0", 52)
        + pg_told(1, "2 (TENSOR_MODEL_PARALLEL_GROUP) Rank 1", 52)
        + pg_told(2, "0 (default_pg) Rank 2", 6)
        + pg_told(3, "0 (default_pg) Rank 3", 6)
        + pg_told(3, "3 (TENSOR_MODEL_PARALLEL_GROUP) Rank 1", 40),
        {"noncommunication_hang"},
        {3},
    ),
    "store at the start": (
        "".join(
            f"[rank{r}]: torch.distributed.DistStoreError: Timed out initializing process group in "
            f"store based barrier on rank: {r}, "
            "for key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)\n"
            for r in (0, 1, 3)
        ),
        {"startup_never_arrived"},
        {2},
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_did_not_come_is_named(name, tmp_path):
    text, kinds, who = HANGS[name]
    findings = found_in(text, tmp_path)
    assert {finding.kind for finding in findings} == kinds
    assert ranks(findings) == who
    assert not who & {rank for finding in findings for rank in finding.victims}


MISMATCHES = {
    "op differs at one number": (
        "".join(timeout(r, 52) + status(r, 53, 51) for r in (0, 1, 3))
        + timeout(2, 52, "ALLGATHER")
        + status(2, 53, 51),
        {2},
    ),
    "size differs at one number": (
        "".join(timeout(r, 9, "BROADCAST", 80) + status(r, 9, 8) for r in (0, 2, 3))
        + timeout(1, 9, "BROADCAST", 96)
        + status(1, 9, 8),
        {1},
    ),
    "fingerprints, other operation": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=18, OpType=ALLREDUCE, TensorShape=[4], "
        "TensorDtypes=Float), but Rank 2 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=18, OpType=BROADCAST, TensorShape=[4], "
        "TensorDtypes=Float).\n",
        {0, 2},
    ),
    "fingerprints over several lines": (
        "Exception: Capture cuda graph failed: Detected mismatch between collectives on ranks.\n"
        "Rank 3 is running collective: SequenceNumber=18\n"
        "Rank 0 is running collective: SequenceNumber=22\n",
        {0, 3},
    ),
    "fingerprints, shapes": (
        "[rank12]: RuntimeError: Detected mismatch between collectives on ranks.\nRank 12: _REDUCE_SCATTER_BASE, "
        "TensorShape=[505155840]\nRank 0: _REDUCE_SCATTER_BASE, TensorShape=[240914688]\n",
        {0, 12},
    ),
    "call log with hosts": (
        "".join(
            f"n1:10{r}:20{r} [{r}] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f recvbuff 0x7f count "
            "1024 datatype 7 op 0 root 0 "
            f"comm 0x55 [nranks=4] stream 0x1\n"
            for r in (0, 1, 3)
        )
        + "n1:102:202 [2] NCCL INFO Broadcast: opCount 1f sendbuff 0x7f recvbuff 0x7f count 1024 "
        "datatype 7 op 0 root 0 comm 0x55 "
        "[nranks=4] stream 0x1\n",
        {2},
    ),
    "call log, another count": (
        "".join(
            f"[{r}] INFO AllReduce: opCount 3 count {7 if r == 1 else 9} datatype 7 op 0 root 0 [nranks=3] stream S0\n"
            for r in range(3)
        ),
        {1},
    ),
    "one barrier too many after training": (
        "Training completed. Saved the model.\n" + timeout(0, 4001, "ALLREDUCE", 1, 1800000),
        {0},
    ),
    "barrier of rank 3 after max_steps": (
        "`Trainer.fit` stopped: `max_steps=2000` reached.\n8-GPU run, see below\n"
        f"[Rank 3] {WATCHDOG}WorkNCCL(SeqNum=9, OpType=BARRIER, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600020 milliseconds "
        "before timing out.\n",
        {3},
    ),
    "two ranks in gloo, others in NCCL": (
        "".join(timeout(r, 31) + status(r, 31, 30) for r in (0, 1, 2, 3))
        + "".join(
            dump(r, 30, 30, 0)
            + f"[rank{r}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
            "peer [10.0.0.1]:3421\n"
            for r in (4, 5)
        ),
        {4, 5},
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_call_something_else_are_named(name, tmp_path):
    text, who = MISMATCHES[name]
    findings = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in findings] == [("collective_mismatch", "application")]
    assert ranks(findings) == who


DATA = {
    "bar of a map": (
        "Map (num_proc=8):  62%|██████▏   | 1240000/2000000 [29:58<18:22, 689.1 "
        f"examples/s]\n[Rank 1] {WATCHDOG}WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800701 milliseconds "
        "before timing out.\n",
        "dataloader",
        set(),
    ),
    "bar of tokenizing, rank known": (
        "[rank0]: Tokenizing train dataset:  12%|█▏        | 120/1000 [10:02<1:13:20,  5.0s/ examples]\n"
        + "".join(timeout(r, 3) for r in (1, 2, 3)),
        "dataloader",
        {0},
    ),
    "bar of weights": (
        "Loading checkpoint shards:  40%|████      | 6/15 [10:01<15:00, 100.2s/it]\n" + timeout(2, 1),
        "storage",
        set(),
    ),
    "marks of ranks": (
        "rank 0: entering forward step 5\nrank 1: entering forward step 5\nrank 2: before "
        "next(data_iter)\nrank 3: entering forward step 5\n",
        "dataloader",
        {2},
    ),
    "note in brackets": (
        "rank=0: before forward (step=3 micro=0)\nrank=1: before forward (step=3 micro=0)\n(rank 2 "
        "never prints its batch line)\n",
        "dataloader",
        {2},
    ),
    "note of a user": (
        "Ranks 4 and 5 are stuck in next(iter(dataloader)), the rest waits in all_reduce.\n",
        "dataloader",
        {4, 5},
    ),
    "behind, and loading": (
        "[rank3]: before next(data_iter) step 11\n"
        + "".join(timeout(r, 105) + status(r, 107, 104) for r in range(3))
        + dump(3, 104, 104, 0),
        "dataloader",
        {3},
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_a_rank_that_loads_while_others_wait(name, tmp_path):
    text, layer, who = DATA[name]
    findings = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in findings] == [("noncommunication_hang", layer)]
    assert ranks(findings) == who


SLOW = {
    "one rank waits for data": ("data_wait_ms: rank0 11.2 rank1 10.9 rank2 11.5 rank3 178.0\n", "dataloader", {3}),
    "one rank computes long": ("forward_ms: rank0 120.1 rank1 119.7 rank2 241.3 rank3 120.4\n", "application", {2}),
    "who waits least in communication": (
        "allreduce_wait_ms: rank0 95.0 rank1 4.0 rank2 93.1 rank3 96.2\n",
        "application",
        {1},
    ),
    "checkpoint": ("checkpoint save s: rank 0 = 14.1, rank 1 = 13.9, rank 2 = 14.4, rank 3 = 88.2\n", "storage", {3}),
    "host work grows with ranks": (
        "cpu launch time, 1 rank on node: 2.1 ms\ncpu launch time, 8 ranks on node: 41 ms\nthe "
        "slowest rank changes every step\n",
        "host_cpu",
        set(),
    ),
    "kernel preparation, processes": (
        "host scheduling overhead, 1 process per node: 0.4 ms\nhost scheduling overhead, 4 processes "
        "per node: 6-9 ms\n",
        "host_cpu",
        set(),
    ),
    "all on one core": (
        "pid 100's current affinity list: 0\npid 101's current affinity list: 0\npid 102's current affinity list: 0\n",
        "host_cpu",
        set(),
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_numbers_that_single_somebody_out(name, tmp_path):
    text, layer, who = SLOW[name]
    findings = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in findings] == [("compute_slow", layer)]
    assert ranks(findings) == who


HEALTHY = {
    "megatron": "".join(
        (
            f" iteration {i:8d}/  500000 | consumed samples: {i * 512} | elapsed time per iteration "
            "(ms): 900.1 | lm loss: 2.5E+00 |\n"
        )
        for i in range(1, 30)
    ),
    "ended": "step 1 loss 2.0\nstep 2 loss 1.9\nTraining completed.\n",
    "harmless warnings": "step 1 loss 2.0\nUserWarning: os.fork() was called\nNCCL INFO NET/IB : Using "
    "[0]mlx5_0:1/IB\nstep 2 loss 1.9\n",
    "port that came back": (
        "n1:1:2 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n"
        "n1:1:2 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port active\nstep 8 loss 2.0\nstep 9 loss 1.9\n"
    ),
    "ecc is only a word": "ECC mode: Enabled, volatile uncorrectable: 0\nstep 1 loss 2.0\nstep 2 loss 1.0\n",
    "throttle reasons off": "HW Slowdown : Not Active\nSW Thermal Slowdown : Not Active\nstep 1 loss 2.0\n",
    "training bar": "Epoch 3:  45%|████▌     | 450/1000 [10:00<12:13,  1.33s/it, loss=2.1]\nstep 450 loss 2.1\n",
    "retries": (
        "retrying after ConnectionResetError: [Errno 104] Connection reset by server\nstep 3 loss "
        "2.0\nTraining finished\n"
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_stays_healthy(name, tmp_path):
    findings = found_in(HEALTHY[name], tmp_path)
    assert [finding.kind for finding in findings] == ["healthy"]


UNCLEAR = {
    "one time-out": timeout(6, 1234, "_ALLGATHER_BASE", 4096),
    "closed connections only": "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.7]:4242\n",
    "numbers within noise": "backward_ms: rank0 293.0 rank1 292.2 rank2 293.0 rank3 293.1\n",
    "two numbers": "forward_ms: rank0 101.0 rank1 140.0\n",
    "words": "The training of our model hangs sometimes, what can we do?\n",
    "captures that disagree": "Five dumps: each time one is ahead of the others: rank0, rank4, rank2, rank4, rank4.\n",
    "one stack": 'Thread 4242 (idle): "MainThread"\n    wait (threading.py:306)\n    all_reduce '
    "(torch/distributed/distributed_c10d.py:1316)\n",
    "signal without a reason": "srun: error: n03: tasks 24-31: Killed\n",
    "remote error": "[rank4]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited "
    "or there was a network "
    "error, NCCL version 2.18.1\nncclRemoteError: A call failed possibly due to a network error "
    "or a remote process exiting prematurely.\n",
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_where_the_log_cannot_show_it_nobody_is_blamed(name, tmp_path):
    findings = found_in(UNCLEAR[name], tmp_path)
    assert len(findings) == 1
    assert findings[0].layer == "undetermined" or findings[0].confidence <= 0.5
    assert findings[0].confidence <= 0.5
    assert findings[0].next_probe


def test_all_in_one_collective_cannot_be_told_apart(tmp_path):
    findings = found_in("INFO: world_size=4\n" + "".join(timeout(r, 77) for r in range(4)), tmp_path)
    assert [finding.kind for finding in findings] == ["communication_hang"]
    assert named(findings) == [[{"rank": rank} for rank in range(4)]]


TABLES = {
    "markdown": (
        "| rank | forward_ms | data_ms |\n|---|---|---|\n| 0 | 120.0 | 4.1 |\n| 1 | 119.8 | 4.0 "
        "|\n| 2 | 120.3 | 90.2 |\n| 3 | 120.1 | 4.2 |\n",
        "dataloader",
        {2},
    ),
    "spaces": ("rank  compute_ms\n0     101.0\n1     100.4\n2     190.7\n3     100.9\n", "application", {2}),
    "clocks": ("rank, sm_clock_mhz\n0, 1980\n1, 1980\n2, 345\n3, 1980\n", "hardware_gpu", {2}),
    "clocks in a line": ("sm_clock_mhz: rank0 1980 rank1 1965 rank2 1980 rank3 705\n", "hardware_gpu", {3}),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_with_one_row_a_rank(name, tmp_path):
    text, layer, who = TABLES[name]
    findings = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in findings] == [("compute_slow", layer)]
    assert ranks(findings) == who


@pytest.mark.parametrize(
    "text", ["tokens per step: rank0 8192 rank1 30100 rank2 9002 rank3 12000\n", "rank,num_samples\n0,10\n1,40\n2,11\n"]
)
def test_uneven_work_blames_nobody(text, tmp_path):
    assert [(finding.kind, finding.layer, finding.suspects) for finding in found_in(text, tmp_path)] == [
        ("imbalance", "application", ())
    ]


def test_a_save_that_did_not_end(tmp_path):
    text = "INFO Saving latest checkpoint model trained for 3 epochs\n" + timeout(7, 1512677, numel=306176)
    assert [(finding.kind, finding.layer) for finding in found_in(text, tmp_path)] == [
        ("noncommunication_hang", "storage")
    ]


@pytest.mark.parametrize("peer", ["127.0.1.1", "172.17.0.1", "169.254.3.4"])
def test_an_address_that_others_cannot_reach(peer, tmp_path):
    text = f"n2:31:99 [1] NCCL WARN socketStartConnect: Connect to {peer}<45213> failed : Connection refused\n"
    assert [finding.layer for finding in found_in(text, tmp_path)] == ["configuration"]


def test_a_table_of_health_checks(tmp_path):
    text = (
        "| Diagnostic                | Result                                         |\n"
        "| Persistence Mode          | Fail                                           |\n"
        "| Warning                   | Persistence mode for GPU 3 is disabled.        |\n"
        "| Memory                    | Pass                                           |\n"
    )
    assert [(finding.kind, finding.layer) for finding in found_in(text, tmp_path)] == [("healthy", "configuration")]
    broken = text.replace("| Memory                    | Pass", "| Memory                    | Fail")
    assert [(finding.kind, finding.layer) for finding in found_in(broken, tmp_path)] == [("crash", "hardware_gpu")]


@pytest.mark.parametrize(
    "text",
    [
        "[data] batches are late on rank 10, rank 20, rank 31 and rank 49\n",
        "data seeds: rank 0: 1234 rank 1: 9876 rank 2: 55 rank 3: 70\n",
        "gpu memory: rank 0: 10.5 rank 1: 10.4 rank 2: 31.0 rank 3: 10.4\n",
        "saving checkpoint: rank 0: 120 MB rank 1: 118 MB rank 2: 420 MB rank 3: 119 MB\n",
        "dataset: rank 0: 12 samples, rank 1: 12 samples, rank 2: 12 samples, rank 3: 40 samples\n",
    ],
)
def test_numbers_by_rank_that_are_no_times_make_nobody_slow(text, tmp_path):
    assert [(f.kind, f.suspects) for f in found_in(text, tmp_path)] == [("undetermined", ())]


def test_times_of_what_is_counted_are_times(tmp_path):
    text = "forward time per sample (ms): rank 0: 10.1 rank 1: 10.0 rank 2: 31.0 rank 3: 10.2\n"
    assert ranks(found_in(text, tmp_path)) == {2}


@pytest.mark.parametrize(
    "text",
    [
        "n1:1:1 [0] NCCL INFO comm 0x1 rank {0} nranks {0} cudaDev 0 busId 1 commId 0x2 - Init START\n",
        'Process 1: python train.py\nThread 1 (idle): "MainThread"\n    all_reduce (train.py:{0})\n',
        'Process {0}: python train.py\nThread 1 (idle): "MainThread"\n    all_reduce (train.py:1)\n',
        "forward ms: rank {0}: 1 rank 1: 2\n",
        "[rank0]:[E1101 10:00:00.1 ProcessGroupNCCL.cpp:1] [Rank 0] WorkNCCL(SeqNum=\u00b2, OpType=ALLREDUCE) ran for "
        "600013 milliseconds before timing out.\n",
    ],
)
def test_numbers_without_end_and_numbers_that_are_none(text, tmp_path):
    assert all(finding.kind == "undetermined" for finding in found_in(text.format("9" * 4500), tmp_path))


STEPS = "".join(f"[rank{rank}]: step {step} loss 2.5\n" for step in range(1, 9) for rank in range(2))
SILENT = "n1 kernel: nfs: server 10.0.0.9 not responding, still trying\n"
OTHERS = "n1 kernel: Out of memory: Killed process 5123 ({}) total-vm:100kB\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SILENT + "n1 kernel: nfs: server 10.0.0.9 OK\n" + STEPS, "healthy"),
        (SILENT + "n1 kernel: nfs: server 10.0.0.8 OK\n" + STEPS, "noncommunication_hang"),
        (SILENT + STEPS, "noncommunication_hang"),
        (SILENT + "n1 kernel: nfs: server 10.0.0.9 OK\n" + STEPS + timeout(0, 9), "noncommunication_hang"),
        (OTHERS.format("chrome") + STEPS, "healthy"),
        (OTHERS.format("python3") + STEPS, "crash"),
        (STEPS + OTHERS.format("chrome"), "crash"),
    ],
)
def test_what_passed_or_was_of_others_while_training_went_on_is_no_fault(text, kind, tmp_path):
    assert [finding.kind for finding in found_in(text, tmp_path)] == [kind]


@pytest.mark.parametrize("error", ["ValueError: bad", "KeyError: 'weights'", "AssertionError", "OSError: [Errno 5] x"])
def test_a_traceback_without_a_rank_is_the_programs_and_nobody_is_named(error, tmp_path):
    (found,) = found_in(f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{error}\n', tmp_path)
    assert (found.kind, found.suspects) == ("crash", ())
