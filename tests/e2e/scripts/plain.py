"""A script that knows nothing of keepstep: does what its arguments say."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--environment", type=Path, help="write the environment there")
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--fail-attempts", type=int, default=1, help="how many attempts fail")
parser.add_argument("--code", type=int, default=1)
parser.add_argument("--child", type=Path, help="start a child and write its pid there")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--linger", type=float, default=0.2)
parser.add_argument("--say", default="")
args = parser.parse_args()

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if args.deaf:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.child:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    args.child.with_suffix(f".{rank}").write_text(f"{os.getpid()} {child.pid}")
if args.environment:
    args.environment.with_suffix(f".{attempt}.{rank}").write_text(json.dumps(dict(os.environ)))
if args.say:
    print(args.say)
if rank == args.fail_rank and attempt < args.fail_attempts:
    if args.code:
        sys.exit(args.code)
    raise ValueError("a mistake in the script")
time.sleep(args.linger)
