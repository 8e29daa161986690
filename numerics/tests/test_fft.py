"""`multimesh.fft` beside ``numpy.fft`` and ``jnp.fft`` on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_linalg import normal

import multimesh as mm

pytestmark = pytest.mark.usefixtures("double")

A, B = "a", "b"
# Shape, mesh, spec, axes, spec of the result in natural order and of the transposed one.
CASES = {
    "one": ((4, 6, 8), (1,), P(A), None, P(None, A, None), P(A, None, None)),
    "slab": ((8, 9, 10), (4,), P(A), None, P(None, A, None), P(A, None, None)),
    "pencil": ((8, 6, 9), (4, 2), P(A, B), None, P(None, A, B), P(B, A, None)),
    "hosts": ((8, 10, 6), (4, 2), P((A, B)), None, P(None, (A, B), None), P((A, B), None, None)),
    "two": ((8, 7), (4,), P(A), None, P(None, A), P(A, None)),
    "batch": ((2, 3, 8, 6), (2, 4), P(A, None, B), (-2, -1), P(A, None, None, B), P(A, None, B, None)),
    "order": ((6, 8, 5), (4,), P(None, A), (1, 0, 2), P(A, None, None), P(A, None, None)),
}


def mesh_of(shape, kind="Auto"):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, (A, B)[: len(shape)], axis_types=(AxisType[kind],) * len(shape))


def place(x, mesh, spec, kind="Auto"):
    return jax.device_put(x, NamedSharding(mesh_of(mesh, kind), spec))


def transpose_spectrum(spectrum, axes, transposed, pencil, np=np):
    """Return NumPy's spectrum with its transformed dimensions in the transposed order at the end."""
    if not transposed:
        return spectrum
    if len(axes) == 2:
        return np.moveaxis(spectrum, axes, (-1, -2))
    return np.moveaxis(spectrum, axes, (-1, -2, -3) if pencil else (-1, -3, -2))


def padded_to(x, spec, mesh):
    sizes = [np.prod([mesh.shape[a] for a in (e if isinstance(e, tuple) else (e,) if e else ())]) for e in spec]
    return np.pad(x, [(0, int(-n % s)) for n, s in zip(x.shape, sizes, strict=True)])


def check(case, dtype, transposed, kind="Auto", norm=None, chunks=1):
    shape, mesh, spec, axes, natural, swapped_spec = CASES[case]
    real = np.dtype(dtype).kind == "f"
    x = place(normal(*shape, dtype=dtype), mesh, spec, kind)
    axes = tuple(a % len(shape) for a in (axes or range(len(shape))))
    options = {"axes": axes, "transposed": transposed, "norm": norm, "chunks": chunks}
    forward, backward = (mm.fft.rfftn, mm.fft.irfftn) if real else (mm.fft.fftn, mm.fft.ifftn)
    y = forward(x, **options)
    tolerance = {"rtol": 0, "atol": (1e-11 if np.dtype(dtype).itemsize in (8, 16) and dtype[-1] != "4" else 1e-3)}
    reference = (np.fft.rfftn if real else np.fft.fftn)(np.asarray(x, "f8" if real else "c16"), axes=axes, norm=norm)
    reference = transpose_spectrum(reference, axes, transposed, pencil=case == "pencil")
    expected = padded_to(reference, swapped_spec if transposed else natural, x.sharding.mesh)
    assert y.shape == expected.shape
    assert y.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, swapped_spec if transposed else natural), y.ndim)
    np.testing.assert_allclose(y, expected, **tolerance)
    np.testing.assert_allclose(mm.fft.unpad(y, reference.shape), reference, **tolerance)
    restored = backward(y, s=[shape[a] for a in axes], **options)
    assert restored.dtype == x.dtype
    assert restored.sharding.is_equivalent_to(x.sharding, x.ndim)
    np.testing.assert_allclose(restored, x, **tolerance)


@pytest.mark.parametrize(
    ("case", "dtype", "transposed", "options"),
    [
        ("one", "complex128", False, {}),
        ("slab", "float32", False, {}),
        ("slab", "complex128", True, {"kind": "Explicit"}),
        ("pencil", "float64", False, {"kind": "Explicit", "norm": "ortho"}),
        ("pencil", "complex64", True, {"chunks": 2}),
        ("hosts", "float64", True, {"chunks": 3}),
        ("two", "float64", False, {}),
        ("batch", "complex128", True, {"norm": "forward", "chunks": 2}),
        ("order", "float64", False, {}),
    ],
)
def test_transforms_are_numpys_and_come_back(case, dtype, transposed, options):
    check(case, dtype, transposed, **options)


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("case", CASES)
def test_transforms_are_numpys_everywhere(case, dtype, transposed, kind, chunks):
    check(case, dtype, transposed, kind, chunks=chunks)


@pytest.mark.parametrize("case", ["slab", pytest.param("pencil", marks=pytest.mark.full)])
def test_sizes_that_do_not_divide_are_padded(case):
    """So are those of the argument; ``s`` may cut one dimension and fill another."""
    mesh, spec = mesh_of(CASES[case][1]), CASES[case][2]
    x = normal(7, 5, 6)
    y = mm.fft.rfftn(x, (9, 5, 4), mesh=mesh, spec=spec)
    np.testing.assert_allclose(mm.fft.unpad(y, (9, 5, 3)), np.fft.rfftn(x, (9, 5, 4), axes=(0, 1, 2)), atol=1e-12)
    y = mm.fft.fftn(x, mesh=mesh, spec=spec)
    restored = mm.fft.ifftn(y, (7, 5, 6))
    assert restored.shape == (8, 5 + (case == "pencil"), 6)
    np.testing.assert_allclose(mm.fft.unpad(restored, (7, 5, 6)), x, atol=1e-12)


def test_sizes_may_be_numpys():
    x = place(normal(4, 4, 4), (4,), P(A))
    np.testing.assert_array_equal(mm.fft.fftn(x, tuple(np.array([4, 5, 6]))), mm.fft.fftn(x, (4, 5, 6)))


@pytest.mark.parametrize(("case", "real", "count"), [("slab", False, 1), ("pencil", True, 2), ("hosts", True, 1)])
def test_one_all_to_all_per_sharded_dimension_and_no_gather(case, real, count):
    mesh, spec = mesh_of(CASES[case][1]), CASES[case][2]
    x = jax.ShapeDtypeStruct((8, 8, 8), float if real else complex, sharding=NamedSharding(mesh, spec))

    def there_and_back(x):
        y = (mm.fft.rfftn if real else mm.fft.fftn)(x, mesh=mesh, spec=spec)
        return (mm.fft.irfftn if real else mm.fft.ifftn)(y, x.shape, mesh=mesh, spec=CASES[case][4])

    text = jax.jit(there_and_back).lower(x).compile().as_text()
    assert len(re.findall(r"= \S.* all-to-all(?:-start)?\(", text)) == 2 * count
    assert not re.findall(r"all-gather|all-reduce|collective-permute", text)


def test_under_grad_vmap_and_checkpoint():
    mesh = mesh_of((2, 2))
    x, w = normal(3, 4, 6, 5), normal(3, 4, 6, 4, dtype="complex128", seed=1)[..., :3]

    def total(rfftn, irfftn):
        def one(x, w):
            y = jax.checkpoint(lambda x: rfftn(x) * w)(x)
            return jnp.sum(jnp.sin(irfftn(y)))

        return lambda x, w: jnp.sum(jax.vmap(one)(x, w))

    def cut(x):  # the half axis, padded from 3 to 4 by two devices
        return mm.fft.unpad(mm.fft.rfftn(x, mesh=mesh, spec=P(A, B)), (4, 6, 3))

    sharded_total = total(cut, lambda y: mm.fft.irfftn(y, (4, 6, 5), mesh=mesh, spec=P(None, A, B)))
    jax_total = total(jnp.fft.rfftn, lambda y: jnp.fft.irfftn(y, (4, 6, 5)))
    for actual, expected in zip(*(jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (sharded_total, jax_total)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.longer
@pytest.mark.telling("slab-False", "pencil-True")
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.longer)])
@pytest.mark.parametrize("case", ["slab", "pencil", pytest.param("one", marks=pytest.mark.longer)])
def test_eager_derivatives_take_tangents_and_cotangents_in_any_layout(case, transposed):
    shape, mesh, spec = CASES[case][:3]
    x = place(normal(*shape), mesh, spec)

    def transform(x):
        return mm.fft.rfftn(x, transposed=transposed)

    def invert(y):
        return mm.fft.irfftn(y, shape, transposed=transposed)

    y = transform(x)

    def reference(x):
        spectrum = transpose_spectrum(jnp.fft.rfftn(x), (0, 1, 2), transposed, case == "pencil", np=jnp)
        return jnp.pad(spectrum, [(0, n - m) for n, m in zip(y.shape, spectrum.shape, strict=True)])

    weight = normal(*y.shape, dtype="complex128", seed=1)
    cotangents = jax.vjp(reference, np.asarray(x))[1](jnp.asarray(weight))[0]
    for layout in (P(), P(A), P(None, A)):
        if any(n % mesh[0] for n, e in zip(y.shape, layout, strict=False) if e):
            continue
        cotangent = place(weight, mesh, layout)
        np.testing.assert_allclose(jax.vjp(transform, x)[1](cotangent)[0], cotangents, atol=1e-10)
        for f, at, v in ((transform, x, place(np.asarray(x), mesh, P())), (invert, y, cotangent)):
            expected = f(jax.device_put(v, at.sharding))
            np.testing.assert_allclose(jax.jvp(f, (at,), (v,))[1], expected, atol=1e-10)
            np.testing.assert_allclose(jax.linearize(f, at)[1](v), expected, atol=1e-10)
    jax.grad(lambda x: jnp.real(transform(x)[0, 0, 0]))(x)  # a cotangent that JAX makes, on one device


def test_inside_tasks_on_submeshes():
    devices = np.array(jax.devices())
    front, back = Mesh(devices[:4], (A,)), Mesh(devices[4:].reshape(2, 2), (A, B))

    def step(x):
        y = mm.task(lambda x: mm.fft.rfftn(x, mesh=front, spec=P(A)), "front", mesh=front)(x)
        z = mm.task(lambda y: mm.fft.irfftn(y * 1j, (4, 4, 6), mesh=back, spec=P(None, A, B)), "back", mesh=back)(y)
        return jnp.sum(z**3)

    x = normal(4, 4, 6)
    actual = mm.jit(jax.value_and_grad(step))(x)
    expected = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.fft.irfftn(jnp.fft.rfftn(x) * 1j, x.shape) ** 3)))(x)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-10), actual, expected)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_frequencies_match_a_result(kind):
    mesh = mesh_of((4,), kind)
    k = mm.fft.fftfreq(10, 0.5, mesh=mesh, spec=P(A))
    np.testing.assert_allclose(k, np.pad(np.fft.fftfreq(10, 0.5), (0, 2)))
    assert k.sharding.is_equivalent_to(NamedSharding(mesh, P(A)), 1)
    np.testing.assert_allclose(mm.fft.rfftfreq(9, mesh=mesh, spec=P(None)), np.fft.rfftfreq(9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, x: f.fftn(x.astype(int)), "works in float32, float64, complex64 or complex128, got int64"),
        (lambda f, x: f.rfftn(x.astype(complex)), "the array is complex; use fftn"),
        (lambda f, x: f.fftn(np.zeros((4, 4, 4))), "found no sharding of the array of shape (4, 4, 4)"),
        (lambda f, x: f.fftn(x, axes=(1, 2, 0)), "dimension 0, the last of axes, is sharded over ('a',)"),
        (lambda f, x: f.fftn(x, axes=(1, 0, 2)), "dimension 1, the first of axes, must be sharded"),
        (lambda f, x: f.fftn(x, axes=(0,)), "transforms two or three dimensions, not 1"),
        (lambda f, x: f.fftn(x, axes=(0, 0)), "must be different dimensions of an array that has 3"),
        (lambda f, x: f.fftn(x, (4, 4)), "axes, must be sharded"),
        (lambda f, x: f.fftn(x, (4, 0, 4)), "s=(4, 0, 4) must be sizes of at least 1"),
        (lambda f, x: f.fftn(x, axes=1), "s and axes are sequences of numbers; got s=None, axes=1"),
        (lambda f, x: f.fftn(x, 4), "s and axes are sequences of numbers; got s=4, axes=None"),
        (lambda f, x: f.fftn(x, axes=(0.0, 1, 2)), "axes=(0.0, 1, 2) must be numbers of dimensions"),
        (
            lambda f, x: f.fftn(np.zeros((4, 0, 4)), mesh=x.sharding.mesh, spec=P(A)),
            "a transformed dimension of the array of shape (4, 0, 4) is empty",
        ),
        (lambda f, x: f.irfftn(f.rfftn(x[..., :1])), "of shape (4, 4, 1) is empty; pass s="),
        (lambda f, x: f.fftn(x, norm="unit"), "norm is None, 'backward', 'ortho' or 'forward', got 'unit'"),
        (lambda f, x: f.fftn(x, chunks=0), "chunks is a number, at least 1; got 0"),
        (lambda f, x: f.fftn(x, spec=P("q")), "names the axis 'q'; the mesh has 'a'"),
        (lambda f, x: f.ifftn(x), "transposed=False means that of the transformed dimensions the second"),
        (lambda f, x: f.ifftn(f.fftn(x), transposed=True), "pass transposed=False if that is how the array was made"),
        (lambda f, x: f.irfftn(f.rfftn(x), (4, 4, 6)), "s=(4, 4, 6) needs 4 entries along the last of axes"),
        (lambda f, x: f.irfftn(f.rfftn(x[0], mesh=x.sharding.mesh, spec=P(A))), "its size may be padded; pass s="),
        (lambda f, x: f.unpad(x, (4, 5, 4)), "the shape (4, 5, 4) is no leading part of an array of shape (4, 4, 4)"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        call(mm.fft, place(normal(4, 4, 4), (4,), P(A)))
