"""The public names, under both import paths, and which module imports which."""

import ast
import graphlib
import importlib
from pathlib import Path

import pytest

import multimesh as mm


def test_two_import_paths():
    original = importlib.import_module("multimesh.jax")
    names = {"jit", "microbatch", "register_task", "schedules", "task", "with_sharding_constraint"}
    assert names <= set(mm.__all__)
    assert set(mm.__all__) <= set(original.__all__)
    other_forms = set(importlib.import_module("multimesh.original").__all__)  # test_original_names.py calls these
    for name in set(mm.__all__) - other_forms:
        assert getattr(original, name) is getattr(mm, name)


def test_every_public_name_is_there():
    assert all(getattr(mm, name) is not None for name in mm.__all__)
    with pytest.raises(AttributeError):
        _ = mm.no_such_name


def imported(path, modules):
    """Modules of the library that a file imports at its top or within functions; not those of types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from whole & set(modules) or {node.module} & set(modules)
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & set(modules)


def test_no_module_imports_itself_through_others():
    root = Path(mm.__file__).parent
    paths = {".".join(p.relative_to(root.parent).with_suffix("").parts): p for p in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: set(imported(path, modules)) - {name} for name, path in modules.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names them
    for name in order:
        print(f"{name}: {' '.join(sorted(graph[name]))}")
    assert len(order) == len(modules)
