"""The state of a process beside its objects: random numbers, torch's switches, environment, streams, handlers, hooks.

Taken before a rehearsal and put back after it, together with what torch.distributed keeps by rank.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist

from keepstep.training.rng import capture_rng, restore_rng
from keepstep.training.sharding import forget_meshes

__all__ = ["ProcessState", "forget_ranks", "uses_meshes"]

_HOOK_OWNERS = (("torch.nn.modules.module", "_global_"), ("torch.optim.optimizer", "_global_optimizer_"))
_OF_INTERPRETER = ("stdin", "stdout", "stderr", "excepthook", "unraisablehook", "displayhook", "breakpointhook")


class ProcessState:
    """What this process was when it was made; `restore` may be called several times."""

    def __init__(self) -> None:
        self._rng = capture_rng()
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._arguments, self._path = list(sys.argv), list(sys.path)
        self._switches = _switches()
        self._loggers = _loggers()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._hooks = {key: dict(hooks) for key, hooks in _hooks().items()}
        self._filters = list(warnings.filters)
        self._collecting = gc.isenabled()
        self._interpreter = {name: getattr(sys, name) for name in _OF_INTERPRETER}
        self._thread_errors = threading.excepthook

    def restore(self) -> None:
        """Put everything back."""
        for name in set(os.environ) - set(self._environment):
            del os.environ[name]
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:], sys.path[:] = self._arguments, self._path
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler and handler is not None:
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, handler)
        _set_switches(self._switches)
        _set_loggers(self._loggers)
        for key, hooks in _hooks().items():
            hooks.clear()
            hooks.update(self._hooks.get(key, {}))
        for name, value in self._interpreter.items():
            setattr(sys, name, value)
        threading.excepthook = self._thread_errors
        warnings.filters[:] = self._filters  # type: ignore[index]
        (gc.enable if self._collecting else gc.disable)()
        restore_rng(self._rng)


def forget_ranks() -> None:
    """End all process groups, and drop whatever torch.distributed keeps that was made under a rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None:
        mesh._mesh_resources.mesh_stack.clear()
    tensor_random = sys.modules.get("torch.distributed.tensor._random")
    if tensor_random is not None:
        vars(tensor_random)["_rng_tracker"] = None
    planners = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", None)
    if planners is not None:
        planners.clear()
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper) and _module_of(cache).startswith("torch.distributed"):
            cache.cache_clear()


def uses_meshes() -> bool:
    """True where some device mesh is alive: it knows a coordinate, which compiled code may have taken for constant."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and any(type(one) is module.DeviceMesh for one in gc.get_objects())


def _module_of(cache: Any) -> str:
    return str(getattr(cache, "__module__", "") or "")


def _hooks() -> dict[str, dict[Any, Any]]:
    """torch's registries of hooks for all modules and all optimizers."""
    found = {}
    for name, prefix in _HOOK_OWNERS:
        for key, value in vars(sys.modules[name]).items():
            if key.startswith(prefix) and isinstance(value, dict):
                found[f"{name}.{key}"] = value
    return found


def _switches() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "anomalies": torch.is_anomaly_enabled(),
    }


def _set_switches(kept: dict[str, Any]) -> None:
    torch.set_default_dtype(kept["dtype"])
    torch.set_grad_enabled(kept["gradients"])
    torch.set_num_threads(kept["threads"])
    now = _switches()
    if any(now[name] != kept[name] for name in ("deterministic", "warn_only")):  # to set it loads the compiler
        torch.use_deterministic_algorithms(kept["deterministic"], warn_only=kept["warn_only"])
    torch.set_float32_matmul_precision(kept["precision"])
    torch.autograd.set_detect_anomaly(kept["anomalies"])


def _all_loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(one for one in known if isinstance(one, logging.Logger))]


def _loggers() -> dict[logging.Logger, tuple[list[logging.Handler], int, bool, bool]]:
    return {one: (list(one.handlers), one.level, one.propagate, one.disabled) for one in _all_loggers()}


def _set_loggers(kept: dict[logging.Logger, tuple[list[logging.Handler], int, bool, bool]]) -> None:
    """Handlers of loggers as they were; loggers that are new keep those of libraries and lose the script's none."""
    for one in _all_loggers():
        if one in kept:
            one.handlers[:], one.level, one.propagate, one.disabled = kept[one][0], *kept[one][1:]
        elif not one.name.startswith(("torch", "keepstep")):
            one.handlers.clear()
            one.setLevel(logging.NOTSET)
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]
