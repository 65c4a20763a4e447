"""What may be imported, read or swallowed where: the rules that the import linter cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from blueprint import PACKAGE, c_files, dotted, modules, place, tree_of

CLOCK_DOORS = {"service/clock.py", "training/recorder.py", "training/plane/clock.c"}
READS_CLOCK = re.compile(
    r"(^|\.)time\.(time|monotonic|perf_counter|process_time|thread_time|clock_gettime|localtime|gmtime)(_ns)?$"
    r"|(^|\.)(datetime|date)\.(now|utcnow|today)$|loop(\(\))?\.time$"
)
READS_CLOCK_IN_C = re.compile(r"\b(clock_gettime|gettimeofday|timespec_get|clock|time|__rdtsc|ftime)\s*\(")
OWN_VARIABLE = re.compile(r"[\"'](KEEPSTEP_[A-Z0-9_]+)[\"']")
OWN_VARIABLES = 3


@pytest.mark.parametrize("module", ["keepstep", "keepstep.cli", "keepstep.training.fabric"])
def test_importing_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'numpy'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def calls(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def test_nothing_is_imported_behind_the_linter():
    hidden = ("importlib.import_module", "import_module", "__import__", "exec", "eval")
    assert [place(path, node.lineno) for path in modules() for node, name in calls(path) if name in hidden] == []


def clock_readers() -> set[str]:
    found = set()
    for path in modules():
        nodes = ast.walk(tree_of(path))
        reads = any(isinstance(node, ast.Attribute) and READS_CLOCK.search(dotted(node)) for node in nodes)
        takes = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(name.name != "sleep" for name in node.names)
            for node in ast.walk(tree_of(path))
        )
        if reads or takes:
            found.add(str(path.relative_to(PACKAGE)))
    for path in c_files():
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
        if READS_CLOCK_IN_C.search(code):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def test_three_files_read_the_clock():
    assert clock_readers() - CLOCK_DOORS == set()


def test_own_environment_variables_are_few():
    text = "\n".join(path.read_text() for path in [*modules(), *c_files()])
    assert len(set(OWN_VARIABLE.findall(text))) <= OWN_VARIABLES, set(OWN_VARIABLE.findall(text))


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it takes everything and does not raise again at its end."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = handler.type is None or any(dotted(kind) in ("Exception", "BaseException") for kind in kinds if kind)
    last = handler.body[-1]
    return broad and not (isinstance(last, ast.Raise) and last.exc is None)


def test_no_error_is_swallowed():
    handlers = [
        (path, node)
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert [place(path, node.lineno) for path, node in handlers] == []


def test_suppress_is_narrow():
    broad = ("Exception", "BaseException")
    assert [
        place(path, node.lineno)
        for path in modules()
        for node, name in calls(path)
        if name.endswith("suppress") and any(dotted(kind) in broad for kind in node.args)
    ] == []


def test_nothing_foreign_is_executed():
    """G-17: no pickle anywhere in the package; torch.load only with weights_only=True."""
    taken = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & {
                "pickle",
                "cPickle",
                "dill",
                "cloudpickle",
                "marshal",
                "shelve",
            }:
                taken.append(place(path, node.lineno))
        for node, name in calls(path):
            safe = any(
                word.arg == "weights_only" and dotted(word.value) == "" and ast.unparse(word.value) == "True"
                for word in node.keywords
            )
            if name == "torch.load" and not safe:
                taken.append(place(path, node.lineno))
    assert taken == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("try:\n f()\nexcept Exception:\n pass", True),
        ("try:\n f()\nexcept (OSError, BaseException) as e:\n log(e)", True),
        ("try:\n f()\nexcept:\n pass", True),
        ("try:\n f()\nexcept BaseException:\n undo()\n raise", False),
        ("try:\n f()\nexcept OSError:\n pass", False),
    ],
)
def test_the_rule_sees_what_it_should(code, wrong):
    (handler,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ExceptHandler)]
    assert swallows(handler) is wrong
