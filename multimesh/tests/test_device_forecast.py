"""``plan.simulate("h100")``: seconds of any plan on an accelerator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import device
from multimesh_planner.hardware.software import software
from pipelines import submeshes

import multimesh as mm

H100 = device("h100")
ROWS, WIDTH = 4096, 8192


def plan_of(dtype: str = "bfloat16", size: int = 1):
    """Two stages of a product each, forward only."""
    first, second = submeshes(2, (size,))

    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        hidden = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=first)(w, x)
        return mm.task(lambda v, h: h @ v, "second", mesh=second)(v, hidden)

    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    return mm.jit(step).lower(weights, weights, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)).plan


def test_a_product_takes_what_the_device_takes():
    product = kernels.matmul(H100, ROWS, WIDTH, WIDTH)
    written = kernels.move(H100, 2 * 2 * ROWS * WIDTH)  # tanh reads the product, and its result is written once
    timeline = plan_of().simulate("h100")
    start = software("nvidia").kernel
    assert timeline.unit == "s"
    assert timeline.busy == pytest.approx((product + start + written, product + start), rel=0.02)


def test_a_transfer_takes_what_the_link_takes():
    (hop,) = plan_of().simulate("h100").transfers
    assert hop.end - hop.start == pytest.approx(kernels.send(H100, 2 * ROWS * WIDTH, far=False))


def test_more_devices_share_the_work():
    one, four = (sum(plan_of(size=size).simulate("h100").busy) for size in (1, 4))
    start = 2 * software("nvidia").kernel
    assert four - start == pytest.approx((one - start) / 4)


def test_float32_takes_longer_than_bfloat16():
    assert sum(plan_of("float32").simulate("h100").busy) > 1.8 * sum(plan_of().simulate("h100").busy)


def test_loops_and_inner_functions_count():
    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jax.checkpoint(lambda h: jnp.tanh(h @ w))(h), None), x, None, length=5)[0]

    (mesh,) = submeshes(1, (1,))
    shapes = jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16"), jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    plan = mm.jit(lambda *args: mm.task(looped, "looped", mesh=mesh)(*args)).lower(*shapes).plan
    assert plan.simulate("h100").makespan > 5 * kernels.matmul(H100, ROWS, WIDTH, WIDTH)


def test_an_unknown_device_is_named():
    with pytest.raises(mm.UsageError, match="there is no 'h1'; known are"):
        plan_of().simulate("h1")
