"""Whole stories as users paste them: a few words, then lines of several tools; the kind, the layer and who."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, ranks

STORIES = {
    "a save that takes too long": (
        "## Symptom\n"
        "\n"
        "16 GPUs, 2 nodes. Checkpoint saving takes very long and then the job is killed.\n"
        "\n"
        "## Log\n"
        "\n"
        "```\n"
        "[rank0]: 2026-02-18 10:28:25,496 - root - INFO - Saving latest checkpoint model trained "
        "for 3 complete epochs\n"
        "2026-02-18T10:48:25.681Z [rank7]:[E218 10:48:25.033625188 ProcessGroupNCCL.cpp:632] "
        "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1512677, "
        "OpType=ALLREDUCE, NumelIn=306176, NumelOut=306176, Timeout(ms)=1200000) ran for 1200027 "
        "milliseconds before timing out.\n"
        "```\n",
        "noncommunication_hang",
        "storage",
        [0],
    ),
    "address of a bridge": (
        "Multi-node job never starts, hangs in init_process_group. Works on one node.\n"
        "worker-1:71:71 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\n"
        "worker-1:71:71 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>\n"
        "worker-1:71:120 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to "
        "172.17.0.1<36041> failed : Connection refused\n",
        "startup_never_arrived",
        "configuration",
        [],
    ),
    "a setting that cures": (
        "8 GPU DDP run hangs at the first all_reduce when P2P is used. nvidia-smi shows 100 % on "
        "all GPUs. With NCCL_P2P_DISABLE=1 it works.\n"
        "n1:10:10 [0] NCCL INFO Channel 00/02 :    0   1\n"
        "n1:10:10 [0] NCCL INFO P2P Chunksize set to 131072\n"
        "n1:10:10 [0] NCCL INFO Init COMPLETE\n",
        "communication_hang",
        "configuration",
        [],
    ),
    "illegal access": (
        "vLLM tensor parallel server stops answering after some hours.\n"
        "(VllmWorkerProcess pid=412) ERROR 07-05 [rank1]:[E ProcessGroupNCCL.cpp:1182] [Rank 1] "
        "NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access "
        "was encountered\n"
        "[rank1]:[E ProcessGroupNCCL.cpp:1182] what():  [Rank 1] NCCL watchdog thread terminated "
        "with exception: CUDA error: an illegal memory access was encountered\n"
        "[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=158046, OpType=GATHER, NumelIn=2867200, NumelOut=0, "
        "Timeout(ms)=600000) ran for 600027 milliseconds before timing out.\n",
        "crash",
        "application",
        [1],
    ),
    "killed without a word": (
        "torchrun failed\n"
        "[2024-06-01 10:00:00,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed "
        "(exitcode: -9) local_rank: 3 (pid: 41233) of binary: /usr/bin/python3\n"
        "[2024-06-01 10:00:00,200] torch.distributed.elastic.multiprocessing.api: [WARNING] "
        "Sending process 41230 closing signal SIGTERM\n"
        "============================================================\n"
        "train.py FAILED\n"
        "------------------------------------------------------------\n"
        "Failures:\n"
        "  <NO_OTHER_FAILURES>\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  time      : 2024-06-01_10:00:00\n"
        "  host      : gpu-12.example.local\n"
        "  rank      : 11 (local_rank: 3)\n"
        "  exitcode  : -9 (pid: 41233)\n"
        "  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 41233\n"
        "============================================================\n",
        "crash",
        "undetermined",
        [11],
    ),
    "watchdog held up": (
        "[rank7]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID "
        "0(default_pg) Rank 7] ProcessGroupNCCL's watchdog got stuck for 480 seconds without "
        "making progress in monitoring enqueued collectives. This typically indicates a "
        "NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be "
        "triggered by another thread holding the GIL inside a CUDA api\n"
        "[rank2]:[E626 05:06:30.929096625 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=120049, OpType=_ALLGATHER_BASE, "
        "NumelIn=16384000, NumelOut=131072000, Timeout(ms)=1800000) ran for 1800065 milliseconds "
        "before timing out.\n"
        "[rank5]:[E626 05:14:36.393819762 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID "
        "0(default_pg) Rank 5] ProcessGroupNCCL's watchdog got stuck for 480 seconds without "
        "making progress in monitoring enqueued collectives.\n",
        "noncommunication_hang",
        "software_library",
        [5, 7],
    ),
    "one batch more": (
        "4 ranks. Uneven data: ranks get different numbers of batches; at the end of the epoch the job hangs.\n"
        "rank 0: finished epoch 3 after 1251 batches\n"
        "rank 1: finished epoch 3 after 1250 batches\n"
        "rank 2: finished epoch 3 after 1250 batches\n"
        "[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=100321, OpType=ALLREDUCE, NumelIn=25557032, NumelOut=25557032, "
        "Timeout(ms)=600000) ran for 600421 milliseconds before timing out.\n",
        "collective_mismatch",
        "application",
        [0],
    ),
    "slow port": (
        "NCCL all-reduce bandwidth dropped to a quarter on 2 of 16 nodes.\n"
        "node09: mlx5_2: port rate 100 Gb/sec (expected 400)\n"
        "node09: LinkDownedCounter: 12, SymbolErrorCounter: 4093\n",
        "communication_slow",
        "hardware_link",
        [],
    ),
    "hot device": (
        "Step time grew from 1.2 s to 2.6 s after a restart. One GPU is hot.\n"
        "gpu_temp_c: rank0 61 rank1 63 rank2 60 rank3 91\n"
        "sm_clock_mhz: rank0 1980 rank1 1980 rank2 1980 rank3 1155\n"
        "HW Thermal Slowdown : Active\n",
        "compute_slow",
        "hardware_gpu",
        [3],
    ),
    "uneven experts": (
        "Expert parallel training is slow, waiting in all_to_all. No rank is always the slowest.\n"
        "tokens per expert rank: rank0 8100 rank1 30900 rank2 7900 rank3 8200\n",
        "imbalance",
        "application",
        [],
    ),
    "a line for each rank": (
        "Mean times over 200 steps, 8 ranks:\n"
        "rank 0: forward 110.2 ms, data 3.1 ms\n"
        "rank 1: forward 110.6 ms, data 3.0 ms\n"
        "rank 2: forward 109.9 ms, data 3.2 ms\n"
        "rank 3: forward 189.0 ms, data 3.1 ms\n"
        "rank 4: forward 110.1 ms, data 3.1 ms\n",
        "compute_slow",
        "application",
        [3],
    ),
    "DCGM 3 on one line": (
        "Eight DCGM checks ran.\n"
        '{ "DCGM GPU Diagnostic": {"test_categories": '
        '[{"category":"Hardware","tests":[{"name":"GPU '
        'Memory","results":[{"gpu_id":"3","status":"Fail","warnings":"A DBE (double-bit error) '
        'was detected on GPU 3"}]}]}]}}\n',
        "crash",
        "hardware_gpu",
        [],
    ),
    "fabric manager": (
        "GPU 3 shows fabric manager not running; NCCL init fails\n"
        "[rank3]: torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL "
        "version 2.20.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\n"
        "Cuda failure 'system not yet initialized'\n",
        "startup_died",
        "configuration",
        [],
    ),
    "waiting for the loader": (
        "The job stopped at step 12000 with all GPUs at 100 %.\n"
        "rank 3: step 12000 entering backward\n"
        "rank 1: step 12000 entering backward\n"
        "rank 0: step 12000 entering backward\n"
        "rank 2: step 12000 waiting for batch from loader\n",
        "noncommunication_hang",
        "dataloader",
        [2],
    ),
    "node failure": (
        "slurmstepd: error: *** JOB 1234 ON r7i2n1 CANCELLED AT 2022-05-01T10:00:00 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
        "srun: error: Node failure on r7i2n3\n",
        "crash",
        "undetermined",
        [],
    ),
    "file not there": (
        "[rank4]: Traceback (most recent call last):\n"
        '[rank4]:   File "/app/train.py", line 210, in <module>\n'
        "[rank4]:     main()\n"
        '[rank4]:   File "/app/data.py", line 55, in __getitem__\n'
        "[rank4]:     with open(path) as f:\n"
        "[rank4]: FileNotFoundError: [Errno 2] No such file or directory: '/data/shard_0041.tar'\n"
        "[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600421 milliseconds before timing out.\n",
        "crash",
        "application",
        [4],
    ),
    "tokenizer on one rank": (
        "Tokenizer runs only on rank 0 and takes 40 minutes; others wait in barrier and time out after 30 min.\n"
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800001 "
        "milliseconds before timing out.\n"
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800100 "
        "milliseconds before timing out.\n"
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800049 "
        "milliseconds before timing out.\n",
        "noncommunication_hang",
        "dataloader",
        [0],
    ),
    "too many on one host": (
        "dataset loading: each rank 1.8 s when alone, 25 s when 8 ranks on the node run\n"
        "host cpu per step, 1 process: 3 ms\n"
        "host cpu per step, 8 processes: 44 ms\n",
        "compute_slow",
        "host_cpu",
        [],
    ),
    "ranks inside a group": (
        "[rank0]:[E101 10:00:00 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=200, OpType=ALLREDUCE, NumelIn=1048576, "
        "NumelOut=1048576, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
        "[rank1]:[E101 10:00:00 ProcessGroupNCCL.cpp:632] [PG ID 3 PG GUID "
        "17(TENSOR_MODEL_PARALLEL_GROUP) Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=900, OpType=_ALLGATHER_BASE, NumelIn=4096, NumelOut=8192, "
        "Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
        "[rank1]:[E101 10:00:00 ProcessGroupNCCL.cpp:2268] [PG ID 3 PG GUID "
        "17(TENSOR_MODEL_PARALLEL_GROUP) Rank 1]  failure detected by watchdog at work sequence "
        "id: 900 PG status: last enqueued work: 900, last completed work: 899\n"
        "[rank2]:[E101 10:00:00 ProcessGroupNCCL.cpp:2268] [PG ID 3 PG GUID "
        "17(TENSOR_MODEL_PARALLEL_GROUP) Rank 0] Received a dump signal due to a collective "
        "timeout from  rank 1 and we will try our best to dump the debug info. Last enqueued "
        "NCCL work: 899, last completed NCCL work: 899.\n",
        "noncommunication_hang",
        "undetermined",
        [2],
    ),
    "ended in order": (
        "INFO:root:Epoch 1 step 100 loss 2.1\n"
        "Lightning: `Trainer.fit` stopped: `max_epochs=10` reached.\n"
        "Testing DataLoader 0: 100%|██████████| 50/50 [00:10<00:00,  4.9it/s]\n"
        "[rank: 1] Received SIGTERM: 15\n",
        "healthy",
        "undetermined",
        [],
    ),
    "memory of a loader worker": (
        "Host memory keeps growing. After 3 hours:\n"
        "[Mon Nov 11 10:10:10 2024] "
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=abc,task=python,pid=4242\n"
        "[Mon Nov 11 10:10:10 2024] Memory cgroup out of memory: Killed process 4242 (pt_data_worker) total-vm:1kB\n",
        "crash",
        "dataloader",
        [],
    ),
    "throttled by its group": (
        "Job runs 3x slower on node gpu-17 after maintenance. CPU only shows one NUMA node used.\n"
        "gpu-17: nr_throttled 48211\n"
        "gpu-16: nr_throttled 0\n",
        "compute_slow",
        "host_cpu",
        [],
    ),
    "link not ready": (
        "n5: ib0: link is not ready\n"
        "[rank40]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 40.\n"
        "n5:1:1 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.9<41234> with status=12 "
        "opcode=0 len=0 vendor err 129 (Recv) localGid fe80:: remoteGids fe80:: hca mlx5_0\n",
        "communication_hang",
        "hardware_link",
        [],
    ),
    "assertion on the device": (
        "[rank2]: RuntimeError: CUDA error: device-side assert triggered\n"
        "../aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [10,0,0], "
        "thread: [31,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n",
        "crash",
        "application",
        [2],
    ),
    "damaged checkpoint": (
        "ERROR: failed to load checkpoint: safetensors_rust.SafetensorError: Error while "
        "deserializing header: InvalidHeaderDeserialization\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/app/load.py", line 3, in load\n'
        "[rank0]: safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization\n",
        "crash",
        "storage",
        [0],
    ),
    "stacks on one line": (
        "Two stacks groups (py-spy), DeepSpeed ZeRO-3, hang in the first step after resume.\n"
        "\n"
        "rank 0-6: all_gather_into_tensor (torch/distributed/distributed_c10d.py:3900) <- "
        "fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:300)\n"
        "rank 7: load (torch/serialization.py:1200) <- load_checkpoint (deepspeed/runtime/engine.py:2700)\n",
        "noncommunication_hang",
        "storage",
        [7],
    ),
    "all steps alike, one computes": (
        "Mixed GPUs. Slow steps.\n"
        "step_time_ms: rank0 812.0 rank1 811.8 rank2 812.1 rank3 812.0\n"
        "compute_ms: rank0 300.0 rank1 301.2 rank2 790.4 rank3 299.5\n",
        "compute_slow",
        "application",
        [2],
    ),
    "bars that ended": (
        "A healthy log with resume:\n"
        "Loading checkpoint shards: 100%|██████████| 15/15 [00:30<00:00,  2.0s/it]\n"
        "iteration 10/ 100 | loss 2.0\n"
        "iteration 20/ 100 | loss 1.9\n"
        "successfully saved checkpoint at iteration 20\n",
        "healthy",
        "undetermined",
        [],
    ),
    "NVLink": (
        "2026-01-10 02:00:00 gpu-a3-01 [rank8]: step 500 loss 1.9\n"
        "2026-01-10 02:10:00 [rank9]:[E110 02:10:00.1 ProcessGroupNCCL.cpp:684] [Rank 9] Some "
        "NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
        "kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        "2026-01-10 02:10:00 [rank9]:[E110 02:10:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5012, OpType=ALLREDUCE, "
        "NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600005 milliseconds before "
        "timing out.\n"
        "2026-01-10 02:09:00 gpu-a3-02 kernel: nvidia-nvlink: Nvlink error status: fatal, link 7\n",
        "communication_hang",
        "hardware_link",
        [],
    ),
    "a worker of Ray": (
        "Ray train failure\n"
        "(RayTrainWorker pid=4021, ip=10.4.1.9) torch.cuda.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 512.00 MiB\n"
        "(RayTrainWorker pid=4022, ip=10.4.1.9) RuntimeError: NCCL communicator was aborted on rank 1.\n",
        "crash",
        "application",
        [],
    ),
    "a save on a full file system": (
        "rank 0 in save_checkpoint, ranks 1-7 in barrier for 25 min; /lustre at 100 % usage\n"
        "[rank3]:[E ProcessGroupNCCL.cpp:563] [Rank 3] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=90211, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=1800000) ran for 1800002 milliseconds before timing out.\n",
        "noncommunication_hang",
        "storage",
        [0],
    ),
    "one call behind": (
        "RCCL on MI250, 8 GPUs\n"
        "[2] INFO AllReduce: opCount 10 count 4096 datatype 7 op 0 root 0 [nranks=4] stream S0\n"
        "[0] INFO AllReduce: opCount 10 count 4096 datatype 7 op 0 root 0 [nranks=4] stream S0\n"
        "[1] INFO AllReduce: opCount 10 count 4096 datatype 7 op 0 root 0 [nranks=4] stream S0\n"
        "[3] INFO AllReduce: opCount f count 4096 datatype 7 op 0 root 0 [nranks=4] stream S0\n",
        "noncommunication_hang",
        "undetermined",
        [3],
    ),
    "three captures": (
        "Six captures. Each time all ranks wait in all_reduce; node1 behind in one, node2 behind "
        "in one, node1 behind in one.\n",
        "undetermined",
        "undetermined",
        [],
    ),
    "a bus that is slow": (
        "GPU health gate: dcgmi diag -r 3\n"
        "+---------------------------+------------------------------------------------+\n"
        "| Diagnostic                | Result                                         |\n"
        "+===========================+================================================+\n"
        "| Persistence Mode          | Fail                                           |\n"
        "| Warning                   | Persistence mode for GPU 2 is disabled         |\n"
        "| Memory                    | Pass                                           |\n"
        "|                           | GPU0: Pass                                     |\n"
        "| PCIe                      | Fail - GPU: 2                                  |\n"
        "| Warning                   | GPU 2 PCIe bandwidth 3.1 GB/s below minimum 16 |\n"
        "+---------------------------+------------------------------------------------+\n",
        "communication_slow",
        "hardware_link",
        [],
    ),
    "rows to be replaced": (
        "Health check reports Xid but job fine:\n"
        "[  100.0] NVRM: Xid (PCI:0000:3b:00): 63, pid=0, Row Remapper: New row marked for "
        "remapping, reset gpu to activate.\n"
        "step 10 loss 2.0\n"
        "step 20 loss 1.9\n",
        "healthy",
        "undetermined",
        [],
    ),
    "fast network switched off": (
        "[0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
        "[0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
        "[0] NCCL INFO Using network Socket\n"
        "all-reduce busbw 1.1 GB/s on a 400 Gb/s InfiniBand cluster\n",
        "communication_slow",
        "configuration",
        [],
    ),
    "collector of garbage": (
        "py-spy on each of 4 ranks:\n"
        "\n"
        "Rank 0 (pid 100):\n"
        'Thread 100 (active): "MainThread"\n'
        "    _all_gather_base (torch/distributed/distributed_c10d.py:2900)\n"
        "    backward (train.py:50)\n"
        "    <module> (train.py:90)\n"
        "Rank 1 (pid 101):\n"
        'Thread 101 (active): "MainThread"\n'
        "    _all_gather_base (torch/distributed/distributed_c10d.py:2900)\n"
        "    backward (train.py:50)\n"
        "    <module> (train.py:90)\n"
        "Rank 2 (pid 102):\n"
        'Thread 102 (active+gil): "MainThread"\n'
        "    collect (gc_hook.py:3)\n"
        "    step (train.py:70)\n"
        "    <module> (train.py:90)\n"
        "Rank 3 (pid 103):\n"
        'Thread 103 (active): "MainThread"\n'
        "    _all_gather_base (torch/distributed/distributed_c10d.py:2900)\n"
        "    backward (train.py:50)\n"
        "    <module> (train.py:90)\n",
        "noncommunication_hang",
        "application",
        [2],
    ),
    "numbers that differ by one": (
        "[1,0]<stdout>:iteration 5 loss 1.0\n"
        "[1,1]<stderr>:[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=40, OpType=ALLREDUCE, TensorShape=[1], "
        "Timeout(ms)=1800000) ran for 1800530 milliseconds before timing out.\n"
        "[1,2]<stderr>:[E ProcessGroupNCCL.cpp:737] [Rank 2] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, TensorShape=[1], "
        "Timeout(ms)=1800000) ran for 1800530 milliseconds before timing out.\n"
        "[1,3]<stderr>:[E ProcessGroupNCCL.cpp:737] [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, TensorShape=[1], "
        "Timeout(ms)=1800000) ran for 1800530 milliseconds before timing out.\n",
        "noncommunication_hang",
        "undetermined",
        [1],
    ),
    "a known defect": (
        "NCCL 2.18.1 hang with CUDA graphs, known bug fixed in 2.18.3\n"
        "n0:1:1 [0] NCCL INFO NCCL version 2.18.1+cuda12.1\n"
        "n0:1:1 [0] NCCL WARN [Service thread] Accept failed Resource temporarily unavailable\n",
        "undetermined",
        "software_library",
        [],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story(name, tmp_path):
    text, kind, layer, who = STORIES[name]
    (finding,) = found_in(text, tmp_path)
    assert (finding.kind, finding.layer, sorted(ranks([finding]))) == (kind, layer, who)
    assert not set(who) & set(finding.victims)
