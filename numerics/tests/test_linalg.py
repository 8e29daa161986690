"""`multimesh.linalg` beside NumPy, SciPy and ``jax.scipy.linalg`` on one device."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

pytestmark = [pytest.mark.longer, pytest.mark.usefixtures("double")]

LAYOUTS = {  # devices, spec
    "one": ((1,), P("x")),
    "rows": ((8,), P("x")),
    "columns": ((4,), P(None, "x")),
    "both": ((4, 2), P("x", "y")),
    "pairs": ((2, 4), P(None, ("x", "y"))),
    "copies": ((4, 2), P("y")),
    "turned": ((2, 4), P(("y", "x"))),
}


def mesh_of(shape, kind="Auto"):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)], axis_types=(AxisType[kind],) * len(shape))


def normal(*shape, dtype="float64", seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return (draw(shape) + (1j * draw(shape) if np.dtype(dtype).kind == "c" else 0)).astype(dtype)


def definite(n, dtype="float64", condition=10.0):
    q = np.linalg.qr(normal(n, n, dtype="complex128" if np.dtype(dtype).kind == "c" else "float64"))[0]
    a = (q * np.geomspace(1, 1 / condition, n)) @ q.conj().T
    return ((a + a.conj().T) / 2).astype(dtype)


def sharded(a, layout="rows", kind="Auto", flip=False):
    shape, spec = LAYOUTS[layout]
    mesh = mesh_of(shape, kind)
    return jax.device_put(a, NamedSharding(Mesh(mesh.devices[::-1], mesh.axis_names) if flip else mesh, spec))


def residual(a, x, b):
    """Return that of many right-hand sides: a single one's is chance, which the alignment of an array decides."""
    a, x, b = (np.asarray(v, np.complex128) for v in (a, x, b))
    return np.linalg.norm(a @ x - b) / (np.linalg.norm(a) * np.linalg.norm(x))


DTYPES, SIZES, KINDS = ("float32", "float64", "complex64", "complex128"), (8, 24, 72, 200), ("Auto", "Explicit")


@pytest.mark.telling("one-5-float64-r0-Auto", "columns-28-complex64-r2-Auto", "both-36-complex128-r3-Auto")
@pytest.mark.parametrize(
    ("layout", "n", "dtype", "r", "kind"),
    [
        ("one", 5, "float64", (), "Auto"),
        ("rows", 24, "float32", (3,), "Auto"),
        ("columns", 28, "complex64", (), "Auto"),
        ("both", 36, "complex128", (2,), "Auto"),
        ("pairs", 40, "float64", (1,), "Auto"),
        ("copies", 6, "float32", (2,), "Auto"),
        *itertools.product(LAYOUTS, SIZES, DTYPES, [(3,)], KINDS),
    ],
)
def test_potrs_is_scipys(layout, n, dtype, r, kind):
    a, b = definite(n, dtype), normal(n, *r, dtype=dtype)
    x, logdet, status = mm.linalg.potrs(sharded(a, layout, kind), b, return_logdet=True, return_status=True)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(x, scipy.linalg.cho_solve(scipy.linalg.cho_factor(a), b), rtol=0, atol=300 * eps)
    np.testing.assert_allclose(logdet, np.linalg.slogdet(a)[1], rtol=100 * eps)
    assert (status, x.dtype, x.shape) == (0, a.dtype, b.shape)


@pytest.mark.telling("columns-12-complex64")
@pytest.mark.parametrize(
    ("layout", "n", "dtype"),
    [
        *(("columns", 12, "complex64"), ("both", 12, "float64")),
        *itertools.product(LAYOUTS, SIZES, ["float32", "complex128"]),
    ],
)
def test_cholesky_is_numpys(layout, n, dtype):
    a = sharded(definite(n, dtype), layout)
    l = mm.linalg.cholesky(a)
    np.testing.assert_allclose(l, np.linalg.cholesky(a), rtol=0, atol=50 * np.finfo(dtype).eps)
    assert l.sharding.is_equivalent_to(a.sharding, 2)


@pytest.mark.telling("float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_residuals_are_as_small_as_lapacks(dtype):
    for condition in (1e2, 1e4, 1e6):
        a, b = definite(32, dtype, condition), normal(32, 4, dtype=dtype)
        reference = scipy.linalg.cho_solve(scipy.linalg.cho_factor(a), b)
        assert residual(a, mm.linalg.solve(sharded(a), b), b) <= 2 * residual(a, reference, b)


def test_columns_of_the_right_hand_side_stay_sharded():
    a, b = definite(24), normal(24, 8)
    mesh = mesh_of((4, 2))
    by_columns = NamedSharding(mesh, P(None, ("x", "y")))
    x = mm.linalg.solve(jax.device_put(a, NamedSharding(mesh, P("x", "y"))), jax.device_put(b, by_columns))
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-10)
    assert x.sharding.is_equivalent_to(by_columns, 2)


def potrs_loss(a, b, mesh=None, spec=None):
    factor = mm.linalg.cho_factor(a, mesh=mesh, spec=spec)
    return jnp.sum(jnp.abs(mm.linalg.cho_solve(factor, b) - 1) ** 2) + mm.linalg.slogdet(factor).logabsdet


def reference(a, b):
    # The right one for complex matrices too, where jax 0.10.2 has a wrong gradient with assume_a="pos".
    solve = jnp.linalg.solve if jnp.iscomplexobj(a) else lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos")
    return jnp.sum(jnp.abs(solve(a, b) - 1) ** 2) + jnp.linalg.slogdet(a)[1]


@pytest.mark.telling("both-float64-Explicit")
@pytest.mark.parametrize(
    ("layout", "dtype", "kind"), [("both", "float64", "Explicit"), ("columns", "complex128", "Auto")]
)
def test_gradients_are_those_of_one_device(layout, dtype, kind):
    a, b = definite(12, dtype), normal(12, 8, dtype=dtype)
    matrix = sharded(a, layout, kind)
    f = jax.value_and_grad(potrs_loss, (0, 1))
    with jax.set_mesh(matrix.sharding.mesh):
        value, grads = (jax.jit(f) if kind == "Explicit" else f)(matrix, jnp.asarray(b))
    expected, by_one = jax.jit(jax.value_and_grad(reference, (0, 1)))(a, b)
    np.testing.assert_allclose(value, expected)
    for actual, desired in zip(grads, by_one, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-8, atol=1e-8)
    assert grads[0].sharding.is_equivalent_to(matrix.sharding, 2)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.full)])
def test_second_derivatives(kind):
    a, b, v = definite(8), normal(8), definite(8, condition=3.0)
    matrix, direction = sharded(a, kind=kind), sharded(v, kind=kind)

    def product(f, args):
        return lambda a, v: jax.jvp(jax.grad(f), (a, *args), (v, *(jnp.zeros_like(x) for x in args)))[1]

    spec = {"mesh": matrix.sharding.mesh, "spec": P("x")}
    with jax.set_mesh(matrix.sharding.mesh):
        actual = jax.jit(product(lambda a, b: potrs_loss(a, b, **spec), (jnp.asarray(b),)))(matrix, direction)
    np.testing.assert_allclose(actual, jax.jit(product(reference, (b,)))(a, v), rtol=1e-7, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_gradient_of_the_lower_factor(layout, kind, dtype):
    a, w = definite(24, dtype), normal(24, 24)
    matrix = sharded(a, layout, kind)
    with jax.set_mesh(matrix.sharding.mesh):
        actual = jax.jit(jax.grad(lambda a: jnp.sum(jnp.abs(mm.linalg.cholesky(a, mesh=matrix.sharding.mesh,
                      spec=matrix.sharding.spec)) ** 2 * jax.device_put(w, matrix.sharding))))(matrix)  # fmt: skip
    expected = jax.grad(lambda a: jnp.sum(jnp.abs(jnp.linalg.cholesky(a)) ** 2 * w))(a)
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.longer
def test_under_vmap_and_checkpoint():
    mesh = mesh_of((2,))
    a, b = np.stack([definite(6), definite(6, condition=3.0)]), normal(2, 6, 3)

    def total(solve):
        return lambda a, b: jnp.sum(jax.vmap(jax.checkpoint(lambda a, b: jnp.sin(solve(a, b))))(a, b))

    actual = jax.jit(jax.grad(total(lambda a, b: mm.linalg.solve(a, b, mesh=mesh, spec=P("x")))))(a, b)
    np.testing.assert_allclose(actual, jax.jit(jax.grad(total(jnp.linalg.solve)))(a, b), rtol=1e-8, atol=1e-8)


@pytest.mark.longer
def test_inside_tasks_on_submeshes():
    devices = np.array(jax.devices())
    front, back = Mesh(devices[:2], ("x",)), Mesh(devices[4:].reshape(2, 2), ("p", "q"))

    def step(a, b):
        x = mm.task(lambda a, b: mm.linalg.solve(a, b, mesh=front, spec=P("x")), "front", mesh=front)(a, b)
        return mm.task(lambda a, x: potrs_loss(a, x, back, P("p", "q")), "back", mesh=back)(a, x)

    a, b = definite(4), normal(4, 2)
    actual = mm.jit(jax.value_and_grad(step))(a, b)
    expected = jax.jit(jax.value_and_grad(lambda a, b: reference(a, jnp.linalg.solve(a, b))))(a, b)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-8), actual, expected)
    assert actual[1].devices() == set(front.devices.flat)


def test_no_device_holds_the_whole_matrix():
    n, mesh = 32, mesh_of((8,))
    a = jax.ShapeDtypeStruct((n, n), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    b = jax.ShapeDtypeStruct((n, 1), jnp.float32, sharding=NamedSharding(mesh, P()))
    f = jax.jit(jax.grad(lambda a, b: potrs_loss(a, b, mesh, P("x"))))
    text = f.lower(a, b).compile().as_text()
    largest = max(np.prod([int(d) for d in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text))
    assert n * n // 8 <= largest < n * n


def test_a_matrix_that_is_not_positive_definite_is_nan_and_said_where():
    a = definite(16)
    a[5, 5] = a[14, 14] = -1  # rows 1 and 2 of devices that have 4 rows each, which are eliminated row by row
    x, logdet, status = mm.linalg.potrs(sharded(a, "columns"), normal(16), return_logdet=True, return_status=True)
    assert status == 2
    assert np.isnan(x).all()
    assert np.isnan(logdet)
    assert np.isnan(mm.linalg.slogdet(sharded(a, "columns")).sign)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-22), ("float32", 1e30), ("float64", 1e-165)])
def test_very_small_and_very_large_matrices(dtype, scale):
    """Squares of their elements underflow or overflow."""
    a, b = definite(16, dtype), normal(16, dtype=dtype)
    matrix = sharded(a * np.asarray(scale, dtype))
    np.testing.assert_allclose(mm.linalg.solve(matrix, b * np.asarray(scale, dtype)), np.linalg.solve(a, b), rtol=1e-3)
    np.testing.assert_allclose(mm.linalg.eigh(matrix).eigenvalues / scale, np.linalg.eigvalsh(a), rtol=1e-4)
    half = sharded(np.tril(a) * np.asarray(scale, dtype))
    assert np.isnan(mm.linalg.solve(half, b)).all()


def test_the_call_of_the_page():
    """Two specs, and an axis that the mesh lacks, which gives way to the array's own sharding."""
    a, b = sharded(np.diag(np.arange(1, 9, dtype="float32")), "pairs"), jnp.ones((8, 1), jnp.float32)
    mesh, expected = a.sharding.mesh, 1 / np.arange(1, 9)
    for specs in (P(None, ("x", "y")), (P(None, ("x", "y")), P(None, None))):
        np.testing.assert_allclose(mm.linalg.potrs(a, b, T_A=256, mesh=mesh, in_specs=specs)[:, 0], expected, rtol=1e-6)
    with pytest.warns(UserWarning, match=r"names the axis 'T', and the mesh has 'x', 'y'; using .*\('x', 'y'\)"):
        x = mm.linalg.potrs(a, b, T_A=256, mesh=mesh, in_specs=(P(None, "T"), P(None, None)))
    np.testing.assert_allclose(x[:, 0], expected, rtol=1e-6)


def solve(a, b=None, **options):
    return mm.linalg.solve(a, np.ones(len(a), a.dtype) if b is None else b, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: solve(sharded(np.ones((8, 16)))), "must be square, got shape (8, 16)"),
        (lambda a: solve(a, np.ones(7)), "shape (7,) does not fit a matrix of shape (8, 8)"),
        (lambda a: solve(a, np.ones(8, "float32")), "the matrix is float64, the right-hand side float32"),
        (lambda a: solve(a.astype("int32")), "works in float32, float64, complex64 or complex128, got int32"),
        (lambda a: solve(a.astype("bfloat16")), "got bfloat16; convert it with"),
        (lambda a: mm.linalg.potrs(a, np.ones(8), 0), "T_A is a number of rows, at least 1; got 0"),
        (lambda a: mm.linalg.potrs(a, np.ones(8), 3, pad=False), "T_A=3 does not divide the 1 rows of a device"),
        (lambda a: mm.linalg.potrs(a, np.ones(8), matrix_specs=P("x"), in_specs=P("x")), "give one of them"),
        (lambda a: mm.linalg.cholesky(np.eye(8)), "found no sharding of the array of shape (8, 8)"),
        (lambda a: jax.jit(mm.linalg.cholesky)(a), "under jax.jit an array only carries its Explicit axes"),
        (lambda a: solve(a, spec=P("z")), "names the axis 'z'; the mesh has 'x'"),
        (lambda a: solve(a, spec=P("x", "x")), "names the axis 'x' twice"),
        (lambda a: solve(a, spec=P(None, None, "x")), "has 3 entries, and the array only 2 dimensions"),
        (lambda a: solve(a, spec="x"), "spec must be a PartitionSpec, got 'x'"),
        (lambda a: solve(a, mesh=mesh_of((4,)), spec=P("x")), "is on 4 devices that the mesh lacks"),
        (lambda a: solve(np.eye(9), mesh=mesh_of((8,)), spec=P("x")), "9 rows can't be cut evenly for the 8 devices"),
        (lambda a: mm.linalg.cho_solve(a, a), "the first argument is what cho_factor returns"),
        (lambda a: solve(sharded(np.ones((0, 0)))), "solve: the matrix of shape (0, 0) is empty"),
        (
            lambda a: solve(a, jax.device_put(np.ones(8), jax.devices()[1])),
            "solve: the matrix is on 8 devices, and the",
        ),
        (lambda a: solve(a, sharded(np.ones((8, 8)), "pairs", flip=True)), "in the same order; move it"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        call(sharded(np.eye(8)))
