"""Thirteen public bug reports, each with its known answer: the layer and who, or that it cannot be known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from diagnosed_text import found_in, named

from keepstep.service.diagnosing import as_json, diagnose_paths

CASES = Path(__file__).parent.parent / "data" / "cases"
RANK = "rank"

ANSWERS = {
    "02": ("noncommunication_hang", "dataloader", [[{"node": "48", "pid": 688514}]]),
    "04": ("crash", "hardware_gpu", []),
    "12": ("collective_mismatch", "application", [[{RANK: 0}], [{RANK: 4}]]),
    "14": ("collective_mismatch", "application", [[{RANK: 0}]]),
    "16": ("collective_mismatch", "application", [[{RANK: 2}]]),
    "17": ("collective_mismatch", "application", [[{RANK: 1}, {RANK: 2}]]),
    "21": ("noncommunication_hang", "dataloader", [[{RANK: rank} for rank in (0, 1, 2, 3, 4, 5, 7)]]),
    "24": ("communication_hang", "hardware_link", []),
    "31": ("compute_slow", "host_cpu", []),
    "36": ("undetermined", "undetermined", []),
    "40": ("healthy", "configuration", []),
    "41": ("noncommunication_hang", "dataloader", [[{RANK: 1}], [{RANK: 2}]]),
}
SAYS = {
    "02": ["688515", "broadcast"],
    "04": ["intersect the node lists", "exclude"],
    "12": ["victims", "another backend"],
    "14": ["one call too many", "nothing points to hardware"],
    "16": ["streams", "person's word"],
    "17": ["not divisible", "1435", "1436"],
    "21": ["35 %", "57 min", "the network is not involved"],
    "24": ["port error"],
    "31": ["binding", "changes"],
    "36": ["node3", "4 of 6", "weak"],
    "40": ["Persistence", "do not drain", "memory"],
    "41": ["1, 2", "data loading"],
}


def all_words(finding) -> str:
    return " ".join((*finding.evidence, finding.next_probe))


@pytest.mark.parametrize("case", ANSWERS)
def test_the_known_answer(case):
    (finding,) = diagnose_paths([CASES / f"{case}.md"]).findings
    assert (finding.kind, finding.layer, named([finding])) == ANSWERS[case]
    for words in SAYS[case]:
        assert words in all_words(finding)


@pytest.mark.parametrize("case", ANSWERS)
def test_the_same_answer_from_a_plain_log(case, tmp_path):
    """Symptom and log as plain text, without the headings and fences of the file."""
    lines = (CASES / f"{case}.md").read_text().splitlines()
    bare = [line for line in lines[4:] if not line.startswith(("~~~~", "## ", "---"))]
    (finding,) = found_in("\n".join(bare) + "\n", tmp_path)
    assert (finding.kind, finding.layer, named([finding])) == ANSWERS[case]


def test_two_experiments_are_two_answers():
    """Of one the numbers are too close; the other has one rank that waits for its input."""
    findings = diagnose_paths([CASES / "44.md"]).findings
    assert [(finding.kind, finding.layer, named([finding])) for finding in findings] == [
        ("compute_slow", "dataloader", [[{RANK: 2}]]),
        ("undetermined", "undetermined", []),
    ]


def test_the_victims_of_a_split_are_not_suspects():
    (finding,) = diagnose_paths([CASES / "12.md"]).findings
    assert finding.victims == (1, 2, 3, 5, 6, 7)


def test_a_false_alarm_alone_is_no_fault():
    assert diagnose_paths([CASES / "40.md"]).exit_code == 0
    assert diagnose_paths([CASES / "36.md"]).exit_code == 1


def test_how_a_case_was_filed_is_not_looked_at(tmp_path):
    """Words between `---` at the top say what the person who filed it thinks."""
    text = (CASES / "24.md").read_text().replace("kind: hang", "kind: false_alarm")
    assert [finding.kind for finding in found_in(text, tmp_path, "24.md")] == ["communication_hang"]


def test_json_has_every_field():
    document = msgspec.json.decode(as_json(diagnose_paths([CASES / "16.md"])))
    (finding,) = document["findings"]
    assert document["unread"] == []
    assert finding["suspects"] == [[{"rank": 2}]]
    assert {"kind", "layer", "suspects", "victims", "confidence", "evidence", "next_probe", "cost"} <= set(finding)
