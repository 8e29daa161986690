"""The algebra of the passes: what the registry says holds, and what passes reorder is what plain JAX computes.

Values are small integers, so that sums of floats are exact in every order: what is not linear, narrows or overflows
then differs plainly.
"""

import contextlib
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.core import _compat
from multimesh.ir import primitives
from pipelines import submeshes
from programs import on

import multimesh as mm
from multimesh import ir

WIDE = ("int64", "uint64", "float64", "complex128")
DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", *WIDE),
)
DEFAULT = ("int8", "uint32", "float16", "bfloat16", "complex64")  # always tested
SOME = [d if d in DEFAULT else pytest.param(d, marks=pytest.mark.full) for d in DTYPES]
ROWS, SIZE, WIDTH = 8, 4, 3
(MESH,) = submeshes(1, (2,))
ROUNDING = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5, "complex64": 1e-5}


def clamped(x):
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and "fusion_emitters=false" in os.environ["XLA_FLAGS"]:
        raise TypeError("XLA clamps no complex numbers without its fusion emitters")
    return lax.clamp(jnp.zeros_like(x), x, jnp.full_like(x, 5))


# Of one array: functions of one primitive each, and conversions. What a dtype does not have is left out for it.
ELEMENTWISE = {
    **{f.__name__: f for f in (lax.neg, lax.abs, lax.sign, lax.square, lax.sqrt, lax.rsqrt, lax.cbrt, lax.exp)},
    **{f.__name__: f for f in (lax.exp2, lax.expm1, lax.log, lax.log1p, lax.logistic, lax.tanh, lax.erf, lax.sin)},
    **{f.__name__: f for f in (lax.cos, lax.is_finite, lax.real, lax.imag, lax.conj, lax.bitwise_not)},
    **{f.__name__: f for f in (lax.tan, lax.sinh, lax.cosh, lax.erf_inv, lax.floor, lax.ceil)},
    "round": lax.round,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "copy": functools.partial(jnp.array, copy=True),
    "reduce_precision": lambda x: lax.reduce_precision(x, 4, 3),
    **{f"{f.__name__} 3": lambda x, f=f: f(x, jnp.full_like(x, 3)) for f in (lax.add, lax.sub, lax.mul, lax.div)},
    **{f"{f.__name__} 3": lambda x, f=f: f(x, jnp.full_like(x, 3)) for f in (lax.rem, lax.max, lax.min, lax.pow)},
    **{f"{f.__name__} 3": lambda x, f=f: f(x, jnp.full_like(x, 3)) for f in (lax.eq, lax.ne, lax.lt, lax.ge)},
    **{f"{f.__name__} 3": lambda x, f=f: f(x, jnp.full_like(x, 3)) for f in (lax.bitwise_and, lax.bitwise_or)},
    "bitwise_xor 3": lambda x: lax.bitwise_xor(x, jnp.full_like(x, 3)),
    "3 div": lambda x: lax.div(jnp.full_like(x, 3), x),
    "where": lambda x: jnp.where(x > 2, x, jnp.full_like(x, jnp.nan)),
    "clamp": clamped,
    "complex": lambda x: lax.complex(x, x),
    "reversed": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "split": lambda x: jnp.concatenate(jnp.split(x, [1])[::-1]),
    "rows": lambda x: jnp.stack([row * 2 for row in x][::-1]),
    "log2": jnp.log2,
    "slope of tanh": lambda x: jax.jvp(lax.tanh, (x,), (x,))[1],
    "polynomial": lambda x: jnp.polyval(jnp.array([1, 2, 3], x.dtype), x),
    "reshape": lambda x: x.reshape(1, -1).T[:, 0],
    "broadcast": lambda x: jnp.broadcast_to(x[:1], x.shape),
    **{f"to {dtype}": lambda x, dtype=dtype: lax.convert_element_type(x, dtype) for dtype in DTYPES if dtype != "bool"},
}
# Of the rows of a microbatch, [SIZE, WIDTH] to [WIDTH].
SUMS = {
    "sum": lambda x: jnp.sum(x, 0),
    "sum as it is": lambda x: lax.reduce_sum(x, (0,)),
    "product": lambda x: jnp.ones((x.shape[0],), x.dtype) @ x,
    "wide product": lambda x: lax.dot_general(
        x, x[:, 0], (((0,), (0,)), ((), ())), preferred_element_type=jnp.promote_types(x.dtype, "float32")
    ),
    "scatter": lambda x: jnp.zeros((WIDTH,), x.dtype).at[jnp.arange(x.shape[0]) % WIDTH].add(x[:, 0]),
    "times the largest row": lambda x: jnp.sum(x, 0) * jnp.max(jnp.real(x), 0).astype(x.dtype),
    "by the number of rows": lambda x: jnp.sum(x, 0) / jnp.sum(x > 0, 0),
    "largest": lambda x: jnp.max(jnp.real(x), 0),
    "any": lambda x: jnp.any(x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 0)[-1],
}


@contextlib.contextmanager
def widths(dtype):
    with jax.enable_x64(dtype in WIDE):
        yield


def rows(dtype, seed=0):
    """Small integers in floats; integers that wrap."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.inexact):
        return rng.integers(-4, 5, (ROWS, WIDTH)).astype(kind)
    if kind.kind == "b":
        return rng.integers(0, 2, (ROWS, WIDTH)).astype(kind)
    limits = np.iinfo(kind)
    return rng.integers(limits.min, limits.max, (ROWS, WIDTH), dtype=kind, endpoint=True)


def chain(names):
    return lambda x: functools.reduce(lambda x, name: (ELEMENTWISE | SUMS)[name](x), names, x)


def has(f, *args):
    """Return whether a function takes and gives these dtypes, and gives something that can be summed."""
    try:
        out = jax.eval_shape(f, *args)
    except (TypeError, ValueError):
        return False
    return jnp.issubdtype(out.dtype, jnp.number)


def check_close(actual, expected, dtype):
    for name, value in expected.items():
        a, b = np.asarray(actual[name]), np.asarray(value)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=str(name))
            continue
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        bound = max(ROUNDING.get(b.dtype.name, 1e-12), ROUNDING.get(dtype, 0.0))
        scale = np.abs(b.astype(wide)[np.isfinite(b)]).max(initial=0.0)
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=bound, atol=bound * scale, err_msg=str(name))


def check_sums(chains, dtype, seed=0):
    """Rows over two devices against a loop of plain JAX over the same rows."""
    x = rows(dtype, seed)
    functions = {names: chain(names) for names in chains if has(chain(names), x[:SIZE])}

    def one(x):
        return {names: f(x) for names, f in functions.items()}

    def loop(x):
        count = ROWS // SIZE
        parts = [one(x[i::count]) for i in range(count)]
        return jax.tree.map(lambda *terms: functools.reduce(lax.add, terms, jnp.zeros_like(terms[0])), *parts)

    f = mm.jit(mm.microbatch(lambda x: mm.task(one, "one", mesh=MESH)(x), size=SIZE))
    check_close(f(jax.device_put(x, NamedSharding(MESH, P("data")))), jax.jit(loop)(x), dtype)


@pytest.mark.longer
@pytest.mark.telling("int8", "bfloat16")
@pytest.mark.parametrize("dtype", SOME)
def test_every_elementwise_operation_on_a_sum_over_rows(dtype):
    """``f(sum)`` for every ``f`` there is: of integers, of what narrows, and of what is not linear."""
    with widths(dtype):
        check_sums([("sum as it is", name) for name in ELEMENTWISE] + [(name,) for name in SUMS], dtype)


@pytest.mark.parametrize(
    ("f", "dtype", "expected"),
    [
        (lambda x: jnp.sum(x).astype(jnp.int32), "float32", 4),
        (lambda x: jnp.sum(x) // 2, "uint32", 8),
        (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None).astype(jnp.int32), "int8", -512),
    ],
    ids=["cut off", "divided", "widened"],
)
def test_what_is_linear_over_floats_only(f, dtype, expected):
    """The cases that were wrong: each part was cut off, divided or widened before the parts were added."""
    parts = {4: [0.5] * 8, 8: [4, 5] * 4, -512: [64] * 8}[expected]
    x = jax.device_put(np.array(parts, dtype), NamedSharding(MESH, P("data")))
    g = mm.jit(mm.microbatch(mm.task(f, "f", mesh=MESH), size=4))
    total = sum(jax.jit(f)(x[i::2]) for i in range(2))
    assert (int(g(x)), g(x).dtype) == (int(total), total.dtype)
    assert not g.plan(x).over


def test_half_floats_keep_their_order():
    """Parts of 60000 on one device and -60000 on the other cancel in every microbatch, and overflow in two."""
    x = np.array([6e4] * 4 + [-6e4] * 4, np.float16)
    f = mm.jit(mm.microbatch(mm.task(lambda x: jnp.ones_like(x) @ x, "f", mesh=MESH), size=2))
    x = jax.device_put(x, NamedSharding(MESH, P("data")))
    assert not f.plan(x).over


def test_an_operand_that_is_itself_what_is_summed():
    """``(x.T @ y) * x``: the factor needs all rows of ``x``, of which a part of the sum has a part."""
    (mesh,) = submeshes(1, (2,))
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    f = mm.task(lambda x: (x.T @ (x + 1)) * x, "f", mesh=mesh)
    actual = mm.jit(mm.microbatch(f, size=2))(jax.device_put(x, NamedSharding(mesh, P("data"))))
    expected = sum((x[i::4].T @ (x[i::4] + 1)) * x[i::4] for i in range(4))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def equations(f, *args):
    """Operations of a function, as the passes see them."""
    closed = jax.make_jaxpr(f)(*args)
    env = {v: ir.Value(v.aval) for e in closed.jaxpr.eqns for v in (*e.invars, *e.outvars) if not hasattr(v, "val")}
    return [
        ir.Op(e.primitive, e.params, tuple(env.get(v, v) if not hasattr(v, "val") else v for v in e.invars),
              tuple(env[v] for v in e.outvars)) for e in closed.jaxpr.eqns]  # fmt: skip


@pytest.mark.telling("uint8", "bfloat16", "complex64", "int32", "float32", "float64")
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_what_the_registry_calls_linear_is(dtype):
    """``f(a + b) == f(a) + f(b)`` for every operation and operand that a sum may pass through, and it finds some."""
    with widths(dtype):
        a, b = rows(dtype, 1)[0], rows(dtype, 2)[0]
        names = set()
        for name, f in ELEMENTWISE.items():
            if not has(f, a):
                continue
            ops = equations(f, a)
            constants = {o for op in ops if not list(op.reads) for o in op.outs}
            operands = [
                (op, i) for op in ops for i, v in enumerate(op.ins) if isinstance(v, ir.Value) and v not in constants
            ]
            if operands and all(i in primitives.linear_in(op) for op, i in operands):
                names.add(name)
                np.testing.assert_array_equal(f(a + b), f(a) + f(b), err_msg=name)
        assert ("neg" in names) == (dtype != "float16")
        assert ("div 3" in names) == (dtype not in ("float16",) and jnp.issubdtype(dtype, jnp.inexact))


def test_the_registry_knows_primitives_not_names():
    """Every name is one of this JAX, and another primitive of that name is not what the registry describes."""
    since = {(0, 11): {"log2", "one_minus_square"}, (0, 12): {"polynomial"}}
    later = {name for version, names in since.items() if jax.__version_info__[:2] < version for name in names}
    assert {name for name, _ in primitives._table() if name not in _compat.PRIMITIVES} == later
    (op,) = equations(lax.neg, np.float32(1))
    primitive = type(op.prim)("neg")
    assert primitives.linear_in(op) == (0,)
    assert primitives.linear_in(ir.Op(primitive, {}, op.ins, op.outs)) == ()


@pytest.mark.longer
@pytest.mark.parametrize(
    "dtype", [d if d in ("int8", "float32") else pytest.param(d, marks=pytest.mark.full) for d in DTYPES[1:]]
)
def test_every_repeated_operation_gives_what_it_gave(dtype):
    """The backward of the first stage reads every operation's result; it is repeated there rather than kept."""
    with widths(dtype):
        x = rows(dtype)
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        functions = {name: f for name, f in ELEMENTWISE.items() if has(f, x[0])}

        def cotangents(res, ct):
            """Sums of what was made forward, in the backward pass."""
            return functools.reduce(lambda t, y: t + jnp.sum(jnp.abs(y), dtype=y.dtype).astype(ct.dtype) * ct, res, ct)

        @jax.custom_vjp
        def stage(w, x):
            return w * jnp.sum(x * x).real.astype(np.float32)

        def forward(w, x):
            values = [jax.vmap(f)(2 * x if inexact else x) for f in functions.values()]
            return stage(w, x), [jnp.nan_to_num(y) if jnp.issubdtype(y.dtype, jnp.inexact) else y for y in values]

        stage.defvjp(forward, lambda res, ct: (cotangents([jnp.abs(y) < 3 for y in res], ct), None))

        def loss(tasks):
            first, last = (on(0, stage), on(1, jnp.sin)) if tasks else (stage, jnp.sin)
            return jax.value_and_grad(lambda w, x: last(first(w, x)))

        f = mm.jit(mm.microbatch(loss(True), argnum=1, size=SIZE))
        actual = f(np.float32(0.1), x)
        expected = [jax.jit(loss(False))(np.float32(0.1), x[i :: ROWS // SIZE]) for i in range(ROWS // SIZE)]
        np.testing.assert_allclose(actual, np.sum(expected, 0), rtol=1e-4)


def test_not_a_number_in_a_branch_that_is_not_taken():
    """``where`` hides it forward; repeated in the backward it hides it again, and the gradient is that of plain JAX."""

    def stage(w, x):
        positive = x > 0
        y = jnp.log(jnp.where(positive, x, 1.0)) * w
        return jnp.where(positive, y, jnp.where(x < 0, jnp.inf * w, 0.0))

    def loss(tasks):
        first, last = (on(0, stage), on(1, jnp.sum)) if tasks else (stage, jnp.sum)
        return jax.value_and_grad(lambda w, x: last(jnp.where(x > 0, first(w, x), 0.0)))

    x = np.array([1, -2, 3, 0, 5, -6, 7, -0.0], np.float32)
    actual = mm.jit(mm.microbatch(loss(True), argnum=1, size=2))(np.float32(2), x)
    expected = np.sum([loss(False)(np.float32(2), x[i::4]) for i in range(4)], 0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.longer
@pytest.mark.telling("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_equals_a_maximum_in_the_backward_pass(dtype):
    """Made again from ``p`` by a program that rounds it otherwise, no element would equal the maximum: NaN."""

    def front(w, x):
        p = jnp.tan(w * x)  # kept, as its cosine is asked for
        y = p * w + 0.3 * x
        z = jnp.maximum(y, 0.1 * x)
        return jnp.sin(p) + z @ jnp.ones((64, 64), z.dtype), z, jnp.max(y, 1)

    def back(h, z, most):
        return jnp.sum(jnp.tanh(h)) + jnp.sum(z * z) / 2 + jnp.sum(jnp.sin(most))

    def loss(tasks):
        first, last = (on(0, front), on(1, back)) if tasks else (front, back)
        return jax.value_and_grad(lambda w, x: last(*first(w, x)).astype(np.float32))

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=64).astype(jnp.dtype(dtype)), rng.normal(size=(64, 64)).astype(jnp.dtype(dtype))
    _, actual = mm.jit(mm.microbatch(loss(True), argnum=1, size=16))(w, x)
    expected = np.sum([jax.jit(loss(False))(w, x[i::4])[1].astype(np.float64) for i in range(4)], 0)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, atol={"float32": 1e-5, "bfloat16": 4e-2}[dtype] * abs(expected).max()
    )


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_drawn_without_a_key_is_drawn_once(inside):
    """It depends on no input, so that each submesh would draw numbers of its own."""

    def draw():
        return lax.rng_uniform(0.0, 1.0, shape=(4,))

    def f(x):
        u = lax.scan(lambda c, _: (draw(), None), x, None, length=2)[0] if inside else draw()
        return on(0, lambda x, u: 0 * x + u)(x, u), on(1, lambda x, u: 0 * jnp.sin(x) + u)(x, u)

    np.testing.assert_array_equal(*mm.jit(f)(np.ones(4, np.float32)))


def test_a_sum_starts_at_zero():
    """Minus zero added to the zero that a sum starts with is zero, as in the scan."""
    f = mm.task(lambda x: -jnp.sum(jnp.abs(x)), "f", mesh=MESH)
    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(MESH, P("data")))
    assert not np.signbit(mm.jit(mm.microbatch(f, size=4))(x))


def test_devices_in_another_order_sum_the_same_rows():
    mesh = Mesh(np.array(jax.devices()[:4])[[2, 0, 3, 1]], ("data",))
    x = np.arange(16, dtype=np.int32).reshape(16, 1) ** 3
    f = mm.jit(mm.microbatch(mm.task(lambda x: jnp.sum(x, 0), "f", mesh=mesh), size=8))
    np.testing.assert_array_equal(f(jax.device_put(x, NamedSharding(mesh, P("data")))), x.sum(0))
