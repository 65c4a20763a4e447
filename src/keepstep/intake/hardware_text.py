"""Lines about the machine: kernel, driver, network interfaces, file systems, processors."""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["HARDWARE_PATTERNS"]

_NIC = (
    r"(?P<device>mlx\d_core [\w:.]+\d(?: \w+)?|(?:mlx\d_\w+|ib\d\w*|eth\d+|en[spo]\w+|bond\d+|hsn\d+|rdma\w+|roce\w*)"
    r"(?::\d+)?)"
)

_STRAGGLER = re.compile(r"\brank=(\d{1,6})\b")
_PLAIN = re.compile(r"(?<![\w=])\d{1,6}\b")


_NO_XID = re.compile(
    r"\bXids?\b(?:\s+(?:errors?|events?|messages?)(?:[^:=\n]{0,40}[:=])?)?\W{1,3}(?:no|none|0)\b(?![.:x])",
    re.IGNORECASE,
)


def _xid(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """XIDs are small numbers above 0; the PCI address of the device stands before or after."""
    return fields if 0 < int(fields["code"]) < 200 and not _NO_XID.search(text) else None


def _filled(_: str, fields: dict[str, str]) -> dict[str, str]:
    return {re.sub(r"_\d$", "", key): value for key, value in fields.items()}


def _stragglers(_: str, fields: dict[str, str]) -> dict[str, str] | None:
    """The ranks of `{StragglerId(rank=13, node='n1')}` or `[13, 45]`, separated by commas."""
    named = _STRAGGLER.findall(fields["list"]) or _PLAIN.findall(fields["list"])
    return {"about": ",".join(named)} if named else None


HARDWARE_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "xid",
        "xid",
        expression=r"\bXid\b[^\d\n]{0,12}(?:\(?PCI:? "
        r"?(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.\d)?)\)?)?[^\d\n]{0,20}(?P<code>\d{1,3})\b(?!:\d)"
        r"(?:.*?pid=['\"]?(?P<victim>\d+))?",
        refine=_xid,
        counted=True,
    ),
    pattern(
        "gpu_ecc",
        "ecc|double bit|double-bit|dbe",
        expression=r"uncorrectable ECC error|ECCUncorrectable|ECC_UNCORRECTABLE|uncorrectable (?:memory|SRAM"
        r"|DRAM|HBM)\w* error"
        r"|double[- ]bit (?:ECC )?error|\bDBE\b.{0,30}(?:detected|error|[1-9]\d*\b)",
        counted=True,
    ),
    pattern(
        "gpu_lost",
        "off the bus|gpu is lost|device handle|gpu lost|reset required|gpu reset|requires reset"
        "|devices unavailable|gsp",
        expression=r"fallen off the bus|GPU is lost|GPU lost|Unable to determine the device handle for (?:GPU"
        r"|gpu) ?(?P<device>[0-9a-fA-F:.]+)?"
        r"|GPU (?:reset required|requires reset)|GPU reset begin|GSP.{0,30}(?:timeout|RPC)",
        counted=True,
    ),
    pattern(
        "gpu_rows",
        "remap|retired pages|page retirement",
        expression=r"row remapping failure|Remapping Failure Occurred\s*: ?Yes|(?:Retired pages"
        r"|Pending page).{0,40}(?:exceed|limit)|failed to remap",
        counted=True,
    ),
    pattern(
        "gpu_amd",
        "amdgpu|hw exception|rocm",
        expression=r"amdgpu.{0,60}(?:uncorrectable|RAS.{0,20}(?:fatal|poison)|ring \w+ timeout|GPU reset)"
        r"|HW Exception by GPU node",
        counted=True,
    ),
    pattern(
        "gpu_throttled",
        "slowdown|throttl|power brake|power cap",
        expression=r"(?P<what>(?:HW|SW)? ?Thermal Slowdown|HW (?:Slowdown|Power Brake)\w*|hw_(?:slowdown"
        r"|thermal_slowdown|power_brake\w*)|clocks?_?throttle\w*.{0,30}thermal)"
        r"\s*(?:[:=]\s*(?P<state>Active|Not Active|true|false|1|0)|.{0,30}(?P<state_2>detected|asserted|engaged))",
        refine=_filled,
    ),
    pattern(
        "nic_down",
        "link|carrier|port|state",
        expression=rf"{_NIC}[^\n]{{0,60}}?(?:link (?:is )?(?:not ready|down)|Link down|NO-CARRIER|lost carrier"
        r"|state (?:changed to|=|:|is) ?\"?(?:DOWN|1: ?DOWN)|port (?:\d+ )?(?:is )?(?:down"
        r"|inactive)|operstate\W+down)",
    ),
    pattern(
        "nic_up",
        "link|port",
        expression=rf"{_NIC}[^\n]{{0,60}}?(?:link (?:is )?up|Link up|becomes ready|state (?:changed to|="
        r"|:) ?\"?(?:ACTIVE|UP))",
    ),
    pattern(
        "nic_errors",
        "downed|symbolerror|symbol_error|link_error_recovery|rcv_errors|excessive_buffer|rx_crc",
        expression=r"(?P<counter>LinkDowned\w*|link_downed\w*|SymbolError\w*|symbol_error\w*"
        r"|link_error_recovery\w*|LinkErrorRecovery\w*|port_rcv_errors\w*|PortRcvErrors\w*"
        r"|rx_crc_errors\w*)"
        r"\W{1,4}(?:0x)?(?P<value>\d+)",
        refine=lambda _, fields: fields if int(fields["value"]) > 0 else None,
    ),
    pattern(
        "nic_rate",
        "expected|instead of|should be|wanted",
        expression=rf"{_NIC}?[^\n]{{0,60}}rate\W+(?P<rate>\d+)[^\d\n]{{0,20}}(?:expected|instead of|should be"
        r"|want(?:ed)?)\W+(?P<wanted>\d+)",
        refine=lambda _, fields: fields if int(fields["rate"]) < int(fields["wanted"]) else None,
    ),
    pattern(
        "storage_error",
        "stale file|errno 5]|input/output error|quota|errno 122|i/o error|remote i/o"
        "|read-only file system|no space left|failed writing|slowdown",
        expression=r"Stale (?:NFS )?file handle|\[Errno (?:5|28|30|116|121|122)\][^\n]*|Input/output error"
        r"|Disk quota exceeded|I/O error, dev (?P<device>\w+)"
        r"|Remote I/O error|Read-only file system|No space left on device"
        r"|PytorchStreamWriter failed writing|SlowDown: Please reduce",
        refine=lambda text, fields: None if "/dev/shm" in text else fields,
    ),
    pattern(
        "storage_server",
        "nfs|lustre|gpfs|mmfs|beegfs|ceph|weka",
        expression=r"nfs: server (?P<server>\S+) not responding|Lustre(?:Error)?: [^\n]*(?:not responding"
        r"|timed out|evicted|Connection to|lost|unavailable|ENOTCONN|-\d{2,3}\b)"
        r"|(?:GPFS|mmfsd?|gpfs)\W[^\n]*(?:unmount|expel|not responding|stale|timed out|failed"
        r"|waiters?)|beegfs[^\n]*(?:timed out|not reachable|Communication error)"
        r"|(?:libceph|ceph)[^\n]*(?:socket closed|slow|timed out)|weka[^\n]*(?:timed out|hung|not responding)",
    ),
    pattern(
        "storage_back",
        "nfs|connection restored",
        expression=r"nfs: server (?P<server>\S+) OK\b|Lustre: [^\n]*Connection restored",
    ),
    pattern(
        "task_blocked",
        "blocked for more than",
        expression=r"task (?P<command>\S+?):(?P<victim>\d+) blocked for more than (?P<seconds>\d+) seconds",
    ),
    pattern(
        "kernel_wait",
        "nfs_|rpc_wait|cl_lock|cl_sync|ll_|io_schedule|ldlm_|gpfs",
        expression=r"\b(?P<where>nfs4?_\w*wait\w*|rpc_wait_bit_killable|cl_sync_io_wait|ldlm_\w+wait\w*"
        r"|ll_\w*(?:read|write|fsync|open)\w*|io_schedule\w*|cxiWaitEventWait)",
    ),
    pattern(
        "oom_killed",
        "out of memory: kill|oom-kill|oom_kill|oomkilled|out of memory",
        expression=r"(?:Memory cgroup )?Out of memory: Kill(?:ed)? process (?P<victim>\d+) \((?P<command>[^)]*)\)"
        r"|oom[-_]kill(?:er|ed| event|:|.{0,20}constraint)|OOMKilled"
        r"|Memory cgroup out of memory|Detected \d+ oom[-_]kill"
        r"|(?:error: (?P<host>[\w.-]+): )?task\w* (?P<rank>\d+): Out Of Memory",
        counted=True,
    ),
    pattern(
        "machine_check",
        "machine check|hardware error|edac",
        expression=r"(?:mce|Machine Check)[^\n]{0,60}|\[Hardware Error\][^\n]{0,60}|EDAC \w+[^\n]{0,40}\bUE\b",
        counted=True,
    ),
    pattern(
        "cpu_lockup",
        "lockup|rcu",
        expression=r"(?:soft|hard) lockup[^\n]{0,40}|rcu\w*[^\n]{0,30}(?:stall|self-detected)",
        counted=True,
    ),
    pattern(
        "cpu_throttled",
        "throttl",
        expression=r"cpu clock throttled|(?:nr_throttled|cpu throttl\w+)\W+(?P<value>\d+)",
        refine=lambda _, fields: None if fields.get("value") == "0" else fields,
    ),
    pattern(
        "cpu_bound",
        "affinity|cpus_allowed|cpu-bind|cpu_bind",
        expression=r"(?:current affinity list|Cpus_allowed_list|cpu affinity(?: list)?)\W+(?P<list>[\d,-]+)\b"
        r"|(?P<missing>(?:no|without|missing) (?:cpu )?(?:affinity|cpu[-_]bind\w*))",
    ),
    pattern(
        "straggler_named",
        "straggler detection",
        expression=r"STRAGGLER DETECTION[^\n]*?GPUs? [^\n]*?Affected ranks: (?P<list>[\[{][^\]}]*[\]}])",
        refine=_stragglers,
    ),
    pattern(
        "node_failed",
        "node failure|node_fail|nodenotready|node is down|not responding|node has died|missed too many heartbeats",
        expression=r"because its node has died(?:[^\n]*?\bip: (?P<host_3>[\w.:-]+))?|worker died due to node failure"
        r"|ip(?: address)? (?P<host_4>[\d.]+)[^\n]*? missed too many heartbeats"
        r"|Node failure on (?P<host_2>[\w.-]+)|DUE TO NODE FAILURE|NODE_FAIL\b|NodeNotReady"
        r"|node (?P<host>[\w.-]+) (?:is )?(?:DOWN"
        r"|not responding)",
        refine=_filled,
    ),
)
