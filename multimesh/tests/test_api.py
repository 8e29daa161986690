"""The public names: under both import paths, in the reference, with examples that run."""

import ast
import collections
import doctest
import functools
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import multimesh as mm


def test_two_import_paths():
    original = importlib.import_module("multimesh.jax")
    names = {"jit", "microbatch", "register_task", "schedules", "task", "with_sharding_constraint"}
    assert names <= set(mm.__all__)
    assert set(mm.__all__) <= set(original.__all__)
    other_forms = {
        name for name in original.__all__ if getattr(getattr(original, name), "__module__", "") == original.__name__
    }
    for name in set(mm.__all__) - other_forms:
        assert getattr(original, name) is getattr(mm, name)


def test_every_public_name_is_there():
    assert all(getattr(mm, name) is not None for name in mm.__all__)
    with pytest.raises(AttributeError):
        _ = mm.no_such_name


def test_the_reference_names_every_public_name_once():
    rooms = {name for name in mm.__all__ if isinstance(getattr(mm, name), types.ModuleType)}
    public = [name for name in mm.__all__ if name not in rooms]
    public += [f"{room}.{name}" for room in rooms for name in getattr(mm, room).__all__]
    page = Path(__file__).parents[2] / "docs" / "api.md"
    entries = [name for line in re.findall(r"<!-- made: api (.*) -->", page.read_text()) for name in line.split()]
    assert sorted(set(public) - set(entries)) == []
    assert [name for name, times in collections.Counter(entries).items() if times > 1] == []


FIRST = """
import sys, types
import jax, jax.experimental.transfer

def fresh():
    for name in [name for name in sys.modules if name.partition(".")[0] == "multimesh"]:
        del sys.modules[name]
    import multimesh
    return multimesh

for name in fresh().__all__:
    namespace = {"attribute": getattr(fresh(), name)}
    exec(f"from multimesh import {name}", namespace)
    rooms = [how for how in ("attribute", name) if isinstance(namespace[how], types.ModuleType)]
    print(name, *(f"{how}:{namespace[how].__name__}" for how in rooms))
"""


def test_each_public_name_may_be_the_first_that_is_used():
    """Names are imported when first used; a module of a function's name would come in its place."""
    process = subprocess.run([sys.executable, "-c", FIRST], check=True, capture_output=True, text=True)
    modules_of = dict(line.partition(" ")[::2] for line in process.stdout.splitlines())
    assert list(modules_of) == mm.__all__
    modules = {name: f"multimesh.{name}" for name in ("distributed", "launch", "schedules")}
    modules |= {name: f"multimesh_numerics.{name}" for name in ("fft", "grids", "linalg")}
    modules |= {"planner": "multimesh_planner"}
    rooms = {name: f"attribute:{module} {name}:{module}" for name, module in modules.items()}
    assert {name: modules for name, modules in modules_of.items() if modules} == rooms


def test_one_name_has_one_meaning():
    """No two modules have one name, and no two classes."""
    root = Path(mm.__file__).parent
    paths = [path for path in root.rglob("*.py") if not path.stem.startswith("__")]
    classes = [
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for names in ([path.stem for path in paths], classes):
        assert [name for name, count in collections.Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("name", ["task", "jit", "pipeline"])
def test_the_example_of_a_docstring_runs(name):
    names = {"Mesh": Mesh, "functools": functools, "jax": jax, "jnp": jnp, "mm": mm, "np": np}
    assert "+SKIP" not in getattr(mm, name).__doc__
    examples = doctest.DocTestFinder(recurse=False).find(getattr(mm, name), name, globs=names)
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(result.attempted for result in results) >= 3
    assert sum(result.failed for result in results) == 0
