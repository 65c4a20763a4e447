"""The C data plane (`plane/*.c`) as ctypes sees it: the library, its functions and the structs they take."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from keepstep.errors import EnvironmentProblem

__all__ = ["NO_SPARE", "BufferStruct", "CallStruct", "FailureStruct", "library"]


class BufferStruct(ctypes.Structure):
    """`struct ks_buffer`."""

    _fields_ = [("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class CallStruct(ctypes.Structure):
    """`struct ks_call`."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("element", ctypes.c_uint8),
        ("reduction", ctypes.c_uint8),
        ("want_future", ctypes.c_uint8),
        ("run_inline", ctypes.c_uint8),
        ("spare", ctypes.c_uint8 * 3),
        ("root", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("tag", ctypes.c_int64),
        ("n_inputs", ctypes.c_uint32),
        ("n_outputs", ctypes.c_uint32),
        ("inputs", ctypes.POINTER(BufferStruct)),
        ("outputs", ctypes.POINTER(BufferStruct)),
        ("timeout_s", ctypes.c_double),
    ]


class FailureStruct(ctypes.Structure):
    """`struct ks_failure`."""

    _fields_ = [("peer", ctypes.c_int32), ("errno", ctypes.c_int32), ("what", ctypes.c_char * 240)]


NO_SPARE = (ctypes.c_uint8 * 3)()
"""Fills `CallStruct.spare`."""

_P, _I, _U32, _U64, _I64, _D = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.c_double,
)
_INTS = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ks_domain_new": (_P, (_I,)),
    "ks_domain_close": (None, (_P,)),
    "ks_domain_failure_fd": (_I, (_P,)),
    "ks_domain_poisoned": (_I, (_P,)),
    "ks_domain_generation": (_U32, (_P,)),
    "ks_domain_recording": (_I, (_P,)),
    "ks_domain_set_recording": (None, (_P, _I)),
    "ks_domain_set_step": (None, (_P, _I64)),
    "ks_domain_record": (_I, (_P, _P, _U64)),
    "ks_span_begin": (_U64, (_P, _I)),
    "ks_span_end": (None, (_P, _U64)),
    "ks_domain_lost": (_I, (_P, ctypes.POINTER(_P), _INTS, _I)),
    "ks_domain_poison": (None, (_P,)),
    "ks_domain_install": (None, (_P, _U32)),
    "ks_domain_limit": (_I, (_P, _I, _D)),
    "ks_domain_sent": (_U64, (_P, _I)),
    "ks_shared_bytes": (_U64, ()),
    "ks_plane_new": (_P, (_P, _I, _I, _I, ctypes.c_char_p, _INTS)),
    "ks_plane_close": (None, (_P,)),
    "ks_link_tcp": (_I, (_P, _I, _I)),
    "ks_link_shared": (_I, (_P, _I, _I, _I, _I)),
    "ks_unlink": (None, (_P, _I)),
    "ks_link_fd": (_I, (_P, _I)),
    "ks_retire": (_I, (_P, _I)),
    "ks_peers_needed": (_I, (_P, _I, _U64, _I, _INTS)),
    "ks_submit": (_U64, (_P, ctypes.POINTER(CallStruct), ctypes.POINTER(ctypes.c_char_p))),
    "ks_wait": (_I, (_P, _U64, _D)),
    "ks_status": (_I, (_P, _U64)),
    "ks_failure": (_I, (_P, _U64, ctypes.POINTER(FailureStruct))),
    "ks_source": (_I, (_P, _U64)),
    "ks_next_done": (_U64, (_P, _D)),
    "ks_release": (None, (_P, _U64)),
    "ks_busy": (_I, (_P,)),
}


_WITHOUT_RELEASE = ("ks_span_begin", "ks_span_end")
"""Called with the interpreter's lock held: they take less time than giving it away."""


@cache
def library() -> ctypes.CDLL:
    """Loads the library that the build put beside this file; raises EnvironmentProblem when there is none that fits."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_plane{suffix}"
        if path.exists():
            return _declared(path)
    raise EnvironmentProblem(
        "the data plane is not built", where=str(folder), remedy="install keepstep with a C compiler present"
    )


def _declared(path: Path) -> ctypes.CDLL:
    loaded, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            if name in _WITHOUT_RELEASE:
                setattr(loaded, name, getattr(holding, name))
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        remedy = "build it again: python setup.py build_ext --inplace"
        raise EnvironmentProblem(
            f"the data plane is of another version: {error}", where=str(path), remedy=remedy
        ) from error
    return loaded
