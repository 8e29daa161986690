"""Products whose only reader transposes them are made transposed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from multimesh.ir.evaluate import evaluate
from multimesh.passes.planning.fold_transposes import fold_products
from programs import MESHES, names, on, place_program

import multimesh as mm

KEY = np.random.default_rng(0)


def values(*shape):
    return KEY.normal(size=shape).astype(np.float32)


def gradient_of_weight(x, w, dy):
    return jax.vjp(lambda w: jnp.einsum("btd,dhe->bthe", x, w), w)[1](dy)[0]


def gradient_of_table(x, w, dy):
    """As of an embedding that is the head as well: the gradient is transposed twice."""
    return jax.vjp(lambda w: x @ w.T, w)[1](dy)[0]


def batched(x, y):
    return jnp.swapaxes(lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), 1, 2)


def precise(x, y):
    return lax.dot(x, y, precision=(lax.Precision.HIGHEST, lax.Precision.DEFAULT)).T


def read_twice(x, y):
    z = x @ y
    return z.T + jnp.sum(z)


def returned_too(x, y):
    z = x @ y
    return z.T, z


def other_order(x, y):
    return jnp.transpose(lax.dot_general(x, y, (((2,), (0,)), ((), ()))), (1, 0, 2))


FOLDED = {
    "gradient of a weight": (gradient_of_weight, (values(2, 3, 4), values(4, 2, 5), values(2, 3, 2, 5))),
    "gradient of a table": (gradient_of_table, (values(2, 3, 4), values(5, 4), values(2, 3, 5))),
    "batched": (batched, (values(2, 3, 4), values(2, 4, 5))),
}
KEPT = {
    "more precise in one operand": (precise, (values(3, 4), values(4, 5))),
    "read twice": (read_twice, (values(3, 4), values(4, 5))),
    "a result itself": (returned_too, (values(3, 4), values(4, 5))),
    "other order": (other_order, (values(2, 3, 4), values(4, 5))),
}


@pytest.mark.parametrize("case", [*FOLDED, *KEPT])
def test_the_result_is_the_same_without_the_transposition(case):
    fn, args = (FOLDED | KEPT)[case]
    program = place_program(on(0, fn), *args)
    ops = fold_products(program.items, program.outputs)
    assert ("transpose" in names(ops)) == (case in KEPT)
    results = []
    for items in (program.items, ops):
        env = dict(zip(program.inputs, map(jnp.asarray, args), strict=True))
        evaluate(items, env, MESHES[0])
        results.append(np.asarray(env[program.outputs[0]]))
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_sum_has_the_dimension_first_that_devices_share_out(schedule: str):
    """Under FSDP, of a weight whose second dimension is divided; a kernel after the loop transposes it."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    meshes = [jax.sharding.Mesh(pair, ("fsdp",)) for pair in devices]
    spec = {"in": P("fsdp"), "out": P(None, "fsdp"), "head": P(None, "fsdp")}
    weights = {"in": values(8, 16), "out": values(16, 8), "head": values(4, 8)}
    x = values(8, 8)

    def loss(weights, x):
        x = mm.task(lambda w, x: jnp.tanh(x @ w["in"]) @ w["out"], mesh=meshes[0])(weights, x)
        return mm.task(lambda w, x: (jnp.tanh(x @ w["head"].T) ** 2).sum(), mesh=meshes[1])(weights, x)

    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2, schedule=schedule)
    jitted = mm.jit(step, in_shardings=(spec, P("fsdp")))
    plan = jitted.lower(weights, x).plan
    shapes = {v.aval.shape for kernel in plan.kernels for v in kernel.sums}
    assert shapes == {(), (8, 16), (8, 4)}
    assert [kernel.name for kernel in plan.kernels].count("sums") == 2
    result, gradients = jitted(weights, x)
    expected, reference = jax.value_and_grad(loss)(weights, x)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, reference)
    assert {name: g.sharding.spec for name, g in gradients.items()} == spec
