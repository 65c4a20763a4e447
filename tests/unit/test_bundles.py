"""Evidence bundles: what is kept, what is refused, and how much stays."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.events import Finding
from keepstep.records.watch_messages import EvidenceGiven
from keepstep.service.bundles import Bundles, Retention, trim_bundles

PLENTY = Retention(50, 1 << 30)


def test_a_bundle_holds_the_finding_and_what_agents_gave(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, PLENTY)
    bundles.put_finding(Finding(kind="compute_slow", number=3))
    bundles.put_evidence("n1", EvidenceGiven(3, "m2", 2, zlib.compress(b"ring" * 100), "stack\n", b'{"a":1}'))
    bundles.put_evidence("n1", EvidenceGiven(3, "", -1, counters=b"{}"))
    bundles.close()
    folder = tmp_path / "findings" / "3"
    assert json.loads((folder / "finding.json").read_text())["kind"] == "compute_slow"
    assert (folder / "m2.ring").read_bytes() == b"ring" * 100
    assert {path.name for path in folder.iterdir()} == {
        "finding.json",
        "m2.ring",
        "m2.stack.txt",
        "m2.counters.json",
        "host-n1.counters.json",
    }


def test_names_that_lead_elsewhere_and_torn_rings_are_refused(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, PLENTY)
    for name in ("../x", "a/b", "x" * 100, "\0"):
        bundles.put_evidence("n1", EvidenceGiven(1, name, 0, stack="s"))
    for ring in (b"no zlib", zlib.compress(b"x" * 1000)[:-3]):
        bundles.put_evidence("n1", EvidenceGiven(1, "m0", 0, ring))
    bundles.put_evidence("../n", EvidenceGiven(1, "", -1, counters=b"{}"))
    bundles.close()
    assert list(tmp_path.rglob("*")) == []


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 8), st.integers(0, 20_000))
def test_the_newest_stay_within_count_and_bytes(sizes: list[int], count: int, most: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, size in enumerate(sizes, 1):
            (folder / str(number)).mkdir()
            (folder / str(number) / "x").write_bytes(bytes(size))
        (folder / "notes").mkdir()
        trim_bundles(folder, Retention(count, most))
        left = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        assert (folder / "notes").exists()
        assert len(left) <= count and left == list(range(len(sizes) - len(left) + 1, len(sizes) + 1))
        assert len(left) <= 1 or sum(sizes[number - 1] for number in left) <= most
        assert not sizes or left


def test_nothing_to_trim_is_no_error(tmp_path: Path) -> None:
    assert trim_bundles(tmp_path / "none", PLENTY) == []
