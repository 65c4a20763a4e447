"""Files, functions and parameter lists stay small: a stop for each, and the median as the aim."""

from __future__ import annotations

import statistics

import pytest
from blueprint import TREES, Definition, c_files, definitions, modules, place, python_files

LINES_IN_A_FILE, MEDIAN_FILE = 500, 150
LINES_IN_A_FUNCTION, MEDIAN_FUNCTION = 60, 8
PARAMETERS, POSITIONAL = 6, 2

# torch calls the methods of a process group with its own signatures; typer makes options of a command's parameters.
FOREIGN_CALLERS = {"collectives.py"}


def package_functions() -> list[Definition]:
    return [definition for path in modules() for definition in definitions(path)]


def free_to_choose(definition: Definition) -> bool:
    """Whether we, not Python or torch, choose the parameters."""
    dunder = definition.node.name.startswith("__") and definition.node.name != "__init__"
    foreign = definition.path.name in FOREIGN_CALLERS or definition.path.parent.name == "cli"
    override = any(
        "override" in decorator.id for decorator in definition.node.decorator_list if hasattr(decorator, "id")
    )
    return not (dunder or foreign or override)


def positional_stop(definition: Definition) -> int:
    """Two; the machines of control keep the shape `(state, event, now)`."""
    machine = definition.path.parent.name == "control" and definition.parameters[0].arg == "state"
    return 3 if machine else POSITIONAL


def test_no_file_is_longer_than_the_stop():
    files = [*python_files(*TREES), *c_files()]
    counts = {place(path): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in counts.items() if count > LINES_IN_A_FILE} == {}


def test_the_median_file_is_short():
    counts = [len(path.read_text().splitlines()) for path in modules() if path.name != "__init__.py"]
    assert statistics.median(counts) <= MEDIAN_FILE


def test_no_function_is_longer_than_the_stop():
    functions = [definition for path in python_files("src", "bench", "examples") for definition in definitions(path)]
    too_long = {function.name: function.lines for function in functions if function.lines > LINES_IN_A_FUNCTION}
    assert too_long == {}


def test_the_median_function_is_short():
    assert statistics.median(function.lines for function in package_functions()) <= MEDIAN_FUNCTION


def test_few_parameters_and_keywords_after_the_second():
    wrong = {}
    for function in package_functions():
        if free_to_choose(function):
            total, positional = len(function.parameters), len(function.positional)
            if total > PARAMETERS or (positional > POSITIONAL and positional > positional_stop(function)):
                wrong[function.name] = f"{total} parameters, {positional} positional"
    assert wrong == {}


@pytest.mark.parametrize("count", [LINES_IN_A_FUNCTION, LINES_IN_A_FUNCTION + 1])
def test_the_measure_counts_code_and_not_docstrings(count, tmp_path):
    path = tmp_path / "sample.py"
    path.write_text('def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * (count - 1))
    (function,) = definitions(path)
    assert function.lines == count
