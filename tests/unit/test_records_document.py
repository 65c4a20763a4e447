"""docs/records.md says what the code says, about everything a record can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.records import messages
from keepstep.records.document import records_document
from keepstep.records.events import Event, Record
from keepstep.records.ring_layout import LAYOUTS, PRIVATE_BYTES, SLOT_BYTES

DOCUMENT = Path(__file__).parents[2] / "docs" / "records.md"


def test_the_document_is_what_the_code_says() -> None:
    written = DOCUMENT.read_text()
    assert written == records_document(), "run: python -m keepstep.records.document > docs/records.md"


@pytest.mark.parametrize("struct", [*Event.__args__, *messages.Message.__args__], ids=lambda struct: struct.__name__)
def test_every_record_and_field_is_in_it(struct: type) -> None:
    section = records_document().split(f"### {struct.__name__}\n")[1].split("\n#")[0]
    inherited = Record.__struct_fields__ if issubclass(struct, Record) else ()
    for field in struct.__struct_fields__:
        assert field in inherited or f"| `{field}` |" in section


def test_every_journal_field_has_a_meaning() -> None:
    journal = records_document().split("## Messages")[0]
    rows = [line for line in journal.splitlines() if line.startswith("| `")]
    assert len(rows) > 70
    for row in rows:
        assert row.split("|")[-2].strip(), row


def test_layouts_name_every_field_and_fit_their_place() -> None:
    for layout in LAYOUTS:
        fields = list(layout.fields())
        assert len(fields) == len(layout.names.split()) == len(layout.form.unpack(bytes(layout.form.size)))
        end = layout.offset + layout.form.size
        assert end <= (PRIVATE_BYTES if layout.title == "Private state" else SLOT_BYTES)
    starts = {name: offset for layout in LAYOUTS for offset, _kind, name in layout.fields()}
    assert (starts["head"], starts["member"], starts["finished_ns"], starts["wait_peer_ns"]) == (24, 80, 72, 72)
