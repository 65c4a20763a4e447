"""A script that one process runs several times: its code object stays the same, so that what was compiled stays hot.

It always runs in the same module `__main__`. A class of modules (`torch.nn.Module`) that the script defines again is
the class of the first time, put back to what its statement says: compiled code asks for the very class.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Script"]

_CODE = (types.FunctionType, classmethod, staticmethod, property)
_OWN_NAMES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"})


class Script:
    """The script at `path`, compiled once. Raises SyntaxError or OSError as Python does."""

    def __init__(self, path: str) -> None:
        self._code = compile(Path(path).read_bytes(), path, "exec")
        self._module = types.ModuleType("__main__")
        self._module.__file__ = path
        self._classes: dict[types.CodeType, type] = {}

    def run(self) -> None:
        """Run it from its top, as `python path` would, in a module without names of an earlier run."""
        names = self._module.__dict__
        for name in [name for name in names if not name.startswith("__")]:
            del names[name]
        names.update(__cached__=None, __builtins__=builtins)
        sys.modules["__main__"] = self._module
        build = builtins.__build_class__
        builtins.__build_class__ = self._reusing(build)
        try:
            types.FunctionType(self._code, names)()
        finally:
            builtins.__build_class__ = build

    def _reusing(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def build_class(body: types.FunctionType, name: str, *bases: Any, **words: Any) -> Any:
            fresh = build(body, name, *bases, **words)
            if body.__globals__ is not self._module.__dict__ or body.__closure__ is not None:
                return fresh
            known = self._classes.setdefault(body.__code__, fresh)
            if known is fresh or not _same_kind(known, fresh):
                return fresh
            _renew(known, fresh)
            return known

        return build_class


def _same_kind(known: Any, fresh: Any) -> bool:
    return (
        type(known) is type(fresh) is type and known.__bases__ == fresh.__bases__ and issubclass(fresh, torch.nn.Module)
    )


def _renew(known: type, fresh: type) -> None:
    """Give `known` the attributes that `fresh` was made with; methods, which have the same code, stay."""
    for name in [name for name in vars(known) if name not in vars(fresh) and name not in _OWN_NAMES]:
        delattr(known, name)
    for name, value in vars(fresh).items():
        mine = vars(known).get(name)
        if isinstance(value, types.FunctionType) and isinstance(mine, types.FunctionType):
            mine.__defaults__, mine.__kwdefaults__ = value.__defaults__, value.__kwdefaults__
        elif name not in _OWN_NAMES and not (isinstance(value, _CODE) and type(mine) is type(value)):
            setattr(known, name, value)
