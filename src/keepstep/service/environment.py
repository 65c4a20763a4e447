"""The environment variables a training process is started with: torchrun's full set and our own."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["training_environment"]

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")


def training_environment(
    base: Mapping[str, str],
    ordered: Mapping[str, str],
    *,
    run_id: str,
    own: Mapping[str, str],
    master_port: int | None,
    unless_set: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`base` with the variables torchrun sets (PyTorch documentation, "torchrun: environment variables").

    `ordered` is what the controller knows of the job's shape and this rank (none for a standby), `own` are the
    variables of keepstep. `master_port` replaces the ordered one where this agent can choose a fresh port itself.
    `unless_set` are variables that give way to what a person has set.
    Values a person has set for OMP_NUM_THREADS and PYTHONUNBUFFERED are kept.
    """
    result = {key: value for key, value in base.items() if key not in _RANK_VARIABLES}
    result = {**(unless_set or {}), **result}
    result.setdefault("OMP_NUM_THREADS", "1")
    result.setdefault("PYTHONUNBUFFERED", "1")
    result |= {
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": ordered.get("WORLD_SIZE", "1"),
        "LOCAL_WORLD_SIZE": ordered.get("WORLD_SIZE", "1"),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    result |= own
    result |= ordered
    if "RANK" in ordered:
        result["ROLE_RANK"] = ordered["RANK"]
    if master_port is not None:
        result["MASTER_PORT"] = str(master_port)
    return result
