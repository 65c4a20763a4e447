"""A standby: a process that has imported everything, has rehearsed, and waits in the script's `join()` for a role.

`python -m keepstep.training.standby SCRIPT ARGS...`, started by an agent. The script is run up to `join()`; when there
is a recording it is run further, as a rehearsal, and then once more up to `join()`. Scripts that need a rank before
`join()` are run when there is one; scripts that never call `join()` are not run at all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from keepstep.training.joining import Warm, await_role, warm_up_membership
from keepstep.training.rehearsals import Rehearsals
from keepstep.training.script import Script

__all__ = ["main"]

_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"})


def main(arguments: list[str]) -> None:
    """Become warm, wait for a role, run the script `arguments[0]` with the rest as its arguments."""
    script = arguments[0]
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    _warm_torch()
    warm = warm_up_membership()
    if not _joins(script):
        await_role(warm)
        return
    assert warm.rehearsals is not None
    _run(Script(script), warm, rehearsals=warm.rehearsals)


def _run(script: Script, warm: Warm, *, rehearsals: Rehearsals) -> None:
    """Run the script until it ran for good and not as a rehearsal."""
    early = False
    while True:
        try:
            if early:
                await_role(warm)
            with rehearsals:
                script.run()
                if rehearsals.sandbox is None:
                    return
        except KeyError as error:
            if early or warm.said or error.args[0] not in _RANK_VARIABLES:
                raise
            early = True


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
