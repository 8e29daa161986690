"""How many lines of a model each way to make a pipeline changes, as docs/any-model.md says; all compute the same."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MLP  # noqa: F401  # sets up what models need
from pipelines import submeshes
from unmarked import normal
from ways_to_mark import WAYS

import multimesh as mm

PAGE = Path(__file__).parents[2] / "docs/any-model.md"


def namespace(source):
    import flax.linen as nn
    from flax import nnx

    found = {"jax": jax, "jnp": jnp, "mm": mm, "functools": functools, "nn": nn, "nnx": nnx}
    found["meshes"] = submeshes(4, (1,))
    exec(source, found)
    return found


def parameters(name, made, x):
    if name == "Flax Linen":
        return made["Model"]().init(jax.random.key(0), x)
    if name == "Flax NNX":
        return made["state"]
    layers = [{"up": normal(2 * i, 16, 32), "down": normal(2 * i + 1, 32, 16)} for i in range(8)]
    return jax.tree.map(lambda *rows: np.stack(rows), *layers) if name == "scan over a stack" else layers


@pytest.mark.flax
@pytest.mark.telling("U-Net", "Flax NNX")
@pytest.mark.longer
@pytest.mark.parametrize("name", WAYS)
def test_each_way_has_the_numbers_of_plain_jit(name):
    pytest.importorskip("flax.nnx")
    batch = {"x": normal(99, 8, 16), "y": normal(98, 8, 16)}
    plain = namespace(WAYS[name].source)
    params = parameters(name, plain, batch["x"])
    wanted = jax.jit(jax.value_and_grad(plain["loss"]))(params, batch)
    for way in ("hand", "register", "pipeline"):
        made = namespace(WAYS[name].edited(way))
        step = mm.jit(jax.value_and_grad(made["loss"]))
        with made["place"]() if way == "register" else mm.enable_task_fusion():
            got, plan = step(params, batch), step.plan(params, batch)
        assert len(plan.submeshes) == 4, way
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)


def test_the_page_has_the_lines_that_change():
    page = PAGE.read_text()
    for name, ways in WAYS.items():
        row = re.search(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)
        assert row, name
        numbers = [int(cell) for cell in row[1].split("|")]
        assert numbers == [len(ways.source.splitlines()), *map(ways.changed, ("hand", "register", "pipeline"))], name
