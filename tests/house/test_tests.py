"""Rules for the tests themselves: no sleeps, no mocks, nothing printed, and each can fail."""

from __future__ import annotations

import ast
import re

from blueprint import ROOT, definitions, dotted, place, python_files, tree_of

QUIET = ("tests/unit", "tests/scenarios", "tests/simulation")


def nodes(*trees: str):
    for path in python_files(*trees):
        for node in ast.walk(tree_of(path)):
            yield path, node


def yields(call: ast.Call) -> bool:
    """`sleep(0)` lets others run and takes no time."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def test_fast_tests_do_not_sleep():
    sleeps = re.compile(r"(^|\.)sleep$")
    assert [
        place(path, node.lineno)
        for path, node in nodes(*QUIET)
        if isinstance(node, ast.Call) and sleeps.search(dotted(node.func)) and not yields(node)
    ] == []


def test_fast_tests_use_twins_and_not_mocks():
    def mocks(node: ast.AST) -> bool:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        return any("mock" in name.lower() for name in [*names, module])

    assert [place(path, node.lineno) for path, node in nodes(*QUIET) if mocks(node)] == []


def test_tests_print_nothing():
    """Scripts that tests start as processes may; they do not begin with test_."""
    assert [
        place(path, node.lineno)
        for path, node in nodes("tests")
        if path.name.startswith("test_") and isinstance(node, ast.Call) and dotted(node.func) == "print"
    ] == []


def can_fail(function) -> bool:
    """An assert, a `pytest.raises`, or a call of something named `check...`, `expect...`, `assert...`, `run_...`."""
    checks = re.compile(r"(^|\.|_)(raises|warns|fail|check|expect|assert|verify|compare|same|run|replay)(_|$|[a-z])")
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and checks.search(dotted(node.func)))
        for node in ast.walk(function.node)
    )


def test_every_test_can_fail():
    functions = [function for path in python_files("tests") for function in definitions(path)]
    tests = [function for function in functions if function.node.name.startswith("test_")]
    assert [function.name for function in tests if not can_fail(function)] == []


def test_every_test_file_is_found_by_pytest():
    """A file with tests that is not named test_*.py would never run."""
    lost = [
        place(path)
        for path in python_files("tests")
        if not path.name.startswith("test_")
        and any(function.node.name.startswith("test_") and function.owner is None for function in definitions(path))
    ]
    assert lost == []
    assert (ROOT / "tests" / "house").is_dir()
