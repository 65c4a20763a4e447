"""Lines that count errors of machines: none of them is no fault, and a 0 that is a name is no count."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in

STEPS = "[rank0] step 1 loss 2\n[rank0] step 2 loss 1.9\n"

CLEAN = [
    "INFO: ECC mode enabled, 0 uncorrectable ECC errors, no Xid errors found",
    "node5 nvidia-smi: Uncorrectable ECC errors: 0",
    "GPU 3: uncorrectable ECC errors = 0",
    "uncorrectable ECC error count: 0",
    "Uncorrectable DRAM errors (aggregate): 0",
    "no double bit errors since boot",
    "without any uncorrectable memory error",
    "DBE detected: 0",
    "Xid errors: 0",
    "Xid errors in the last 24 h: none",
    "no Xid errors found in the last 24 hours",
    "Xid errors: none in 24 h",
    "0 Xid errors in 24 hours",
    "NVLink errors: 0",
    "NVLink CRC errors: 0, replay errors: 0",
    "GPU 2: row remapping failure: No",
    "row remapping failures: none",
    "machine check events: 0",
    "oom_kill event count: 0",
]


@pytest.mark.parametrize("line", CLEAN)
def test_a_counter_at_zero_is_no_fault(line, tmp_path):
    assert [finding.kind for finding in found_in(f"{line}\n{STEPS}", tmp_path)] == ["healthy"]


BROKEN = [
    "GPU 0 uncorrectable ECC error encountered",
    "GPU 0 uncorrectable ECC errors: 3",
    "cuda:0 uncorrectable ECC errors found",
    "rank 0 uncorrectable ECC errors",
    "uncorrectable ECC error: 0x1f at 0000:3b:00",
    "volatile uncorrectable ECC errors: 0, aggregate uncorrectable ECC errors: 2",
    "[12345.678] NVRM: Xid (PCI:0000:86:00): 94, pid=4021, Contained: SM (0x1). RST: No, D-RST: No",
    "NVRM: Xid 79",
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_counter_above_zero_is_one(line, tmp_path):
    (finding,) = found_in(f"{line}\n", tmp_path)
    assert (finding.kind, finding.layer) == ("crash", "hardware_gpu")
