"""What someone new to the library would try first: one step of training each, with the values and homes of plain jit.

A case is ``case(stage, loop) -> (step, state, batch)`` and is written once: ``stage`` places a part and ``loop``
cuts the batch, or both are plain JAX. In the state and the results what lies below the key ``"s1"`` belongs to stage 1.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from newcomer_steps import (
    BATCHES,
    CASES,
    DEVICES,
    STAGES,
    TELLING,
    dense,
    layer,
    loss_of,
    of_block,
    per_stage,
    regression,
    squared_error,
    trained,
)
from pipelines import Split, assert_same, microbatched, submeshes

import multimesh as mm

pytestmark = pytest.mark.longer


def home(path):
    """Stage of the innermost key like ``"s1"`` in a path of a pytree."""
    found = re.findall(r"\['s(\d)'\]", jax.tree_util.keystr(path))
    return int(found[-1]) if found else None


def put(split, tree):
    def at_home(path, x):
        s = home(path)
        return x if s is None else jax.device_put(x, NamedSharding(split.mesh(s), P()))

    return jax.tree.map_with_path(at_home, tree)


def assert_all_at_home(split, tree):
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        s = home(path)
        assert s is None or set(x.devices()) == split.devices(s), f"{jax.tree_util.keystr(path)}: {x.devices()}"


def check(case, split, compilations, rtol=1e-5):
    """Two steps: values, homes, donation; the second compiles nothing."""
    step, want, batch = case(plain, microbatched)
    reference = jax.jit(step)
    step, state, _ = case(split, mm.microbatch)
    placed, got = mm.jit(step, donate_argnums=0), put(split, state)
    for i in range(2):
        want, expected = reference(want, batch)
        before = len(compilations)
        got, result = placed(got, batch)
        assert i == 0 or len(compilations) == before
        assert_same((jax.tree.map(jnp.copy, got), result), (want, expected), rtol)
        assert_all_at_home(split, (got, result))
    return placed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in TELLING else pytest.mark.full) for n in CASES])
def test_a_step(name, compilations):
    check(CASES[name], Split(submeshes(STAGES.get(name, 2), (1,))), compilations)


def mesh(*devices, shape=None):
    return Mesh(DEVICES[list(devices)].reshape(shape or -1), ("data", "model")[: len(shape or "1")])


@pytest.mark.parametrize(
    "meshes",
    [
        (mesh(0, 2, 4, 6), mesh(1, 3, 5, 7)),
        (mesh(5, 6, 7), mesh(0, 1, 2, 3, 4)),
    ],
    ids=["every other", "3 to 5"],
)
def test_devices_in_any_order(meshes, compilations):
    check(of_block(layer), Split(meshes), compilations)


def test_functions_that_share_arrays(compilations):
    """One makes the parameters in tasks, one trains and donates them, one evaluates."""
    split = Split(submeshes(2, (1,)))
    step, _, batch = of_block(layer)(split, mm.microbatch)

    def init(stage, key):
        return {
            f"s{s}": stage(s, lambda k, s=s: jax.tree.map(lambda x: jax.random.normal(k, x.shape), dense(s)))(key)
            for s in range(2)
        }

    key = jax.random.key(0)
    params, want = mm.jit(functools.partial(init, split))(key), jax.jit(functools.partial(init, plain))(key)
    assert_all_at_home(split, params)
    train, evaluate = mm.jit(step, donate_argnums=0), mm.jit(loss_of(split))
    reference = jax.jit(lambda p, b: (loss_of(plain)(p, b), *of_block(layer)(plain, microbatched)[0](p, b)))
    for i in range(3):
        before = len(compilations)
        got = evaluate(params, batch)
        params, value = train(params, batch)
        assert i == 0 or len(compilations) == before
        expected, want, wanted = reference(want, batch)
        assert_same((got, value, jax.tree.map(jnp.copy, params)), (expected, wanted, want))


def test_callbacks_in_tasks_happen_once_a_microbatch(capfd):
    """In the order that plain jit has within a stage, where they are ordered."""
    seen = {0: [], 1: []}

    def case(stage):
        def block(s):
            def f(p, x):
                def note(v):
                    seen[s].append(float(v))
                    return np.float32(2)

                jax.debug.print("stage {}", s)
                x = x * io_callback(
                    note, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(x.sum()), ordered=True
                )
                return layer(p, x)

            return f

        def loss(params, batch):
            x = stage(0, block(0))(params["s0"], batch["x"])
            return squared_error(stage(1, block(1))(params["s1"], x), batch["y"])

        loop = microbatched if stage is plain else mm.microbatch
        return lambda params, batch: trained(loss, loop, params, batch)

    results, notes, lines = [], [], []
    for jit, stage in ((jax.jit, plain), (mm.jit, Split(submeshes(2, (1,))))):
        results.append(jit(case(stage))(per_stage(2), regression()))
        jax.effects_barrier()
        notes.append({s: np.array(seen[s]) for s in seen})
        lines.append(sorted(capfd.readouterr().out.splitlines()))
        seen[0].clear(), seen[1].clear()
    assert_same(results[1], results[0])
    assert len(notes[0][0]) == BATCHES
    assert_same(notes[1], notes[0])
    assert lines[0] == lines[1] == ["stage 0"] * BATCHES + ["stage 1"] * BATCHES
