"""Plain training that writes, removes and renames files, starts a process and forks, as scripts do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

here = Path(sys.argv[1])
kept = here / "kept.txt"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(here / "new").mkdir()
(here / "new" / "log.txt").write_text("began")
with kept.open("a") as file:
    file.write("more")
assert kept.read_text() == "as it was" + "more"
(here / "gone.txt").unlink()
shutil.rmtree(here / "folder")
os.replace(here / "new" / "log.txt", here / "renamed.txt")
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
subprocess.run([sys.executable, "-c", "pass"], check=True)
data = TensorDataset(torch.randn(64, 4))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=1)
for (x,) in loader:
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), here / "weights.pt")
dist.destroy_process_group()
