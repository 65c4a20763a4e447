"""What other tools wrote, turned into records.

An empty room: readers for PyTorch Flight Recorder dumps, NCCL logs, scheduler accounting, topology files and public
failure traces will live here. They may import `records` and `errors`, and they decide nothing.
"""

__all__: list[str] = []
