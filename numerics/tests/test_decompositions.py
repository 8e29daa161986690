"""Decompositions of `multimesh.linalg` beside NumPy and SciPy: random, graded, clustered, singular matrices."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import spawning
from multimesh_numerics.linalg import qdwh
from test_linalg import LAYOUTS, definite, normal, residual, sharded

import multimesh as mm

pytestmark = [pytest.mark.longer, pytest.mark.usefixtures("double")]

linalg = mm.linalg
SPECTRA = {
    "random": lambda n: np.random.default_rng(1).uniform(0.1, 1, n),
    "graded": lambda n: np.geomspace(1, 1e-15, n),
    "clustered": lambda n: np.repeat([1, 1 + 1e-9, 2, 0.5], n)[::4][:n],
    "singular": lambda n: np.r_[np.ones(n // 2), np.zeros(n - n // 2)],
    "zero": np.zeros,
}


def orthonormal(m, n, dtype, seed=0):
    return np.linalg.qr(normal(m, n, dtype=np.result_type(dtype, "float64"), seed=seed))[0]


def matrix(kind, m, n, dtype):
    u, v = orthonormal(m, n, dtype), orthonormal(n, n, dtype, 1)
    return ((u * SPECTRA[kind](n)) @ v.conj().T).astype(dtype)


def hermitian(kind, n, dtype):
    v = orthonormal(n, n, dtype)
    a = (v * (SPECTRA[kind](n) * (-1) ** np.arange(n))) @ v.conj().T
    return ((a + a.conj().T) / 2).astype(dtype)


def norm(x):
    return np.linalg.norm(np.asarray(x, "complex128"), 2)


def rounding(a):
    return np.finfo(a.dtype).eps * max(norm(a), 1e-30)


def adjoint(x):
    return np.asarray(x).conj().T


def assert_orthonormal(q, times=16):
    assert norm(adjoint(q) @ np.asarray(q) - np.eye(q.shape[1])) < times * np.finfo(q.dtype).eps * np.sqrt(q.shape[1])


def check_eigh(layout, kind, n, dtype):
    a = sharded(hermitian(kind, n, dtype), layout)
    w, v = linalg.eigh(a)
    full = np.asarray(a)
    assert (np.diff(w) >= 0).all()
    assert np.abs(np.asarray(w) - np.linalg.eigvalsh(full)).max() <= 2 * n * rounding(full)
    assert norm(full @ np.asarray(v) - np.asarray(v) * np.asarray(w)) <= 2 * n * rounding(full)
    assert_orthonormal(v)
    assert v.sharding.is_equivalent_to(a.sharding, 2)
    assert (w.dtype, v.dtype) == (np.finfo(dtype).dtype, full.dtype)


def check_polar(layout, kind, m, n, dtype):
    a = sharded(matrix(kind, m, n, dtype), layout)
    u, h = linalg.polar(a)
    bound = (max(16, 2 * n) if layout == "one" else 16) * rounding(np.asarray(a))  # on one device it is LAPACK's svd
    assert norm(np.asarray(u) @ np.asarray(h) - np.asarray(a)) <= bound
    assert_orthonormal(u)
    np.testing.assert_array_equal(h, adjoint(h))
    assert np.linalg.eigvalsh(np.asarray(h)).min() >= -bound
    assert u.sharding.is_equivalent_to(a.sharding, 2)


def check_svd(layout, kind, m, n, dtype):
    a = sharded(matrix(kind, m, n, dtype) if m >= n else adjoint(matrix(kind, n, m, dtype)), layout)
    u, s, vh = linalg.svd(a)
    full, k = np.asarray(a), min(m, n)
    assert (np.diff(s) <= 0).all()
    assert np.abs(np.asarray(s) - np.linalg.svd(full, compute_uv=False)).max() <= 2 * k * rounding(full)
    assert norm((np.asarray(u) * np.asarray(s)) @ np.asarray(vh) - full) <= 2 * k * rounding(full)
    assert_orthonormal(u)
    assert_orthonormal(adjoint(vh))
    assert (u if m >= n else vh).sharding.is_equivalent_to(a.sharding, 2)


def check_qr(layout, kind, m, n, dtype):
    a = sharded(matrix(kind, m, n, dtype), layout)
    q, r = linalg.qr(a)
    assert norm(np.asarray(q) @ np.asarray(r) - np.asarray(a)) <= 16 * rounding(np.asarray(a))
    assert_orthonormal(q)
    np.testing.assert_array_equal(r, np.triu(r))
    assert q.sharding.is_equivalent_to(a.sharding, 2)


GENERAL = {
    "random": lambda n, dtype: normal(n, n, dtype=dtype),
    "rows of unlike size": lambda n, dtype: normal(n, n, dtype=dtype) * np.geomspace(1, 1e-6, n)[:, None].astype(dtype),
    "a permutation": lambda n, dtype: np.eye(n, dtype=dtype)[np.random.default_rng(0).permutation(n)],
    "equal pivots": lambda n, dtype: np.sign(normal(n, n, seed=2)).astype(dtype),
}


def check_lu(layout, kind, n, dtype):
    full, b = GENERAL[kind](n, dtype), normal(n, 3, dtype=dtype)
    factor = linalg.lu_factor(sharded(full, layout))
    for trans, a in ((0, full), ("T", full.T), (2, full.conj().T)):
        reference = scipy.linalg.lu_solve(scipy.linalg.lu_factor(full), b, {"T": 1}.get(trans, trans))
        x = np.asarray(linalg.lu_solve(factor, b, trans))
        assert residual(a, x, b) <= 8 * max(residual(a, reference, b), np.finfo(dtype).eps)


def check_triangular(layout, n, dtype):
    full, b = normal(n, n, dtype=dtype) + 3 * np.eye(n, dtype=dtype), normal(n, 2, dtype=dtype)
    full[0, -1] = full[-1, 0] = np.nan  # one of them is in the triangle that is not used
    for lower, unit, trans in ((True, False, 0), (False, False, "C"), (True, True, 1), (False, True, 0)):
        a = full.copy()
        a[(-1, 0) if lower else (0, -1)] = 1
        x = linalg.solve_triangular(sharded(a, layout), b, trans, lower, unit)
        a[(0, -1) if lower else (-1, 0)] = 0
        expected = scipy.linalg.solve_triangular(a, b, trans=trans, lower=lower, unit_diagonal=unit)
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e3 * np.finfo(dtype).eps * np.abs(expected).max())


FEW = [("one", "random", 5, "float64"), ("rows", "graded", 24, "float32"), ("both", "singular", 20, "complex128"),
       ("pairs", "clustered", 24, "complex64"), ("columns", "zero", 12, "float64")]  # fmt: skip
DECOMPOSITIONS = {
    "eigh": check_eigh,
    "polar": lambda layout, kind, n, dtype: check_polar(layout, kind, 2 * n, n, dtype),
    "svd": lambda layout, kind, n, dtype: check_svd(layout, kind, n, n, dtype),
    "qr": lambda layout, kind, n, dtype: check_qr(layout, kind, 8 * n, n, dtype),
}


@pytest.mark.telling(
    *(f"{name}-both-singular-20-complex128" for name in DECOMPOSITIONS),
    *(f"{name}-rows-graded-24-float32" for name in ("eigh", "qr")),
)
@pytest.mark.parametrize(("layout", "kind", "n", "dtype"), FEW)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions(name, layout, kind, n, dtype):
    DECOMPOSITIONS[name](layout, kind, n, dtype)


@pytest.mark.telling("float32")
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_polar_where_noise_is_smaller_than_the_weights_assume(dtype, monkeypatch):
    """One singular matrix in a hundred had a factor U that was not orthonormal."""
    noise = qdwh._noise
    monkeypatch.setattr(qdwh, "_noise", lambda x, axes: 1e-4 * noise(x, axes))
    check_polar("rows", "singular", 32, 16, dtype)
    check_polar("columns", "zero", 28, 28, dtype)


@pytest.mark.telling("columns-equal pivots-12-float64")
@pytest.mark.parametrize(
    ("layout", "kind", "n", "dtype"),
    [("rows", "random", 24, "complex64"), ("columns", "equal pivots", 12, "float64"),
     ("both", "rows of unlike size", 20, "float32"), ("pairs", "a permutation", 24, "complex128")],
)  # fmt: skip
def test_lu(layout, kind, n, dtype):
    check_lu(layout, kind, n, dtype)


@pytest.mark.telling("rows-24-complex64")
@pytest.mark.parametrize(("layout", "n", "dtype"), [("rows", 24, "complex64"), ("both", 20, "float64")])
def test_triangular(layout, n, dtype):
    check_triangular(layout, n, dtype)


@pytest.mark.full
def test_axes_in_another_order_than_the_meshs():
    """A wide matrix that is cut both ways has them, too: its transpose is decomposed."""
    check_eigh("turned", "random", 24, "float32")
    check_svd("turned", "random", 24, 24, "float32")
    check_svd("both", "random", 8, 24, "float32")
    check_qr("turned", "random", 64, 8, "float32")
    check_lu("turned", "random", 24, "float32")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_everywhere(layout, dtype):
    jax.clear_caches()  # programs take the 65530 mappings that Linux gives a process; without more, XLA crashes
    for n in (8, 40, 72):
        for kind in SPECTRA:
            check_eigh(layout, kind, n, dtype)
            check_polar(layout, kind, n, n, dtype)
            check_polar(layout, kind, 2 * n, n, dtype)
            check_svd(layout, kind, n, n, dtype)
            check_svd(layout, kind, n, 2 * n, dtype)
            check_qr(layout, kind, 8 * n, n, dtype)
        for kind in GENERAL:
            check_lu(layout, kind, n, dtype)
        check_triangular(layout, n, dtype)


def test_inverse():
    a = definite(24, "complex128")
    matrix = sharded(a, "both")
    np.testing.assert_allclose(linalg.inv(matrix), np.linalg.inv(a), rtol=1e-10, atol=1e-12)
    assert linalg.inv(matrix).sharding.is_equivalent_to(matrix.sharding, 2)


def test_least_squares():
    a, b = normal(80, 8), normal(80, 2)
    matrix = sharded(a, "pairs")
    np.testing.assert_allclose(linalg.least_squares(matrix, b), np.linalg.lstsq(a, b)[0], rtol=1e-10)
    np.testing.assert_allclose(linalg.least_squares(matrix, b[:, 0]), np.linalg.lstsq(a, b[:, 0])[0], rtol=1e-10)


def weighted(x, seed):
    return jnp.sum(jnp.real(x * normal(*x.shape, dtype="complex128", seed=seed)))


def phases(q):
    """Return sums that do not depend on the phases of columns."""
    return q[:, None] * q.conj()


def by_svd(a):
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    return u @ vh, vh.conj().T * s @ vh


GRADIENTS = {
    "eigh": (lambda la, a: [phases(x) if x.ndim == 2 else x for x in la.eigh(a)], (8, 8)),
    "svd": (lambda la, a: [f(x) for f, x in zip((phases, jnp.abs, lambda x: phases(x.conj().T)),
            la.svd(a, **({} if la is linalg else {"full_matrices": False})), strict=True)], (8, 4)),
    "qr": (lambda la, a: [phases(x) for x in (la.qr(a)[0], la.qr(a)[1].conj().T)], (16, 2)),
    "polar": (lambda la, a: la.polar(a) if la is linalg else by_svd(a), (8, 4)),
    "inv": (lambda la, a: [la.inv(a @ a.conj().T + jnp.eye(len(a)))], (8, 8)),
    "lu": (lambda la, a: [linalg.lu_solve(linalg.lu_factor(a), a[:, :2])] if la is linalg else [la.solve(a, a[:, :2])],
           (8, 8)),
    "triangular": (lambda la, a: [(linalg if la is linalg else jax.scipy.linalg).solve_triangular(a, a[:, :2], 1)],
                   (8, 8)),
    "least squares": (lambda la, a: [linalg.least_squares(a, a[:, 0] ** 2)] if la is linalg
                      else [la.lstsq(a, a[:, 0] ** 2)[0]], (16, 2)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_device(name, dtype):
    """So are their derivatives along a direction: the second ones of `svd` were NaN."""
    f, shape = GRADIENTS[name]
    a = normal(*shape, dtype=dtype) + 2 * np.eye(*shape) if name != "eigh" else hermitian("random", 8, dtype)
    total = lambda la: lambda a: sum(weighted(x, k) for k, x in enumerate(f(la, a)))  # noqa: E731
    along = normal(*shape, dtype=dtype, seed=3)
    references = jax.jvp(jax.grad(total(jnp.linalg)), (jnp.asarray(a),), (jnp.asarray(along),))
    layout = "rows" if shape[0] == 16 else "both"
    derivatives = jax.jvp(jax.grad(total(linalg)), (sharded(a, layout),), (sharded(along, layout),))
    for actual, expected in zip(derivatives, references, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-7 * max(1, np.abs(expected).max()))


def test_right_hand_sides_keep_their_layout():
    a, b = sharded(definite(16)), sharded(normal(16, 2))
    for x in (linalg.solve(a, b), linalg.lu_solve(linalg.lu_factor(a), b), linalg.solve_triangular(a, b)):
        assert x.sharding.is_equivalent_to(b.sharding, 2)
    assert linalg.solve(a, np.zeros((16, 0))).shape == (16, 0)
    assert linalg.lu_solve(linalg.lu_factor(a), np.zeros((16, 0))).shape == (16, 0)


@pytest.mark.longer
@pytest.mark.telling("rows")
@pytest.mark.parametrize("layout", ["rows", "both"])
def test_one_triangle_is_never_taken_for_a_matrix(layout):
    a = definite(16)
    for half in (np.tril(a), np.triu(a)):
        triangle = sharded(half, layout)
        assert np.isnan(linalg.solve(triangle, np.ones(16))).all()
        assert np.isnan(linalg.cholesky(triangle)).any()
        assert np.isnan(linalg.eigh(triangle).eigenvalues).all()
        assert linalg.potrs(triangle, np.ones(16), return_status=True)[1] == -1


@pytest.mark.parametrize("layout", ["one", "rows"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_gives_nan(layout, bad):
    """LAPACK's svd never ended; an infinite pivot gave a finite solution."""
    a, b = definite(16), np.ones(16)
    a[0, 0] = bad
    array = sharded(a, layout)
    results = [linalg.solve(array, b), linalg.inv(array), linalg.slogdet(array), linalg.eigh(array), linalg.svd(array)]
    for x in jax.tree.leaves([*results, linalg.lu_solve(linalg.lu_factor(array), b)]):
        assert np.isnan(x).all()
    assert linalg.potrs(array, b, return_status=True)[1] == -1


@pytest.mark.parametrize("layout", ["one", "both"])
def test_eigh_of_a_matrix_that_was_rounded_to_single_precision(layout):
    """It is Hermitian to 1e-8, and what is left was taken for sweeps that do not converge."""
    a = definite(24) + 1e-9 * normal(24, 24)
    w, v = linalg.eigh(sharded(a, layout))
    half = (a + a.T) / 2
    assert norm(half @ np.asarray(v) - np.asarray(v) * np.asarray(w)) <= 48 * rounding(half)


def test_rounds_of_a_tournament_meet_each_pair_once():
    from multimesh_numerics.linalg.jacobi import _numbers

    for p in range(1, 9):
        pairs = _numbers(p).reshape(-1, 2)
        assert len({frozenset(map(int, pair)) for pair in pairs}) == len(pairs) == p * (2 * p - 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: linalg.eigh(sharded(np.ones((8, 16)))), "eigh: the matrix must be square, got shape (8, 16)"),
        (lambda a: linalg.polar(sharded(np.ones((8, 16)))), "polar: needs at least as many rows as columns"),
        (lambda a: linalg.svd(np.ones((8, 8))), "svd: found no sharding"),
        (lambda a: linalg.svd(sharded(np.ones(8))), "svd: needs a matrix, got shape (8,)"),
        (lambda a: linalg.qr(sharded(np.ones((8, 16)))), "qr: needs at least as many rows as columns"),
        (lambda a: linalg.svd(sharded(np.ones((8, 0)))), "svd: the matrix of shape (8, 0) is empty"),
        (lambda a: linalg.qr(a), "shape (8, 8) gives a device 1; use at most 1 devices"),
        (lambda a: linalg.lu_solve(a, np.ones(8)), "the first argument is what lu_factor returns"),
        (lambda a: linalg.lu_solve(linalg.lu_factor(a), np.ones(8), 3), "trans is 0 or 'N' (a)"),
        (lambda a: linalg.lu_solve(linalg.lu_factor(a), np.ones(7)), "shape (7,) does not fit"),
        (lambda a: linalg.least_squares(sharded(np.ones((16, 2))), np.ones(8)), "shape (8,) does not fit"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        call(sharded(np.eye(8)))


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", ["rows float64", "both complex128", "grids float64"])
def test_several_processes(processes, case):
    """Linear algebra, transforms and grids, each with eight devices over processes."""
    script = Path(__file__).parent / "process_numerics.py"
    for process in spawning.run(processes, 8 // processes, script, *case.split(), timeout=800):
        assert process.code == 0, process.err
        assert process.out.endswith("ok\n")
