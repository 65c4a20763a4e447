"""Where a process is, from its stack: waiting in a collective, for data, for storage, compiling, in its own code."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from keepstep.records.evidence import Frame, StackSample

__all__ = ["StackPlace", "WhereAbouts", "main_threads", "place_of"]

WhereAbouts = Literal["collective", "device", "data", "storage", "compile", "lock", "program", "unknown"]
"""`device`: the processor waits for work of its accelerator, which may be a collective."""


class StackPlace(msgspec.Struct, frozen=True):
    """Where a process stands, the frame that says so, and the collective's name if it is one."""

    where: WhereAbouts
    frame: Frame
    operation: str = ""


_OPERATIONS = re.compile(
    r"^(?:_?all_?reduce\w*|_?all_?gather\w*|_?reduce_?scatter\w*|_?broadcast\w*|barrier"
    r"|monitored_barrier|reduce|gather\w*"
    r"|scatter\w*|all_?to_?all\w*|i?send\w*|i?recv\w*|batch_isend_irecv|wait_stream|nccl\w+|c10d::.*|ProcessGroup.*)$",
    re.IGNORECASE,
)
_COLLECTIVE_FILE = re.compile(
    r"distributed_c10d|c10d_logger|torch/distributed/(?!elastic|checkpoint|launch|run|tensor|fsdp"
    r"|algorithms)|deepspeed/comm"
    r"|horovod|mpi4py|pynccl|custom_all_reduce|parallel_state|p2p_communication|pipe/p2p|libnccl"
    r"|librccl|ProcessGroup|oneccl",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"(?:^|/)(?:threading|queue|selectors|contextlib|socket|ssl|subprocess|functools|signal|_bootstrap|bdb|pdb)\.py$"
    r"|multiprocessing/(?:connection|queues|popen\w*|util|process|synchronize)\.py$|(?:libc"
    r"|libpthread|ld-linux)[\w.-]*\.so"
)
_PASSING_FUNCTIONS = re.compile(
    r"^(?:wait|get|poll|select|_poll|accept|recv_bytes|_recv\w*|__poll|futex\w*|do_futex_wait\S*"
    r"|pthread_\w+|epoll_wait|nanosleep"
    r"|clock_nanosleep|sched_yield|__?read(?:_nocancel)?|syscall|clone3?|start_thread|wrapper"
    r"|inner|_fn|decorate_context"
    r"|_wrapped_call_impl|_call_impl|__call__|result|join)$"
)
_DATA = re.compile(
    r"torch/utils/data|/dataloader|data_?loader|torchdata|webdataset|nvidia/dali|ffcv"
    r"|tensorflow/python/data|/datasets/|streaming/base"
    r"|tokeni[sz]ers?/|megatron/data|/data/(?!storage)|prefetch|batch_sampler|iterators?\.py|data_utils|input_pipeline",
    re.IGNORECASE,
)
_DATA_FUNCTIONS = re.compile(
    r"^(?:_?next_(?:data|batch|index)|_try_get_data|_get_data|__next__|next_batch|_?get_batch\w*"
    r"|load_batch|fetch|__getitem__|_worker_loop"
    r"|collate\w*|read_batch|tokeni[sz]e\w*)$"
)
_STORAGE = re.compile(
    r"torch/serialization|distributed/checkpoint|checkpoint(?:ing)?\w*\.py|safetensors|tensorstore"
    r"|fsspec|s3fs|gcsfs|boto|aiobotocore"
    r"|h5py|zipfile\.py|shutil\.py|gzip\.py|numpy/lib/(?:npyio|format)|nfs_|rpc_wait|cl_sync_io"
    r"|ll_file|ldlm_|io_schedule",
    re.IGNORECASE,
)
_STORAGE_FUNCTIONS = re.compile(
    r"^(?:save_checkpoint\w*|load_checkpoint\w*|_?save|torch_save|_legacy_save|write_record|fsync"
    r"|fdatasync|copyfileobj|nfs\w+|rpc_\w+|io_schedule\w*"
    r"|cl_\w+|ll_\w+|ldlm_\w+)$"
)
_COMPILE = re.compile(
    (
        r"torch/_(?:inductor|dynamo|functorch)|triton/(?:compiler|runtime|backends)|cpp_extension"
        r"|torch/jit|nvrtc|ninja|megatron/fused_kernels|xla/|tvm"
    ),
    re.IGNORECASE,
)
_LOCK_FILE = re.compile(r"filelock|file_baton|fasteners|portalocker")
_DEVICE = re.compile(
    r"^(?:synchronize|cudaStreamSynchronize|cudaDeviceSynchronize|cuStreamSynchronize"
    r"|cuCtxSynchronize|item|hipStreamSynchronize)$"
)
_DEVICE_FILE = re.compile(r"torch/cuda|libcuda|libhip|torch/_?tensor", re.IGNORECASE)
_OWN_THREADS = re.compile(
    r"pin_memory|_worker_loop|QueueFeeder|tqdm|wandb|Monitor|asyncio|tensorboard|Thread-\d+.*(?:run|loop)|NCCL|pt_nccl",
    re.IGNORECASE,
)

_LAUNCHERS = re.compile(
    r"torch/distributed/(?:elastic/(?:agent|rendezvous|multiprocessing/api|multiprocessing/subprocess_handler)"
    r"|run\.py|launch\.py|launcher/)|torch/multiprocessing/spawn\.py|deepspeed/launcher/|accelerate/commands/"
    r"|horovod/runner/|multiprocessing/(?:resource_tracker|forkserver|managers)\.py"
)
"""Where processes stand that start ranks and wait for them, or serve them: they are in no collective."""
_SERVICES = re.compile(
    r"wandb/|tensorboard/|ray/(?:_private|dashboard)/|py_spy|prometheus_client/|mlflow/", re.IGNORECASE
)
_AROUND = re.compile(r"^(?:<module>|main|_run_code|_run_module\w*|wrapper|_bootstrap|run|__call__)$")


def place_of(frames: tuple[Frame, ...]) -> StackPlace:
    """Where a stack (innermost frame first) stands: the first frame from the inside that says so decides."""
    own: Frame | None = None
    for frame in frames:
        where = _where(frame)
        if where == "collective":
            return StackPlace(where, frame, _operation(frame))
        if where is not None:
            return StackPlace(where, frame)
        passing = _PASSING.search(frame.file) or _PASSING_FUNCTIONS.match(frame.function)
        if own is None and frame.file and not passing and not frame.function.startswith("<frozen"):
            own = frame
    if own is not None:
        return StackPlace("program", own)
    return StackPlace("unknown", frames[0] if frames else Frame("?"))


def _where(frame: Frame) -> WhereAbouts | None:
    """What one frame says; None if it says nothing."""
    name, file = frame.function.rsplit(".", 1)[-1], frame.file
    if _COLLECTIVE_FILE.search(file) and (_OPERATIONS.match(name) or "libnccl" in file or "ProcessGroup" in file):
        return "collective"
    if _OPERATIONS.match(name) and (name.lower().startswith(("all", "_all", "nccl", "reduce_s")) or name == "barrier"):
        return "collective"
    if _PASSING.search(file):
        return None
    if _LOCK_FILE.search(file):
        return "lock"
    if _COMPILE.search(file):
        return "compile"
    if _STORAGE.search(file) or _STORAGE_FUNCTIONS.match(name) or _STORAGE.search(name):
        return "storage"
    if _DATA_FUNCTIONS.match(name) or _DATA.search(file):
        return "data"
    if _DEVICE.match(name) and (_DEVICE_FILE.search(file) or "ynchronize" in name):
        return "device"
    return None


def _operation(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1].lstrip("_").lower()


def main_threads(stacks: tuple[StackSample, ...]) -> list[StackSample]:
    """One stack for each process that may be a rank: its main thread, or the one that reaches the module, or else the
    first."""
    processes: dict[tuple[object, ...], list[StackSample]] = {}
    for index, stack in enumerate(stacks):
        key = (stack.rank, stack.node, stack.pid) if (stack.rank, stack.pid) != (None, None) else (index,)
        processes.setdefault(key, []).append(stack)
    found = [_main_of(threads) for threads in processes.values() if any(not _servant(item) for item in threads)]
    return [stack for stack in found if not _serves_ranks(stack)]


def _main_of(threads: list[StackSample]) -> StackSample:
    """The main thread of a process; of several captures of it the newest."""
    first = max(threads, key=_mainness)
    return next(
        item for item in reversed(threads) if item.thread == first.thread and _mainness(item) == _mainness(first)
    )


def _mainness(stack: StackSample) -> tuple[bool, bool, bool]:
    outermost = stack.frames[-1].function if stack.frames else ""
    return (stack.thread.startswith("MainThread"), outermost in ("<module>", "_start", "main"), not _servant(stack))


def _serves_ranks(stack: StackSample) -> bool:
    """Whether a process is a launcher, by its innermost frame, or a service, by all of them; no rank is one."""
    place = place_of(stack.frames)
    if place.where not in ("program", "unknown") or not stack.frames:
        return False
    own = [frame for frame in stack.frames if not _AROUND.match(frame.function) and not _PASSING.search(frame.file)]
    return bool(_LAUNCHERS.search(place.frame.file)) or (bool(own) and all(_SERVICES.search(one.file) for one in own))


def _servant(stack: StackSample) -> bool:
    """A thread that serves others: pinning memory, feeding queues, a worker of a loader."""
    if stack.thread == "MainThread" and not any(frame.function == "_worker_loop" for frame in stack.frames):
        return False
    return bool(_OWN_THREADS.search(stack.thread)) or any(
        frame.function in ("_worker_loop", "_pin_memory_loop", "do_one_step") for frame in stack.frames
    )
