"""Everything public says what it is and which types it takes."""

from __future__ import annotations

import ast

from blueprint import definitions, modules, place, public_classes, tree_of


def without_docstring(node) -> bool:
    return not (ast.get_docstring(node) or "").strip()


def setter(function) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in function.node.decorator_list)


def test_every_module_has_a_docstring():
    assert [place(path) for path in modules() if without_docstring(tree_of(path))] == []


def test_every_public_class_has_a_docstring():
    assert [
        place(path, node.lineno) for path in modules() for node in public_classes(path) if without_docstring(node)
    ] == []


def test_every_public_function_has_a_docstring():
    """Magic methods say what they do by their name, setters by their property."""
    functions = [function for path in modules() for function in definitions(path) if function.public]
    spoken = [function for function in functions if not function.node.name.startswith("__") and not setter(function)]
    assert [function.name for function in spoken if without_docstring(function.node)] == []


def test_everything_public_is_annotated():
    bare = []
    for path in modules():
        for function in definitions(path):
            if not function.public:
                continue
            variadic = [arg for arg in (function.node.args.vararg, function.node.args.kwarg) if arg]
            if function.node.returns is None or any(arg.annotation is None for arg in function.parameters + variadic):
                bare.append(function.name)
    assert bare == []
