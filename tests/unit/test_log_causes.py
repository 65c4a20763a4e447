"""Lines that name a cause themselves, in the wordings of many tools, and who they speak of."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, named, timeout

CAUSES = {
    "ecc with host": (
        "node17: RuntimeError: CUDA error: uncorrectable ECC error encountered\nnode17: terminate "
        "called after throwing\n",
        "hardware_gpu",
        [[{"node": "node17"}]],
    ),
    "ecc with rank": (
        "[rank5]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
        + timeout(0, 7)
        + timeout(1, 7),
        "hardware_gpu",
        [[{"rank": 5}]],
    ),
    "xid 79": (
        "Nov 12 03:14:15 gpu-node-07 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', "
        "name=<unknown>, GPU has fallen off the bus.\n",
        "hardware_gpu",
        [[{"node": "gpu-node-07", "device": "0000:3b:00"}]],
    ),
    "xid 94 beside a time-out": (
        timeout(0, 100)
        + "[12345.678] NVRM: Xid (PCI:0000:86:00): 94, pid=4021, Contained: SM (0x1). RST: No, D-RST: No\n",
        "hardware_gpu",
        [],
    ),
    "gpu lost": ("Unable to determine the device handle for GPU0000:C1:00.0: Unknown Error\n", "hardware_gpu", []),
    "nvlink xid": (
        "Oct 1 01:02:03 h100-3 kernel: NVRM: Xid (PCI:0000:1b:00): 74, pid=123, NVLink: fatal error "
        "detected on link 5\n",
        "hardware_link",
        [[{"node": "h100-3", "device": "0000:1b:00"}]],
    ),
    "port error with device": (
        "node201:127799:127863 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n"
        "node202:7799:7863 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n",
        "hardware_link",
        [[{"node": "node201", "device": "mlx5_3:1"}], [{"node": "node202", "device": "mlx5_3:1"}]],
    ),
    "fatal event": (
        "h100-28:238:1219 [0] transport/net_ib.cc:180 NCCL WARN NET/IB : mlx5_ib0:1 async fatal "
        "event on QP (0x7f69): local access "
        "violation work queue error\n",
        "hardware_link",
        [[{"node": "h100-28", "device": "mlx5_ib0:1"}]],
    ),
    "old port error": (
        "2019-06-02T16:13:44.884Z: [1,12]<stdout>:worker-000057:815:864 [0] transport/net_ib.cu:80 "
        "NCCL WARN NET/IB : Got async "
        "event : local catastrophic error\n",
        "hardware_link",
        [[{"rank": 12, "node": "worker-000057"}]],
    ),
    "kernel link down": (
        "Nov 02 11:00:01 c3-n12 kernel: mlx5_core 0000:9a:00.0 ib2: Link down\n" + timeout(9, 88),
        "hardware_link",
        [[{"node": "c3-n12", "device": "mlx5_core 0000:9a:00.0 ib2"}]],
    ),
    "no space": (
        "[rank0]: OSError: [Errno 28] No space left on device: '/scratch/ckpt/step_1000.pt'\n",
        "storage",
        [[{"rank": 0}]],
    ),
    "stale handle": ("[rank3]: OSError: [Errno 116] Stale file handle\n" + timeout(0, 4), "storage", [[{"rank": 3}]]),
    "nfs": (
        "Nov 11 10:10:10 n7 kernel: nfs: server fs01 not responding, still trying\n",
        "storage",
        [[{"node": "n7"}]],
    ),
    "lustre": (
        "Nov 11 10:10:10 n9 kernel: LustreError: 11-0: scratch-OST0012-osc: operation ost_read to "
        "node 10.1.1.1@o2ib failed: rc = -107\n",
        "storage",
        [[{"node": "n9"}]],
    ),
    "quota": ("[rank0]: OSError: [Errno 122] Disk quota exceeded\n", "storage", [[{"rank": 0}]]),
    "writer": (
        "[rank2]: RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter "
        "failed writing file data/17: file write failed\n",
        "storage",
        [[{"rank": 2}]],
    ),
    "oom killer": (
        "Nov 11 10:10:10 n4 kernel: Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:1kB\n",
        "host_cpu",
        [[{"node": "n4"}]],
    ),
    "oom of a step": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: n05: task 12: Out Of Memory\n",
        "host_cpu",
        [[{"rank": 12, "node": "n05"}]],
    ),
    "soft lockup": (
        "Nov 11 10:10:10 n4 kernel: watchdog: BUG: soft lockup - CPU#23 stuck for 22s! [python3:4242]\n",
        "host_cpu",
        [[{"node": "n4"}]],
    ),
    "loader worker": (
        "[rank6]: RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.\n" + timeout(1, 5),
        "dataloader",
        [[{"rank": 6}]],
    ),
    "loader worker exited": (
        "[rank1]: RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly\n",
        "dataloader",
        [[{"rank": 1}]],
    ),
    "shared memory": (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        "RuntimeError: DataLoader worker (pid 2873) is killed by signal: Bus error.\n",
        "configuration",
        [],
    ),
    "nccl shared memory": (
        "a1:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-LnPbFp to 33030532 bytes\n"
        "a1:1:2 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-LnPbFp (size "
        "33030528), No space left on device\n",
        "configuration",
        [[{"node": "a1"}]],
    ),
    "duplicate gpu": (
        "c1:9:9 [0] init.cc:795 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, invalid usage\n",
        "configuration",
        [[{"rank": 0}, {"rank": 1}]],
    ),
    "no interface": (
        "n1:5:5 [0] NCCL WARN Bootstrap : no socket interface found\n",
        "configuration",
        [[{"node": "n1"}]],
    ),
    "memlock": (
        "n3:5:5 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n",
        "configuration",
        [[{"node": "n3"}]],
    ),
    "port in use": (
        "RuntimeError: The server socket has failed to listen on any local network address. The "
        "server socket has failed to bind to "
        "[::]:29500 (errno: 98 - Address already in use).\n",
        "configuration",
        [],
    ),
    "name": ("socket.gaierror: [Errno -3] Temporary failure in name resolution\n", "configuration", []),
    "ordinal": ("[rank7]: RuntimeError: CUDA error: invalid device ordinal\n", "configuration", [[{"rank": 7}]]),
    "files": ("[rank2]: OSError: [Errno 24] Too many open files\n", "configuration", [[{"rank": 2}]]),
    "symbol": (
        "ImportError: /opt/lib/libfoo.so: undefined symbol: ncclCommWindowRegister\n",
        "software_library",
        [],
    ),
    "nccl internal": (
        "n1:1:2 [3] NCCL WARN [Proxy Progress] internal error - please report this issue to the NCCL developers\n",
        "software_library",
        [[{"node": "n1"}]],
    ),
    "program error": (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/app/train.py", line 88, in '
        'step\n[rank3]:     x = batch["y"]\n'
        "[rank3]: KeyError: 'y'\n" + "".join(timeout(r, 17) for r in (0, 1, 2)),
        "application",
        [[{"rank": 3}]],
    ),
    "out of GPU memory": (
        (
            "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has "
            "a total capacity of 79.10 GiB\n"
        )
        + "".join(timeout(r, 17) for r in (0, 1, 3)),
        "application",
        [[{"rank": 2}]],
    ),
    "models differ": (
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 240 params, while "
        "rank 1 has inconsistent 0 params.\n",
        "application",
        [[{"rank": 0}, {"rank": 1}]],
    ),
    "unused parameters": (
        "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before "
        "starting a new one.\n",
        "application",
        [[{"rank": 1}]],
    ),
    "socket where others have a fast network": (
        "".join(f"n{i}:1:2 [0] NCCL INFO Using network {'Socket' if i == 3 else 'IB'}\n" for i in range(4)),
        "configuration",
        [[{"node": "n3"}]],
    ),
    "throttled": (
        "iteration 10/100 loss 2.0\n[rank4]: nvidia-smi: HW Thermal Slowdown : Active\n",
        "hardware_gpu",
        [[{"rank": 4}]],
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_that_a_line_names(name, tmp_path):
    text, layer, who = CAUSES[name]
    findings = found_in(text, tmp_path)
    assert {finding.layer for finding in findings} == {layer}
    assert named(findings) == who
