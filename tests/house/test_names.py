"""Names: each file name once, no drawers for everything, and `__all__` says exactly what is public."""

from __future__ import annotations

import collections
import subprocess
import sys

import pytest
from blueprint import c_files, defined_names, imported_names, listed_names, modules, place

DRAWERS = {"base", "common", "core", "helper", "helpers", "manager", "managers", "misc", "shared", "util", "utils"}


def test_each_file_name_is_used_once():
    names = collections.Counter(
        path.name for path in [*modules(), *c_files()] if path.name not in ("__init__.py", "__main__.py")
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_no_module_is_a_drawer():
    assert [
        place(path) for path in [*modules(), *c_files()] if path.stem in DRAWERS or path.parent.name in DRAWERS
    ] == []


@pytest.mark.parametrize("path", [pytest.param(path, id=place(path)) for path in modules()])
def test_all_lists_what_is_visible(path):
    listed = listed_names(path)
    assert listed is not None, "no __all__"
    defined = defined_names(path)
    assert defined - listed == set(), "public, but not in __all__"
    extra = listed - defined - {"__version__"}
    assert extra <= imported_names(path), "in __all__, but not there"


def test_the_front_door():
    """`dir(keepstep)` is its `__all__`, and each name can be had."""
    code = "import keepstep as k; print(sorted(k.__all__) == dir(k), *(getattr(k, name) for name in dir(k)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("True"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    import keepstep

    with pytest.raises(AttributeError, match="no attribute 'joln'"):
        _ = keepstep.joln
