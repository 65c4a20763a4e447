"""NCCL as a `CommLibrary`: the library that torch has loaded, called through ctypes. NOT RUN ON GPUs.

Signatures are those of `nccl.h` (shrink: 2.27.3, revoke: 2.28.7, grow: 2.29.2). Communicators do not block: a member
that is lost while one is made holds nobody up.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from keepstep.errors import EnvironmentProblem, TransportError
from keepstep.training.comm_library import CommState, Step
from keepstep.training.plane import Element, Reduction

__all__ = ["NcclLibrary"]

_NAMES = ("libnccl.so.2", "libnccl.so")
_SUCCESS, _IN_PROGRESS = 0, 7
_SHRINK_DEFAULT, _SHRINK_ABORT, _REVOKE_DEFAULT = 0, 1, 0
_UNDEFINED = -(2**31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
_POLL_S = 0.0005

_TYPES = {
    Element.INT8: 0,
    Element.UINT8: 1,
    Element.INT32: 2,
    Element.UINT32: 3,
    Element.INT64: 4,
    Element.UINT64: 5,
    Element.FLOAT16: 6,
    Element.FLOAT32: 7,
    Element.FLOAT64: 8,
    Element.BFLOAT16: 9,
}
_OPERATIONS = {Reduction.SUM: 0, Reduction.PRODUCT: 1, Reduction.MAX: 2, Reduction.MIN: 3, Reduction.AVG: 4}


class _UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class _Config(ctypes.Structure):
    """`ncclConfig_t` as of 2.17; newer libraries take the defaults for what came later."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


def _config() -> _Config:
    """Everything by default, but nothing blocks."""
    rest = (_UNDEFINED, _UNDEFINED, _UNDEFINED, None, _UNDEFINED)
    return _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, *rest)


_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT, _ID = ctypes.POINTER(_P), ctypes.POINTER(_UniqueId)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_I),),
    "ncclGetUniqueId": (_ID,),
    "ncclCommInitRankConfig": (_OUT, _I, _UniqueId, _I, ctypes.POINTER(_Config)),
    "ncclCommAbort": (_P,),
    "ncclCommGetAsyncError": (_P, ctypes.POINTER(_I)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclReduce": (_P, _P, _Z, _I, _I, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclAllGather": (_P, _P, _Z, _I, _P, _P),
    "ncclReduceScatter": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclSend": (_P, _Z, _I, _I, _P, _P),
    "ncclRecv": (_P, _Z, _I, _I, _P, _P),
}
_LATER: dict[str, tuple[Any, ...]] = {
    "ncclCommShrink": (_P, ctypes.POINTER(_I), _I, _OUT, ctypes.POINTER(_Config), _I),
    "ncclCommRevoke": (_P, _I),
    "ncclCommGetUniqueId": (_P, _ID),
    "ncclCommGrow": (_P, _I, _ID, _I, _OUT, ctypes.POINTER(_Config)),
}


def _load() -> ctypes.CDLL:
    for name in _NAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise EnvironmentProblem("NCCL is not here", remedy="tensors on devices go through host memory")


class NcclLibrary:
    """See `CommLibrary`. Raises EnvironmentProblem where NCCL cannot be loaded."""

    def __init__(self) -> None:
        self._c = _load()
        for name, arguments in {**_SIGNATURES, **_LATER}.items():
            if name in _SIGNATURES or hasattr(self._c, name):
                function = getattr(self._c, name)
                function.restype, function.argtypes = ctypes.c_int, arguments
        self._c.ncclGetErrorString.restype, self._c.ncclGetErrorString.argtypes = ctypes.c_char_p, (_I,)
        version = _I()
        self._check(self._c.ncclGetVersion(ctypes.byref(version)), "version")
        self._version = version.value

    @property
    def version(self) -> int:
        """As the library says; see `CommLibrary`."""
        return self._version

    def unique_id(self, parent: int | None) -> bytes:
        """See `CommLibrary`."""
        made = _UniqueId()
        if parent is None:
            self._check(self._c.ncclGetUniqueId(ctypes.byref(made)), "unique id")
        else:
            self._check(self._later("ncclCommGetUniqueId")(parent, ctypes.byref(made)), "unique id to grow")
        return bytes(made)

    def form(self, unique_id: bytes, *, size: int, rank: int) -> int:
        """See `CommLibrary`."""
        made, config = _P(), _config()
        identity = _UniqueId.from_buffer_copy(unique_id)
        self._check(
            self._c.ncclCommInitRankConfig(ctypes.byref(made), size, identity, rank, ctypes.byref(config)), "init"
        )
        return made.value or 0

    def shrink(self, parent: int, *, excluded: Sequence[int], abort: bool) -> int:
        """See `CommLibrary`."""
        made, config = _P(), _config()
        ranks = (_I * len(excluded))(*excluded)
        flags = _SHRINK_ABORT if abort else _SHRINK_DEFAULT
        shrink = self._later("ncclCommShrink")
        self._check(shrink(parent, ranks, len(excluded), ctypes.byref(made), ctypes.byref(config), flags), "shrink")
        return made.value or 0

    def grow(self, parent: int | None, *, size: int, rank: int, unique_id: bytes | None) -> int:
        """See `CommLibrary`."""
        made, config = _P(), _config()
        identity = None if unique_id is None else ctypes.byref(_UniqueId.from_buffer_copy(unique_id))
        own = rank if parent is None else -1
        grow = self._later("ncclCommGrow")
        self._check(grow(parent, size, identity, own, ctypes.byref(made), ctypes.byref(config)), "grow")
        return made.value or 0

    def state(self, comm: int) -> CommState:
        """See `CommLibrary`."""
        result = _I()
        if self._c.ncclCommGetAsyncError(comm, ctypes.byref(result)) != _SUCCESS:
            return CommState.FAILED
        known = {_SUCCESS: CommState.READY, _IN_PROGRESS: CommState.WORKING}
        return known.get(result.value, CommState.FAILED)

    def revoke(self, comm: int) -> None:
        """See `CommLibrary`."""
        self._check(self._later("ncclCommRevoke")(comm, _REVOKE_DEFAULT), "revoke")
        self._await(comm)

    def abort(self, comm: int) -> None:
        """See `CommLibrary`."""
        self._check(self._c.ncclCommAbort(comm), "abort")

    def run(self, comm: int, steps: Sequence[Step], *, stream: Any) -> None:
        """See `CommLibrary`; `stream` is one of torch's."""
        where = _P(stream.cuda_stream)
        self._check(self._c.ncclGroupStart(), "group start")
        try:
            for step in steps:
                self._check(self._enqueue(comm, step, where=where), step.kind)
        finally:
            result = self._c.ncclGroupEnd()
        self._check(result, "group end")

    def _enqueue(self, comm: int, step: Step, *, where: Any) -> int:
        source, target, amount, kind = step.source, step.target, step.amount, _TYPES[Element(step.element)]
        operation = _OPERATIONS[Reduction(step.reduction)]
        c = self._c
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (c.ncclAllReduce, source, target, amount, kind, operation),
            "reduce": (c.ncclReduce, source, target, amount, kind, operation, step.peer),
            "broadcast": (c.ncclBroadcast, source, target, amount, kind, step.peer),
            "all_gather": (c.ncclAllGather, source, target, amount, kind),
            "reduce_scatter": (c.ncclReduceScatter, source, target, amount, kind, operation),
            "send": (c.ncclSend, source, amount, kind, step.peer),
            "recv": (c.ncclRecv, target, amount, kind, step.peer),
        }
        function, *arguments = calls[step.kind]
        return int(function(*arguments, comm, where))

    def _await(self, comm: int) -> None:
        while self.state(comm) is CommState.WORKING:
            threading.Event().wait(_POLL_S)

    def _later(self, name: str) -> Any:
        if not hasattr(self._c, name):
            raise TransportError(f"NCCL {self._version} has no {name}")
        return getattr(self._c, name)

    def _check(self, result: int, what: str) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            text = self._c.ncclGetErrorString(result).decode(errors="replace")
            raise TransportError(f"NCCL: {what}: {text}")
