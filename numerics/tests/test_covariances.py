"""Covariance matrices of Gaussian processes, nearly singular: `multimesh.linalg` succeeds where LAPACK does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_linalg import LAYOUTS, normal, residual, sharded

import multimesh as mm

pytestmark = pytest.mark.usefixtures("double")

KERNELS = {  # of distances
    "rbf": lambda d: np.exp(-0.5 * (d / 0.2) ** 2),
    "matern": lambda d: (1 + np.sqrt(3) * d / 0.2) * np.exp(-np.sqrt(3) * d / 0.2),
    "periodic": lambda d: np.exp(-8 * np.sin(2 * np.pi * d) ** 2),
}


def covariance(kernel, dim, n, dtype):
    points = np.linspace(0, 1, n)[:, None] if dim == 1 else np.random.default_rng(0).uniform(size=(n, dim))
    k = KERNELS[kernel](np.linalg.norm(points[:, None] - points, axis=-1))
    if np.dtype(dtype).kind == "c":
        phase = np.exp(6j * np.pi * points[:, 0])
        k = phase[:, None] * k * phase.conj()
    return k


def cases(n, dtype):
    """Every kernel, with jitter down to what is lost in the rounding of the matrix itself."""
    eps = np.finfo(dtype).eps
    for kernel in KERNELS:
        for dim in (1, 2):
            k = covariance(kernel, dim, n, dtype)
            size = np.linalg.norm(k, 2)
            for jitter in [0.1, *(eps * size * np.geomspace(1e5, 0.1, 13))]:
                yield (kernel, dim, jitter / size / eps), (k + jitter * np.eye(n)).astype(dtype)


def lapack(a):
    """The lower factor, or None."""
    try:
        return scipy.linalg.cholesky(a, lower=True)
    except np.linalg.LinAlgError:
        return None


def check(layout, n, dtype):
    b = normal(n, 8, seed=1).astype(dtype)
    eps, checks = np.finfo(dtype).eps, 0
    order = np.arange(n).reshape(np.prod(LAYOUTS[layout][0]), -1).T.ravel()  # that of our elimination
    for case, a in cases(n, dtype):
        l, shards = lapack(a), sharded(a, layout)
        x, logdet, status = mm.linalg.potrs(shards, b, 1, return_logdet=True, return_status=True)
        if l is None or (case[2] < 2 and lapack(a[order][:, order]) is None):
            continue  # rounding alone decides
        checks += 1
        assert status == 0, case
        reference = residual(a, scipy.linalg.cho_solve((l, True), b), b)
        assert residual(a, x, b) < 3 * reference, case
        expected = 2 * np.log(np.diag(l).real).sum()
        root = scipy.linalg.solve_triangular(l, np.eye(n), lower=True)
        change = eps * np.linalg.norm(a, 2) * np.linalg.norm(root) ** 2  # what rounding the matrix makes of it
        assert abs(logdet - expected) < change + 100 * eps * abs(expected), case
    assert checks > 50


@pytest.mark.telling("rows-128-float32", "columns-64-complex64")
@pytest.mark.longer
@pytest.mark.parametrize(
    ("layout", "n", "dtype"),
    [
        *(pytest.param("rows", 512, dtype, marks=pytest.mark.full) for dtype in ("float32", "float64")),
        *(
            ("rows", 128, "float32"),
            ("both", 128, "complex128"),
            ("columns", 64, "complex64"),
            ("columns", 128, "float64"),
        ),
    ],
)
def test_solves_and_determinants_are_as_good_as_lapacks(layout, n, dtype):
    check(layout, n, dtype)


@pytest.mark.telling("both-float32")
@pytest.mark.longer
@pytest.mark.parametrize(("layout", "dtype"), [("both", "float32"), ("rows", "complex128")])
def test_factors_inverses_and_gradients_are_as_good_as_lapacks(layout, dtype):
    n = 64
    k = covariance("rbf", 1, n, dtype)
    a = (k + 16 * np.finfo(dtype).eps * np.linalg.norm(k, 2) * np.eye(n)).astype(dtype)
    l, eye = lapack(a), np.eye(n, dtype=dtype)
    reference = residual(a, scipy.linalg.cho_solve((l, True), eye), eye)
    shards = sharded(a, layout)
    factor = mm.linalg.cholesky(shards)
    wide = np.asarray(factor, "complex128")
    assert np.linalg.norm(wide @ wide.conj().T - a) < 3 * np.linalg.norm(a) * np.finfo(dtype).eps
    by_columns = jax.device_put(eye, NamedSharding(shards.sharding.mesh, P(None, shards.sharding.mesh.axis_names)))
    assert residual(a, mm.linalg.solve(shards, by_columns), eye) < 3 * reference
    inverse = jax.grad(lambda a: mm.linalg.slogdet(a).logabsdet)(shards)
    sides = (residual(a, inverse.conj(), eye), residual(a, inverse.T, eye))  # an inverse is good on one of them
    assert min(sides) < 3 * reference
    v = normal(n, 8, seed=1).astype(dtype)
    gradient = jax.grad(lambda b: jnp.real(jnp.vdot(v, mm.linalg.solve(shards, b))))(jnp.ones((n, 8), dtype))
    assert residual(a, gradient.conj(), v) < 3 * residual(a, scipy.linalg.cho_solve((l, True), v), v)


@pytest.mark.longer
def test_a_stack_of_matrices_is_as_good_as_lapacks():
    k = covariance("rbf", 1, 64, "float32")
    stack = np.stack([k + j * np.eye(64) for j in (1e-1, 1e-3, 1e-4)]).astype("float32")
    b = normal(64, 8, dtype="float32", seed=1)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    solutions = jax.jit(jax.vmap(lambda a: mm.linalg.solve(a, jnp.asarray(b), mesh=mesh, spec=P("x"))))(stack)
    for a, x in zip(stack, solutions, strict=True):
        assert residual(a, x, b) < 3 * residual(a, scipy.linalg.cho_solve((lapack(a), True), b), b)


@pytest.mark.longer
@pytest.mark.telling("rows")
@pytest.mark.parametrize("layout", ["rows", "both"])
def test_what_lapack_refuses_is_nan_as_in_jax(layout):
    n = 64
    k = covariance("rbf", 1, n, "float64")
    a = k - 1e-6 * np.eye(n)
    assert lapack(a) is None
    shards, b = sharded(a, layout), np.ones(n)
    np.testing.assert_array_equal(
        mm.linalg.solve(shards, b), jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b)
    )
    np.testing.assert_array_equal(mm.linalg.cholesky(shards), jnp.linalg.cholesky(a))
    assert np.isnan(mm.linalg.slogdet(shards)).all()
    assert np.isnan(jax.grad(lambda a: mm.linalg.slogdet(a).logabsdet)(shards)).all()
