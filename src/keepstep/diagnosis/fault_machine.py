"""Lines about machines and what they mean: devices, links, file systems, hosts.

XID numbers are NVIDIA's catalogue; those that programs cause are told apart from those of hardware.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.diagnosis.fault_meaning import FaultLine, field_says
from keepstep.records.evidence import LogEvent

__all__ = ["MACHINE_LINES"]

_PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 69, 109})
_WARNING_XIDS = frozenset({63, 92, 93})
_NVLINK_XIDS = frozenset({74, 137, *range(144, 151)})
_BAD_IB = r"port err|port down|fatal|catastrophic|local access|device (?:fatal|removal)|lid change|path"
_EXCLUDE = "exclude the node, keep the GPU's health record (nvidia-smi -q, dmesg), drain before the next allocation"
_FABRIC = "port counters and cable of the device named first (ibqueryerrors, ethtool -S), switch log of its port"


def _in(codes: frozenset[int]) -> Callable[[LogEvent], bool]:
    return lambda event: int(event.fields.get("code") or 0) in codes


MACHINE_LINES: tuple[FaultLine, ...] = (
    FaultLine(
        "gpu_ecc",
        "hard",
        "crash",
        "hardware_gpu",
        0.95,
        "memory of a GPU has an error that cannot be corrected",
        _EXCLUDE,
    ),
    FaultLine("gpu_lost", "hard", "crash", "hardware_gpu", 0.95, "a GPU does not answer any more", _EXCLUDE),
    FaultLine("gpu_rows", "hard", "crash", "hardware_gpu", 0.9, "a GPU could not replace bad memory rows", _EXCLUDE),
    FaultLine("gpu_amd", "hard", "crash", "hardware_gpu", 0.85, "the driver reports a fault of a GPU", _EXCLUDE),
    FaultLine("xid", "hard", "crash", "hardware_link", 0.9, "NVLink of a GPU failed", _EXCLUDE, _in(_NVLINK_XIDS)),
    FaultLine(
        "xid",
        "cause",
        "crash",
        "application",
        0.55,
        "the driver stopped a channel after a fault that programs usually cause",
        "run again under compute-sanitizer; if it follows the GPU and not the program, suspect the GPU",
        _in(_PROGRAM_XIDS),
    ),
    FaultLine(
        "xid",
        "symptom",
        "undetermined",
        "hardware_gpu",
        0.3,
        "a GPU reports a condition that is only a warning",
        "watch this GPU; rows are replaced at its next reset",
        _in(_WARNING_XIDS),
    ),
    FaultLine("xid", "hard", "crash", "hardware_gpu", 0.9, "the driver reports a fault of a GPU", _EXCLUDE),
    FaultLine(
        "nvlink_error",
        "hard",
        "communication_hang",
        "hardware_link",
        0.75,
        "NVLink reports an error",
        "nvidia-smi nvlink -e on the node; nccl-tests inside the node",
    ),
    FaultLine(
        "gpu_throttled",
        "cause",
        "compute_slow",
        "hardware_gpu",
        0.8,
        "a GPU slows down to protect itself",
        "temperature, power and fans of this node; exclude it until it stays at full clock",
        field_says("state", r"^(?:active|true|1|detected|asserted|engaged)$"),
    ),
    FaultLine(
        "ib_event",
        "hard",
        "communication_hang",
        "hardware_link",
        0.9,
        "a network port reports errors",
        _FABRIC,
        field_says("event", _BAD_IB),
    ),
    FaultLine(
        "nic_down",
        "hard",
        "communication_slow",
        "hardware_link",
        0.75,
        "a network interface of the node has no link",
        _FABRIC,
        field_says("source", "interfaces"),
    ),
    FaultLine("nic_down", "hard", "communication_hang", "hardware_link", 0.9, "a network interface went down", _FABRIC),
    FaultLine(
        "nic_rate",
        "hard",
        "communication_slow",
        "hardware_link",
        0.85,
        "a network port runs slower than its peers, or than its adapter is said to",
        _FABRIC,
    ),
    FaultLine(
        "nic_errors", "cause", "communication_slow", "hardware_link", 0.6, "a network port counts errors", _FABRIC
    ),
    FaultLine(
        "machine_check",
        "hard",
        "crash",
        "host_cpu",
        0.8,
        "the processor or memory of a host reports an error",
        "exclude the node; memory test",
    ),
    FaultLine(
        "node_failed",
        "hard",
        "crash",
        "undetermined",
        0.7,
        "the scheduler lost a node",
        "the node's console and dmesg; exclude it until they are read",
    ),
    FaultLine(
        "storage_server",
        "hard",
        "noncommunication_hang",
        "storage",
        0.85,
        "a file server does not answer",
        "state of the file system at that time; dmesg of the clients",
    ),
    FaultLine(
        "storage_error",
        "cause",
        "crash",
        "storage",
        0.85,
        "a file system refused to read or write",
        "free space, quota and state of the file system named",
    ),
    FaultLine(
        "task_blocked",
        "cause",
        "noncommunication_hang",
        "storage",
        0.6,
        "the kernel reports a process that waits for input or output",
        "the kernel stack under the message: which file system?",
    ),
    FaultLine(
        "kernel_wait",
        "cause",
        "noncommunication_hang",
        "storage",
        0.6,
        "a process waits inside the kernel for a file system",
        "which file, on which server",
    ),
    FaultLine(
        "oom_killed",
        "hard",
        "crash",
        "dataloader",
        0.85,
        "the host ran out of memory and the kernel ended a worker of the data loader",
        "number of loader workers and what each of them keeps; memory of the job against its limit",
        field_says("command", r"pt_data_worker|data_?loader"),
    ),
    FaultLine(
        "file_damaged",
        "cause",
        "crash",
        "storage",
        0.75,
        "a file that was to be loaded is damaged or cut off",
        "size and hash of the file against its source; was the writer cut off?",
    ),
    FaultLine(
        "oom_killed",
        "hard",
        "crash",
        "host_cpu",
        0.85,
        "the host ran out of memory and the kernel ended a process",
        "memory of the job against its limit; number of loader workers; what rank loads whole checkpoints",
    ),
    FaultLine(
        "cpu_lockup",
        "hard",
        "noncommunication_hang",
        "host_cpu",
        0.75,
        "a processor of a host stopped scheduling",
        "dmesg of the node; exclude it",
    ),
    FaultLine(
        "cpu_throttled",
        "cause",
        "compute_slow",
        "host_cpu",
        0.65,
        "processes of a host are throttled",
        "CPU limit of the cgroup, temperature, affinity",
    ),
)
