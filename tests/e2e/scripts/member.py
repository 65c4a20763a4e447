"""A member without torch: says hello as keepstep does, then counts steps in its recorder ring."""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import time

from keepstep import __version__
from keepstep.records.messages import Address, Finished, Hello, Welcome
from keepstep.records.ring import ring_bytes, write_private
from keepstep.store.wire import Wire

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pace", type=float, default=0.02)
parser.add_argument("--version", default=__version__)
parser.add_argument("--world", type=int, default=int(os.environ["WORLD_SIZE"]))
args = parser.parse_args()

wire = Wire.connect(os.environ["KEEPSTEP_AGENT"])
descriptor = wire.receive_descriptor(10.0)
ring = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
struct.pack_into("<8sIIQ", ring, 0, b"KSRING01", 1, 128, (len(ring) - ring_bytes(0)) // 128)
name = bytes(ring[80:128]).rstrip(b"\0").decode()
rank = int(os.environ["RANK"])
address = Address(name, "node", "", "127.0.0.1", 1)
wire.send(Hello(name, rank, args.world, os.getpid(), address, args.version, "2.13.0"))
while not isinstance(wire.receive(), Welcome):
    pass
for step in range(args.steps):
    struct.pack_into("<Q", ring, 72, step)
    write_private(ring, step, data=b"private %d" % step)
    print(f"step {step} loss {1 / (step + 1)}")
    time.sleep(args.pace)
wire.send(Finished(args.steps, "ab" * 32))
