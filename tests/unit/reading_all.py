"""Read a folder as the command does: ask the readers in turn, name what nobody reads."""

from __future__ import annotations

from keepstep.diagnosis.dump_verdict import diagnose_dumps
from keepstep.errors import RecordError
from keepstep.intake.dumps import DUMP_READERS
from keepstep.intake.reading import head_of
from keepstep.records.evidence import Unread


def evidence_of(path):
    paths = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    found = []
    for item in paths:
        reader = next((reader for reader in DUMP_READERS if reader.recognises(item, head_of(item))), None)
        if reader is None:
            found.append(Unread(path=str(item), why="no known format"))
            continue
        try:
            found += reader.read(item)
        except RecordError as problem:
            found.append(Unread(path=str(item), why=problem.what))
    return found


def findings_of(path):
    return diagnose_dumps(evidence_of(path))


def unread_of(path):
    return [item for item in evidence_of(path) if isinstance(item, Unread)]


def suspects_of(findings):
    """The parts of all suspects that are set, finding by finding and set by set."""
    return [
        [
            [
                {name: value for name in one.__struct_fields__ if (value := getattr(one, name)) is not None}
                for one in some
            ]
            for some in finding.suspects
        ]
        for finding in findings
    ]
