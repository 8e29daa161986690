"""Types of a few bits go between submeshes, and are arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import assert_same, submeshes

import multimesh as mm


def on(stage, fn):
    return mm.task(fn, f"stage{stage}", mesh=submeshes(2, (2,))[stage])


SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@pytest.mark.parametrize("name", SMALL)
def test_small_types_between_submeshes_and_as_arguments(name):
    dtype = getattr(jnp, name)
    x = jnp.linspace(0.25 if "8m0" in name else 0 if name[0] == "u" else -2, 1, 32).reshape(8, 4)

    def f(x, y):
        small = on(0, lambda x: x.astype(dtype))(x)
        return on(1, lambda h, y: h.astype(jnp.float32) + y.astype(jnp.float32))(small, y), small

    y = np.asarray(x.astype(dtype))
    wants = jax.jit(f)(x, y)
    assert_same([np.asarray(r, np.float32) for r in mm.jit(f)(x, y)], [np.asarray(r, np.float32) for r in wants])
    assert_same(mm.jit(mm.microbatch(lambda x: f(x, x)[0], size=2))(x), mm.microbatch(lambda x: f(x, x)[0], size=2)(x))
