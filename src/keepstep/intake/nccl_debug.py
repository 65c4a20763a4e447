"""Lines of NCCL_DEBUG (and of libraries with the same lines, such as RCCL): start, networks, events, calls."""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["NCCL_PATTERNS"]

_CALLS = "AllReduce|AllGather|AllGatherV|ReduceScatter|Broadcast|Bcast|Reduce|AllToAll|Send|Recv|Gather|Scatter"


def _event(_: str, fields: dict[str, str]) -> dict[str, str]:
    event = fields.get("event", "").lower().replace("_", " ").strip(" .")
    return fields | {"event": re.sub(r"\berr\b", "error", event.removeprefix("ibv event "))}


_STATE = re.compile(r"Init (START|COMPLETE)", re.IGNORECASE)
_BUS = re.compile(r"busId (\w+)")
_COMM = re.compile(r"commId (0x[0-9a-f]+)")


def _init(_: str, fields: dict[str, str]) -> dict[str, str] | None:
    """`state`, `bus` and `id` of a communicator; a line without a state is none."""
    rest = fields.pop("rest")
    found = {"state": _STATE.search(rest), "bus": _BUS.search(rest), "id": _COMM.search(rest)}
    if found["state"] is None:
        return None
    return fields | {name: match[1] for name, match in found.items() if match is not None}


NCCL_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "process_done",
        "destroy complete",
        expression=r"comm 0x[0-9a-f]+ rank (?P<rank>\d+) nranks (?P<nranks>\d+).{0,100}- Destroy COMPLETE",
    ),
    pattern(
        "nccl_init",
        "init start|init complete|commid",
        expression=r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n[Rr]anks (?P<nranks>\d+)(?P<rest>.{0,300})",
        refine=_init,
    ),
    pattern(
        "nccl_version", "nccl version", expression=r"NCCL version (?P<version>\d+\.\d+(?:\.\d+)?(?:\+cuda[\d.]+)?)"
    ),
    pattern(
        "nccl_network",
        "using network|net/ib :|net/socket :|net/ofi ",
        expression=r"Using network (?P<network>[\w/ -]+?)\s*$|(?P<network_2>NET/(?:IB|Socket|OFI))\s*:?\s*Using ",
        refine=lambda _, fields: {"network": fields.get("network") or fields.get("network_2", "")},
    ),
    pattern("nccl_no_ib", "no device found|ncll_ib_disable set", expression=r"NET/IB : No device found"),
    pattern(
        "nccl_transport_off",
        "p2p is disabled|shm is disabled|p2p_disable set|shm_disable set|ib_disable set|p2p_level set",
        expression=r"(?P<what>P2P|SHM|IB)[\w ]*(?:is disabled|_DISABLE set by environment to (?P<value>[1-9]))",
    ),
    pattern(
        "ib_event",
        "async event|async fatal event",
        expression=r"NET/IB\w*\s*: ?(?:(?P<device>[a-z]\w*(?::\d+)?) )?(?:Got async (?:error )?event"
        r"|async fatal event on \w+(?: \(0x[0-9a-f]+\))?)\s*: ?(?P<event>[\w /-]+)",
        refine=_event,
    ),
    pattern(
        "ib_completion",
        "got completion",
        expression=r"Got completion (?:from peer (?P<peer>[^\s<]+)(?:<\d+>)?)?.{0,40}?"
        r"with (?:error|status=?) ?=?(?:IBV_\w+\()?(?P<status>\d+)"
        r"(?:.*?vendor[ _]err[ =](?P<vendor>\d+))?(?:.*? hca (?P<device>\w+))?",
    ),
    pattern(
        "nccl_call",
        "opcount",
        expression=rf"(?P<op>{_CALLS})\s*: ?opCount (?P<count>[0-9a-f]+).*?\bcount (?P<numel>\d+) datatype "
        r"(?P<dtype>\d+) op (?P<reduction>\d+) root (?P<root>\d+)"
        r"(?: comm (?P<comm>0x[0-9a-f]+))?(?: \[nranks=(?P<nranks>\d+)\])?(?: stream (?P<stream>\w+))?",
    ),
    pattern(
        "nccl_duplicate_gpu",
        "duplicate gpu",
        expression=r"Duplicate GPU detected : rank (?P<first>\d+) and rank (?P<second>\d+)",
    ),
    pattern(
        "nccl_mismatch",
        "mismatched collective|collective mismatch",
        expression=r"(?:(?P<sure>Mismatched collective detected)|collective mismatch).*?(?:around|on) rank "
        r"(?P<about>\d+)",
    ),
    pattern(
        "nccl_no_interface",
        "socket interface|no interface found|no usable|network interface|unable to find address",
        expression=r"no (?:usable )?(?:socket|network|eth\w*) interface|No interface found in the same subnet"
        r"|Unable to find address for",
    ),
    pattern(
        "nccl_connect_failed",
        "connect to|connect from|socketstartconnect|bootstrap",
        expression=r"(?:NCCL WARN .*?|Call to )connect (?:to |from )?(?P<peer>[\w.:]+?)?(?:<\d+>)? ?(?:failed"
        r"|returned|timed out).*|"
        r"(?:socket\w*|bootstrap\w*|Connect to) ?:? ?(?P<peer_2>\d+\.\d+\.\d+\.\d+)<\d+> failed.*",
        refine=lambda _, fields: {"peer": fields.get("peer") or fields.get("peer_2", "")},
    ),
    pattern("gloo_mesh", "connectfullmesh", expression=r"connectFullMesh failed"),
    pattern(
        "nccl_version_differs",
        "version mismatch|mismatched nccl|incompatible nccl|different nccl|versions of nccl|mismatch in nccl",
        expression=r"NCCL.{0,60}(?:version mismatch|mismatch\w*|incompatible|different).{0,60}|(?:mismatch\w*"
        r"|different|incompatible) (?:versions of )?NCCL.*",
    ),
    pattern(
        "nccl_memlock",
        "ibv_|memlock",
        expression=r"(?P<call>ibv_(?:reg_mr\w*|create_cq|create_qp"
        r"|alloc_pd)) failed(?: with error)?:? ?(?P<why>Cannot allocate memory|.*)|RLIMIT_MEMLOCK"
        r"|max locked memory",
    ),
    pattern(
        "ib_connect_failed",
        "ibv_modify_qp",
        expression=r"ibv_modify_qp failed with (?:error:? ?)?(?:\d+ )?(?P<why>[\w ]+)",
    ),
    pattern(
        "nccl_shm_full",
        "/dev/shm",
        expression=r"(?:/dev/shm/nccl\S*.*?(?:No space left|failed)|Error while creating shared memory segment).*",
    ),
    pattern(
        "nccl_internal",
        "internal error|please report",
        expression=r"(?:NCCL.*)?internal error.{0,40}please report this issue|NCCL WARN .*[Ii]nternal error",
    ),
    pattern(
        "nvlink_error",
        "nvlink",
        expression=r"NVLink.{0,60}?(?:fatal|error|down|inactive|failure|lane)",
        counted=True,
    ),
)
