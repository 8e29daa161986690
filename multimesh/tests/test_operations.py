"""Operations of JAX that take functions, in a task on Explicit axes, and their gradients, beside ``jax.jit``.

What holds a jaxpr is where layouts in types must be taken out of; all other operations go one way.
"""

import contextlib

import jax
import jax.numpy as jnp
import jax.scipy.integrate
import jax.scipy.interpolate
import jax.scipy.linalg
import jax.scipy.optimize
import jax.scipy.sparse.linalg
import jax.scipy.spatial.transform
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

FIRST, SECOND = (jax.make_mesh((2,), ("data",), devices=jax.devices()[2 * i : 2 * i + 2]) for i in range(2))
LAYOUTS = {"replicated": P(), "rows": P("data")}
QUICK = ("inv", "searchsorted + 1", "pallas_call", "new_ref in scan", "custom_root", "cg", "switch", "unique")


def matrix():
    """Return a positive definite matrix."""
    a = np.random.default_rng(0).normal(size=(4, 4))
    return (a @ a.T / 4 + 2 * np.eye(4)).astype("float32")


def _updated(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


def _updated_in_a_scan(x):
    ref = jax.new_ref(x)

    def one(carry, row):
        ref[...] = ref[...] + row
        return carry + row.sum(), ref[0]

    return lax.scan(one, 0.0, x), ref[...]


def _kernel(source, target):
    target[...] = source[...] * 2


def _with_pallas(x):
    return pl.pallas_call(_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def _with_a_grid(x):
    spec = pl.BlockSpec((1, 4), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_kernel, out_shape=shape, grid=(4,), in_specs=[spec], out_specs=spec, interpret=True)(x)


def _root(x):
    def solve(f, start):
        return lax.fori_loop(0, 8, lambda _, s: s - f(s) / (2 * s), start)

    return lax.custom_root(lambda s: s**2 - x[0, 0], 1.0, solve, lambda g, y: y / g(1.0))


@jax.custom_vjp
def _with_vjp(x):
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * 3,))


@jax.custom_jvp
def _with_jvp(x):
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0] * 3))

TAKING_FUNCTIONS = {
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c @ row), x[0] * 0, x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 99, lambda c: c * 2, x),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(x[0, 0].astype(int), [jnp.sin, jnp.cos], x),
    "map": lambda x: lax.map(jnp.cumsum, x),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "reduce": lambda x: lax.reduce(x, 0.0, lax.add, (0,)),
    "reduce_window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "custom_vjp": _with_vjp,
    "custom_jvp": _with_jvp,
    "custom_root": _root,
    "custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: x @ v, x[0], lambda _, b: jnp.linalg.solve(x, b), symmetric=True
    ),
    "cg": lambda x: jax.scipy.sparse.linalg.cg(lambda v: x @ v, x[0])[0],
    "gmres": lambda x: jax.scipy.sparse.linalg.gmres(lambda v: x @ v, x[0])[0],
    "bicgstab": lambda x: jax.scipy.sparse.linalg.bicgstab(lambda v: x @ v, x[0])[0],
    "minimize": lambda x: jax.scipy.optimize.minimize(lambda v: v @ x @ v - v.sum(), x[0], method="BFGS").x,
    "trapezoid": jax.scipy.integrate.trapezoid,
    "interpolator": lambda x: jax.scipy.interpolate.RegularGridInterpolator((jnp.arange(4.0),), x)(x[:1, :2].T),
    "rotation": lambda x: jax.scipy.spatial.transform.Rotation.from_quat(x).as_matrix(),
    "vmap": jax.vmap(lambda row: jnp.interp(row, jnp.arange(4.0), row)),
    "jvp": lambda x: jax.jvp(jnp.linalg.inv, (x,), (x,)),
    "hessian": lambda x: jax.hessian(lambda v: (v @ x @ v) ** 2)(x[0]),
    "pallas_call": _with_pallas,
    "pallas_call with a grid": _with_a_grid,
    "new_ref": _updated,
    "new_ref in scan": _updated_in_a_scan,
    "callback": lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "searchsorted + 1": lambda x: jnp.searchsorted(jnp.arange(4.0), x) + 1,
    "interp": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0)),
    "digitize": lambda x: jnp.digitize(x, jnp.arange(4.0)),
    "unique": lambda x: jnp.unique(x, size=3),
    "histogram": lambda x: jnp.histogram(x, bins=3, range=(0, 3))[0],
    "nonzero": lambda x: jnp.nonzero(x > 1, size=3),
    "einsum": lambda x: jnp.einsum("ij,jk,kl->il", x, x, x),
    "inv": jnp.linalg.inv,
    "slogdet": lambda x: jnp.linalg.slogdet(x)[1],
    "expm": jax.scipy.linalg.expm,
    "conv": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "argsort": lambda x: jnp.take_along_axis(x, jnp.argsort(x), 1),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 0, 1]), 2),
    "key": lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(0), x[0, 0].astype(int)), (4,)),
    "at": lambda x: x.at[jnp.array([0, 2])].add(1.0).at[1].set(0.0),
}


def argument(layout):
    return jax.device_put(matrix(), NamedSharding(FIRST, LAYOUTS[layout]))


def gradient(program):
    def total(x):
        floats = (y for y in jax.tree.leaves(program(x)) if jnp.issubdtype(y.dtype, jnp.floating))
        return sum((y.sum() * (n + 1) for n, y in enumerate(floats)), jnp.float32(0))

    return lambda x: jax.grad(total)(x)


def works(program, x):
    """Return whether JAX itself lowers a program for an argument, and it makes arrays."""
    with contextlib.suppress(Exception), jax.set_mesh(FIRST):
        return bool(jax.tree.leaves(jax.jit(program).lower(x).out_info))
    return False


def compare(fns, x):
    """Compare the results of several programs in a task, one after the other, with those under ``jax.jit``."""

    def apply_all(x):
        return {name: fn(x) for name, fn in fns.items()}

    with jax.set_mesh(FIRST):
        ref = jax.jit(apply_all)(x)

    def step(x):
        return mm.task(lambda values: values, "second", mesh=SECOND)(mm.task(apply_all, "first", mesh=FIRST)(x))

    actual = mm.jit(step)(x)
    for name in fns:
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(a, b, 1e-4, 1e-4, err_msg=name), actual[name], ref[name]
        )


def check(fns, layout):
    x = argument(layout)
    typed_fns = {name: fn for name, fn in fns.items() if works(fn, x)}
    compare(typed_fns, x)
    compare({name: g for name, fn in typed_fns.items() if works(g := gradient(fn), x)}, x)
    return typed_fns


def test_quick():
    assert len(check({name: TAKING_FUNCTIONS[name] for name in QUICK}, "replicated")) == len(QUICK)


@pytest.mark.longer
@pytest.mark.telling("replicated")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_takes_functions(layout):
    names = check(TAKING_FUNCTIONS, layout)
    assert layout != "replicated" or names.keys() == TAKING_FUNCTIONS.keys()
