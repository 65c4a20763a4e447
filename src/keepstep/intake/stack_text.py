"""Stacks of processes as py-spy, faulthandler, `traceback` and gdb print them, several processes in one text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.intake.launcher_text import ranks_in
from keepstep.intake.log_lines import Line
from keepstep.records.evidence import Frame, StackSample

__all__ = ["MOST_FRAMES", "StackCollector"]

MOST_FRAMES = 256
"""Frames kept of one stack, the innermost."""
_MOST_OPEN = 4096
_MOST_HEADERS = 4096

_PREFIX = re.compile(
    (
        r"^\s*(?:\[\d+,(?P<mpi>\d+)\]<std\w+>:?|\[rank(?P<torch>\d+)\]:?"
        r"|\[default(?P<local>\d+)\]:?|(?P<srun>\d{1,6}):(?= )"
        r"|(?P<node>[a-z][\w.-]*\d[\w.-]*):(?= ))"
    ),
    re.IGNORECASE,
)
_THREAD = re.compile(
    (
        r"^\s*(?P<now>Current )?Thread (?P<id>0x[0-9a-f]+|\d+) ?(?:\((?P<state>idle"
        r"|active(?:\+gil)?|most recent call (?P<order>first"
        r"|last))[^)]*\))?:? ?(?:\"(?P<name>[^\"]*)\")?.*$"
    ),
    re.IGNORECASE,
)
_GDB_THREAD = re.compile(
    r"^Thread (?P<id>\d+) \((?:Thread|LWP) [^\n]*?(?:LWP (?P<lwp>\d+))?\)+(?:\s\"(?P<name>[^\"]*)\")?"
)
_PROCESS = re.compile(r"^\s*(?:#+ |=+ )?(?:Process|PID)\W{1,3}(?P<pid>\d+)\b(?P<command>.*)$", re.IGNORECASE)
_IN_COMMAND = re.compile(r"(?:--?|\b)(?:node_)?(?P<kind>local[_-]rank|rank)[ =:](?P<rank>\d+)")
_NODE = re.compile(
    (
        r"^\W*(?:node|host(?:name)?)\W{0,3}(?P<node>(?!in\b)[\w.-]*\d[\w.-]*)\W*$|^(?:==+>?|--+"
        r"|##+)\s*(?P<node_2>[a-z][\w.-]*\d[\w.-]*)\s*(?:<?==+|--+|##+)?$"
    ),
    re.IGNORECASE,
)
_RANK = re.compile(
    (
        r"^\W*(?:global )?rank\W{0,3}(?P<rank>\d{1,6})\b(?=[^A-Za-z]*(?:$|pid|host|node|local"
        r"|stack|thread|process|on |py-spy|:|\())(?!.*\b(?:is|was|has|are)\b)(?P<rest>.*)$"
    ),
    re.IGNORECASE,
)
_SPY = re.compile(r"^\s+(?P<function>[^\s()][^()]*?(?:\([^()]*\))?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)\s*$")
_FAULT = re.compile(r"^\s*File \"(?P<file>[^\"]+)\", line (?P<line>\d+|\?\?\?) in (?P<function>\S+)")
_TRACE = re.compile(r"^\s*File \"(?P<file>[^\"]+)\", line (?P<line>\d+), in (?P<function>\S+)")
_GDB = re.compile(
    r"^#\d+\s+(?:0x[0-9a-f]+ in )?(?P<function>[\w:~<>@.,* -]+?) \([^\n]*?\)(?: (?:at"
    r"|from) (?P<file>[^\s:]+)(?::(?P<line>\d+))?)?$"
)
_KERNEL = re.compile(r"^\[<[0-9a-f]*>\] (?P<function>\w+)\+0x")
_FIELDS = re.compile(r"(?P<key>pid|host|node)\W{1,2}(?P<value>[\w.-]+)", re.IGNORECASE)


_HINTS = ("thread", "process", "pid", "rank", "node", "host", "== ", "-- ", "## ")


_ROW = re.compile(
    r"^\W*ranks?\W{0,3}(?P<ranks>\d+(?:\s*(?:,|-|and)\s*\d+)*)\W{1,4}(?=[A-Za-z_<][\w.<>]* \([^()]+:\d+\))",
    re.IGNORECASE,
)
_ROW_FRAME = re.compile(r"([\w.<>]+) \(([^():]+):(\d+)\)")
_MOST_IN_ROW = 4096


class _Block:
    """The stack that is being read for one source of lines."""

    def __init__(self) -> None:
        self.threads: list[tuple[str, str, bool | None]] = []
        self.frames: list[Frame] = []
        self.reversed = False
        self.pid: int | None = None
        self.rank: int | None = None
        self.node: str | None = None


class StackCollector:
    """Takes lines and gives stacks. Lines of several processes may be interleaved if each has a prefix."""

    def __init__(self, path: str, *, rank: int | None = None) -> None:
        """`rank` is what the file's name says, for stacks that do not say it."""
        self._path = path
        self._rank = rank
        self._node: str | None = None
        self._blocks: dict[str, _Block] = {}
        self._open: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether a stack is being read."""
        return bool(self._open)

    def heeds(self, text: str) -> bool:
        """Whether a line begins a stack or stands above one. Lines that differ only in numbers are alike in this."""
        if not _may_begin(text):
            return False
        prefix = _PREFIX.match(text)
        rest = text[prefix.end() :] if prefix else text
        return any(form.match(rest) for form in (_ROW, _THREAD, _GDB_THREAD, _NODE, _PROCESS, _RANK))

    def feed(self, line: Line) -> Iterator[StackSample]:
        """The stacks that are complete with this line."""
        if not self._open and not self.heeds(line.text):
            return
        prefix = _PREFIX.match(line.text)
        source = prefix[0].strip() if prefix else ""
        text = line.text[prefix.end() :] if prefix else line.text
        if source not in self._blocks and len(self._blocks) >= _MOST_OPEN:
            return
        block = self._blocks.setdefault(source, _Block())
        if prefix and block.rank is None:
            block.rank = next((int(prefix[key]) for key in ("mpi", "torch", "srun") if prefix[key]), None)
            block.node = prefix["node"]
        yield from self._look(block, text)
        if block.threads or block.frames:
            self._open.add(source)
        else:
            self._open.discard(source)

    def finish(self) -> Iterator[StackSample]:
        """The stacks that were still being read when the text ended."""
        for block in self._blocks.values():
            yield from self._close(block)

    def _look(self, block: _Block, text: str) -> Iterator[StackSample]:
        if not block.threads and (row := _ROW.match(text)):
            yield from self._row(row, text)
            return
        thread = _THREAD.match(text) or _GDB_THREAD.match(text)
        if thread:
            if block.frames:
                yield from self._close(block)
            if len(block.threads) < _MOST_HEADERS:
                block.threads.append(_thread(thread))
            return
        if block.threads and (frame := _frame(text)):
            block.reversed = block.reversed or _TRACE.match(text) is not None
            if len(block.frames) < MOST_FRAMES or block.reversed:
                block.frames = [*block.frames[-MOST_FRAMES:], frame]
            return
        if block.frames and (not text.strip() or not text.startswith((" ", "\t"))):
            yield from self._close(block)
        self._heading(block, text)

    def _row(self, row: re.Match[str], text: str) -> Iterator[StackSample]:
        """`ranks 0-6: all_reduce (file:1) <- step (file:2)`: a stack on one line, innermost first, of several ranks."""
        frames = tuple(Frame(name, file, int(line)) for name, file, line in _ROW_FRAME.findall(text[row.end() :]))
        for rank in ranks_in(row["ranks"])[:_MOST_IN_ROW]:
            yield StackSample(frames=frames[:MOST_FRAMES], rank=rank, thread="MainThread", path=self._path)

    def _heading(self, block: _Block, text: str) -> None:
        """Names of node, rank and process that stand above stacks."""
        if len(text) > 400:
            return
        if node := _NODE.match(text):
            self._node, block.pid, block.rank = node["node"] or node["node_2"], None, block.rank
        elif process := _PROCESS.match(text):
            block.pid = int(process["pid"])
            named = _IN_COMMAND.search(process["command"])
            if named and named["kind"] == "rank":
                block.rank = int(named["rank"])
        elif rank := _RANK.match(text):
            block.rank, block.pid = int(rank["rank"]), None
            for item in _FIELDS.finditer(rank["rest"]):
                if item["key"].lower() == "pid" and item["value"].isdecimal():
                    block.pid = int(item["value"])
                elif item["key"].lower() != "pid":
                    block.node = item["value"]

    def _close(self, block: _Block) -> Iterator[StackSample]:
        """One stack for each thread named above it."""
        frames = tuple(reversed(block.frames)) if block.reversed else tuple(block.frames)
        for identity, name, active in block.threads if frames else ():
            own = int(identity) if identity.isdigit() and block.pid is None and len(identity) < 10 else block.pid
            yield StackSample(
                frames=frames[:MOST_FRAMES],
                rank=block.rank if block.rank is not None else self._rank,
                node=block.node or self._node,
                pid=own,
                thread=name or identity,
                active=active,
                path=self._path,
            )
        block.threads, block.frames, block.reversed = [], [], False


def _may_begin(text: str) -> bool:
    """Whether a line could be a heading above a stack: looked at for every line, so cheaply."""
    low = text.lower()
    return any(word in low for word in _HINTS)


def _thread(match: re.Match[str]) -> tuple[str, str, bool | None]:
    groups = match.groupdict()
    state = (groups.get("state") or "").lower()
    active = state.startswith("active") if state.startswith(("active", "idle")) else None
    identity = groups.get("lwp") or groups["id"]
    return identity, groups.get("name") or ("current" if groups.get("now") else ""), active


def _frame(text: str) -> Frame | None:
    for form in (_SPY, _FAULT, _TRACE, _GDB, _KERNEL):
        match = form.match(text)
        if match:
            groups = match.groupdict()
            line = groups.get("line") or ""
            return Frame(
                groups["function"].strip()[:200],
                (groups.get("file") or "")[:300],
                int(line) if line.isdigit() else None,
            )
    return None
