"""Examples in docstrings of the names that a newcomer meets first are run."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import multimesh as mm

NAMES = {"Mesh": Mesh, "functools": functools, "jax": jax, "jnp": jnp, "mm": mm, "np": np}


@pytest.mark.parametrize("name", ["task", "jit", "pipeline"])
def test_the_example_of_a_docstring_runs(name):
    assert "+SKIP" not in getattr(mm, name).__doc__
    examples = doctest.DocTestFinder(recurse=False).find(getattr(mm, name), name, globs=dict(NAMES))
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(result.attempted for result in results) >= 3
    assert sum(result.failed for result in results) == 0
