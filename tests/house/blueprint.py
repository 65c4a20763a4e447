"""What the house tests look at: source files as syntax trees, documents as blocks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "keepstep"
TREES = ("src", "tests", "bench", "examples")
OUTSIDE = {".git", ".venv", "build", "dist", "node_modules", "keepstep-runs", "runs", "results"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    """All Python files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def c_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h")])


def python_files(*trees: str) -> list[Path]:
    return sorted(path for tree in trees for path in (ROOT / tree).rglob("*.py"))


def documents() -> list[Path]:
    """All Markdown files that belong to the project."""
    return [path for path in written_files() if path.suffix == ".md"]


def written_files() -> list[Path]:
    """Every file a person wrote: not built, not fetched, not measured."""
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in OUTSIDE or part.endswith(("_cache", ".egg-info", "__")) for part in path.parent.parts)
        and not any(part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts[:-1])
    )


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def place(path: Path, line: int = 0) -> str:
    name = str(path.relative_to(ROOT))
    return f"{name}:{line}" if line else name


@dataclass(frozen=True)
class Definition:
    """One function or method; `owner` is its class (None for functions)."""

    path: Path
    node: Function
    owner: ast.ClassDef | None
    public: bool

    @property
    def name(self) -> str:
        return f"{place(self.path, self.node.lineno)} {self.node.name}"

    @property
    def lines(self) -> int:
        """Lines from `def` to the end, the docstring left out."""
        last = self.node.end_lineno or self.node.lineno
        return last - self.node.lineno + 1 - docstring_lines(self.node)

    @property
    def parameters(self) -> list[ast.arg]:
        given = self.node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        return named[1:] if self.bound else named

    @property
    def positional(self) -> list[ast.arg]:
        named = [*self.node.args.posonlyargs, *self.node.args.args]
        return named[1:] if self.bound else named

    @property
    def bound(self) -> bool:
        decorators = {ast.unparse(decorator) for decorator in self.node.decorator_list}
        return self.owner is not None and "staticmethod" not in decorators


def docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, Function) or ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def definitions(path: Path) -> Iterator[Definition]:
    """All functions and methods of a file, nested ones too."""
    yield from _inside(tree_of(path), path, owner=None, public=True)


def _inside(node: ast.AST, path: Path, *, owner: ast.ClassDef | None, public: bool) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            dunder = child.name.startswith("__") and child.name.endswith("__")
            seen = public and (dunder or not child.name.startswith("_"))
            yield Definition(path, child, owner, seen)
            yield from _inside(child, path, owner=None, public=False)
        elif isinstance(child, ast.ClassDef):
            yield from _inside(child, path, owner=child, public=public and not child.name.startswith("_"))
        else:
            yield from _inside(child, path, owner=owner, public=public)


def public_classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node


def listed_names(path: Path) -> set[str] | None:
    """The names in `__all__`, None where there is none."""
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))
    return None


def defined_names(path: Path) -> set[str]:
    """Names the module itself makes at its top level, private ones left out."""
    found: set[str] = set()
    for node in _top_level(tree_of(path).body):
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and dotted(node.value) not in ("TypeVar()", "ParamSpec()"):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def imported_names(path: Path) -> set[str]:
    """Names a module takes from others at its top level."""
    found: set[str] = set()
    for node in _top_level(tree_of(path).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, with `()` for calls on the way; else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    return ""


@dataclass(frozen=True)
class Block:
    """One fenced block of a document. `note` is the HTML comment right above it (empty: none)."""

    path: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def name(self) -> str:
        return place(self.path, self.line)


_FENCE = re.compile(
    r"(?:^<!--\s*(?P<note>[^\n]*?)\s*-->\n)?^```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^```\s*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(*languages: str) -> list[Block]:
    """All fenced blocks of all documents in one of `languages`."""
    found = []
    for path in documents():
        text = path.read_text()
        for match in _FENCE.finditer(text):
            if match["language"] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(path, line, match["language"], match["text"], match["note"] or ""))
    return found
