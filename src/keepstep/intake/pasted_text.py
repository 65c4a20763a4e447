"""Tells a pasted log from the words around it: Markdown with fences, JSON documents inside other text."""

from __future__ import annotations

import re
from pathlib import Path

from keepstep.intake.log_lines import Line
from keepstep.intake.reading import opened

__all__ = ["LONGEST_BLOCK", "PastedText", "fenced_blocks"]

LONGEST_BLOCK = 8 << 20
"""Characters of a JSON document pasted into other text; a longer one is read as lines only."""

_MOST_BLOCKS = 64
_REMARKS = 2
_ONE_LINE = ('"test_categories"', '"ifname"', '"/sys/')
_FENCE = re.compile(r"^\s{0,3}(~{3,}|`{3,})")
_HEADING = re.compile(r"^#{1,6} \S")


class PastedText:
    """Follows the lines of one file. `prose` and `skips` speak of the line fed last."""

    def __init__(self, path: Path) -> None:
        """Only files that look like Markdown have prose: by name, or by a heading above the first fence."""
        self._markdown = path.suffix.lower() in (".md", ".markdown", ".rst")
        self._named = self._markdown
        self._remarks = 0
        self._fence = ""
        self._front = False
        self._depth = 0
        self._block: list[str] = []
        self._size = 0
        self._began = 0
        self.prose = False
        self.skips = False

    @property
    def busy(self) -> bool:
        """Whether the next line may be prose, or part of a document."""
        return bool(self._depth) or self._front or (self._markdown and not self._fence)

    def heeds(self, text: str) -> bool:
        """Whether a line changes what the next lines are."""
        return bool(_FENCE.match(text)) or text.startswith("#") or text.strip() == "---"

    def feed(self, line: Line) -> tuple[int, bytes] | None:
        """A JSON document that is complete with this line: its first line's number and its bytes."""
        self.skips = self._front_matter(line) or self._is_remark(line)
        fence = _FENCE.match(line.text)
        if fence and (not self._fence or fence[1].startswith(self._fence)):
            self._fence = "" if self._fence else fence[1]
            self.skips = True
        elif _HEADING.match(line.text) and not self._fence and self._remarks < _REMARKS:
            self._markdown = True
        self.prose = self._markdown and not self._fence
        return None if self.skips or self.prose else self._json(line)

    def finish(self) -> tuple[int, bytes] | None:
        """What was begun and not ended: nothing that can be read."""
        self._block, self._depth = [], 0
        return None

    def _is_remark(self, line: Line) -> bool:
        """Lines that begin with `#`, in a file whose first two do: remarks of a script or of settings, no headings."""
        if self._named or not line.text.startswith("#"):
            return False
        if line.number <= _REMARKS:
            self._remarks += _REMARKS if line.text.startswith("#!") else 1
        if self._remarks >= _REMARKS:
            self._markdown = False
        return self._remarks >= _REMARKS

    def _front_matter(self, line: Line) -> bool:
        """Lines between `---` at the very top say how a file was filed, not what happened."""
        if line.text.strip() == "---" and (line.number == 1 or self._front):
            self._front = not self._front
            return True
        return self._front

    def _json(self, line: Line) -> tuple[int, bytes] | None:
        text = line.text
        if not self._depth:
            if text.strip() not in ("{", "[", "[{") and not any(mark in text for mark in _ONE_LINE):
                return None
            self._block, self._size, self._began = [], 0, line.number
        self._depth += _balance(text)
        self._block.append(text)
        self._size += len(text)
        if self._size > LONGEST_BLOCK:
            self._block, self._depth = [], 0
        if self._depth > 0 or not self._block:
            return None
        whole = "\n".join(self._block).encode()
        self._block, self._depth = [], 0
        return self._began, whole


def _balance(text: str) -> int:
    """Brackets opened minus closed, strings left out."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return sum((character in "{[") - (character in "}]") for character in bare)


def fenced_blocks(path: Path) -> list[bytes]:
    """What stands between fences in a Markdown file, each block for itself. Raises OSError."""
    blocks: list[bytes] = []
    current: list[bytes] = []
    fence, size = b"", 0
    with opened(path) as stream:
        while (raw := stream.readline(LONGEST_BLOCK)) and size < LONGEST_BLOCK:
            size += len(raw)
            mark = raw.strip()[:3]
            if mark in (b"~~~", b"```") and (not fence or mark == fence):
                if fence and current:
                    blocks.append(b"".join(current))
                fence, current = (b"" if fence else mark), []
            elif fence:
                current.append(raw)
    return blocks[:_MOST_BLOCKS]
