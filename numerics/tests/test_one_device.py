"""Where one device has all of a matrix or of a grid, `multimesh.linalg` and `multimesh.fft` are JAX's own functions."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_decompositions import by_svd
from test_linalg import definite, normal

import multimesh as mm

pytestmark = pytest.mark.usefixtures("double")

N = 12
ONE = Mesh(np.array(jax.devices()[:1]), ("x",))
BESIDE = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("x", "y"))  # both devices have all of what "x" shards
LAYOUTS = {
    "rows": (ONE, P("x")),
    "columns": (ONE, P(None, "x")),
    "both": (Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "z")), P("x", "z")),
    "copies": (BESIDE, P("x")),
}
LINALG = {  # of a positive definite matrix, any square one, a tall one, and right-hand sides
    "potrs": (lambda m, a, g, t, b: m(mm.linalg.potrs, a, b), lambda a, g, t, b: jnp.linalg.solve(a, b)),
    "solve": (lambda m, a, g, t, b: m(mm.linalg.solve, a, b), lambda a, g, t, b: jnp.linalg.solve(a, b)),
    "inv": (lambda m, a, g, t, b: m(mm.linalg.inv, a), lambda a, g, t, b: jnp.linalg.inv(a)),
    "cholesky": (lambda m, a, g, t, b: m(mm.linalg.cholesky, a), lambda a, g, t, b: jnp.linalg.cholesky(a)),
    "slogdet": (lambda m, a, g, t, b: m(mm.linalg.slogdet, a), lambda a, g, t, b: jnp.linalg.slogdet(a)),
    "lu": (
        lambda m, a, g, t, b: [mm.linalg.lu_solve(m(mm.linalg.lu_factor, g), b, trans) for trans in "NTC"],
        lambda a, g, t, b: [jnp.linalg.solve(x, b) for x in (g, g.T, g.conj().T)],
    ),
    "triangular": (
        lambda m, a, g, t, b: [m(mm.linalg.solve_triangular, a, b, trans, lower=trans == "T") for trans in "NTC"],
        lambda a, g, t, b: [jax.scipy.linalg.solve_triangular(a, b, trans, lower=trans == "T") for trans in "NTC"],
    ),
    "qr": (lambda m, a, g, t, b: m(mm.linalg.qr, t), lambda a, g, t, b: jnp.linalg.qr(t)),
    "least squares": (
        lambda m, a, g, t, b: m(mm.linalg.least_squares, t, t[:, :2] ** 2),
        lambda a, g, t, b: jnp.linalg.lstsq(t, t[:, :2] ** 2)[0],
    ),
    "polar": (lambda m, a, g, t, b: m(mm.linalg.polar, t), lambda a, g, t, b: by_svd(t)),  # the other has no gradient
    "eigh": (lambda m, a, g, t, b: m(mm.linalg.eigh, a), lambda a, g, t, b: jnp.linalg.eigh(a)),
    "svd": (
        lambda m, a, g, t, b: [m(mm.linalg.svd, x) for x in (t, g)],
        lambda a, g, t, b: [jnp.linalg.svd(x, full_matrices=False) for x in (t, g)],
    ),
}


def compare(name, layout, dtype, kind):
    mesh, spec = LAYOUTS[layout]
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType[kind],) * len(mesh.axis_names))
    method, ref = LINALG[name]
    args = definite(N, dtype), normal(N, N, dtype=dtype) + 3 * np.eye(N, dtype=dtype), normal(2 * N, 4, dtype=dtype)
    args = *args, normal(N, 2, dtype=dtype, seed=2)
    shards = *(jax.device_put(x, NamedSharding(mesh, spec)) for x in args[:3]), args[3]
    eps = float(np.finfo(dtype).eps)

    def call(f, x, *more, **options):
        return f(x, *more, **options, mesh=mesh, **{"matrix_specs" if f is mm.linalg.potrs else "spec": spec})

    def total(f):
        return lambda *args: sum(jnp.sum(jnp.abs(x) ** 3) for x in jax.tree.leaves(f(*args)))

    f = functools.partial(method, call)
    with jax.set_mesh(mesh):
        results = jax.jit(f)(*shards)
        gradients = jax.jit(jax.grad(total(f), (0, 1, 2, 3)))(*shards)
        program = jax.jit(f).lower(*shards).compile().as_text()
    references = ref(*map(jnp.asarray, args))
    for actual, expected in zip(jax.tree.leaves(results), jax.tree.leaves(references), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e4 * eps)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    for actual, expected in zip(gradients, jax.grad(total(ref), (0, 1, 2, 3))(*map(jnp.asarray, args)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e4 * eps, atol=1e5 * eps)
    # Devices that wait for each other, or copy what they gather, would have more than numbers to tell.
    assert set(re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-|collective-|reduce-scatter)", program)) <= {""}


FEW = [("rows", "float32", "Auto"), ("columns", "complex128", "Explicit"), ("both", "float64", "Explicit"),
       ("copies", "complex64", "Auto")]  # fmt: skip


@pytest.mark.longer
@pytest.mark.telling("potrs-case0", "cholesky-case3", "lu-case5", "qr-case7", "eigh-case10", "svd-case11")
@pytest.mark.parametrize(("name", "case"), [(name, FEW[k % len(FEW)]) for k, name in enumerate(LINALG)])
def test_linear_algebra_is_jaxs(name, case):
    """The same numbers up to rounding, signs and phases of vectors too, and the same gradients."""
    compare(name, *case)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_algebra_is_jaxs_everywhere(layout, dtype, kind):
    for name in LINALG:
        compare(name, layout, dtype, kind)


GRIDS = {  # mesh, spec, spec of the result in natural order and of the transposed one, and its dimensions
    "slab": (ONE, P("x"), P(None, "x"), P("x"), (1, 2, 0)),
    "pencil": (LAYOUTS["both"][0], P("x", "z"), P(None, "x", "z"), P("z", "x"), (2, 1, 0)),
    "copies": (BESIDE, P("x"), P(None, "x"), P("x"), (1, 2, 0)),
}


@pytest.mark.longer
@pytest.mark.telling("slab-False-Auto", "pencil-True-Explicit", "copies-True-Auto")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_transforms_are_jaxs(grid, transposed, kind):
    mesh, spec, natural, swapped_spec, order = GRIDS[grid]
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType[kind],) * len(mesh.axis_names))
    options = {"transposed": transposed, "norm": "ortho", "chunks": 2}
    for real, s in itertools.product((False, True), (None, (4, 7, 6))):
        x = jax.device_put(normal(5, 4, 7, dtype="float64" if real else "complex128"), NamedSharding(mesh, spec))
        forward, backward = (mm.fft.rfftn, mm.fft.irfftn) if real else (mm.fft.fftn, mm.fft.ifftn)
        y = forward(x, s, **options)
        expected = (jnp.fft.rfftn if real else jnp.fft.fftn)(np.asarray(x), s, norm="ortho")
        np.testing.assert_array_equal(y, expected.transpose(order) if transposed else expected)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, swapped_spec if transposed else natural), 3)
        size = s or x.shape
        z = backward(y, size, **options)
        np.testing.assert_array_equal(z, (jnp.fft.irfftn if real else jnp.fft.ifftn)(expected, size, norm="ortho"))
        assert z.sharding.is_equivalent_to(x.sharding, 3)
