"""A standby: a process that has imported everything and waits in the script's `join()` for a role.

`python -m keepstep.training.standby SCRIPT ARGS...`, started by an agent. Scripts that need a rank before `join()` are
run again from their top once there is one; scripts that never call `join()` are not run at all.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from keepstep.training.joining import Warm, await_welcome, warm_up_membership

__all__ = ["main"]

_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"})


def main(arguments: list[str]) -> None:
    """Become warm, wait for a role, run the script `arguments[0]` with the rest as its arguments."""
    script = arguments[0]
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    warm = warm_up_membership()
    _warm_torch()
    if not _joins(script):
        await_welcome(warm)
        return
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyError as error:
        if warm.said or error.args[0] not in _RANK_VARIABLES:
            raise
        _run_with_rank(warm, script)


def _run_with_rank(warm: Warm, script: str) -> None:
    await_welcome(warm)
    runpy.run_path(script, run_name="__main__")


def _joins(script: str) -> bool:
    """True if the script (or what stands beside it) may call join(): it names keepstep."""
    return "keepstep" in Path(script).read_text(encoding="utf-8", errors="replace")


def _warm_torch() -> None:
    """Run what every first step pays for: autograd's thread, matrix kernels, an optimizer's first update."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 64, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(64, 64, generator=generator))
        layer.bias.zero_()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.rand(2, 8, 64, generator=generator)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, layer(x), is_causal=True)
    torch.nn.functional.gelu(torch.nn.functional.layer_norm(attended, (64,))).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.environ.get("KEEPSTEP_AGENT"):
        sys.exit("keepstep: standbys are started by an agent, with a script")
    main(sys.argv[1:])
