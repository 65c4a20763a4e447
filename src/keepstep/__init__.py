"""Keep synchronous training jobs in step: replace a lost member while all others keep their connections and state.

`join()` is the only call a training script needs. It is looked up on first use, so that `import keepstep` (and with
it the command line, the controller and every tool that only reads records) loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.errors import EnvironmentProblem

if TYPE_CHECKING:
    from keepstep.training.user_job import Job, join

__all__ = ["Job", "__version__", "join"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`join` and `Job`, from the only package that needs torch. Raises EnvironmentProblem where torch is missing."""
    if name not in ("Job", "join"):
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    try:
        from keepstep.training import user_job
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise EnvironmentProblem(
            "keepstep.join() needs PyTorch, which is not installed",
            remedy="install it with: pip install 'keepstep[torch]'",
        ) from error
    return getattr(user_job, name)


def __dir__() -> list[str]:
    """The public names, those that are looked up on first use included."""
    return sorted(__all__)
