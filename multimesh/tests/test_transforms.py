"""JAX transformations around, between and inside tasks."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import MLP, SKIP, WIDTH, mlp_block, plain, squared_error
from pipelines import Split, assert_same, both, microbatched, split_two, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2


@pytest.mark.parametrize("loop", ["no loop", "loop"])
def test_jvp(loop):
    def make(stage, microbatch):
        def loss(p, b):
            return SKIP.loss(p, b, stage)

        fn = microbatch(loss, size=SIZE, argnum=1) if loop == "loop" else loss
        return lambda p, t, batch: jax.jvp(lambda p: fn(p, batch), (p,), (t,))

    params = SKIP.init(2)
    both(make, params, jax.tree.map(np.cos, params), SKIP.batch(ROWS, 0))


@pytest.mark.parametrize("loop", ["no loop", "loop"])
def test_vmap_over_parameters(loop):
    """An ensemble: every member's parameters in a leading axis."""

    def make(stage, microbatch):
        def grads(p, b):
            return jax.value_and_grad(lambda p: MLP.loss(p, b, stage))(p)

        fn = microbatch(grads, size=SIZE, argnum=1) if loop == "loop" else grads
        return jax.vmap(fn, in_axes=(0, None))

    members = jax.tree.map(lambda *x: np.stack(x), MLP.init(2), jax.tree.map(lambda x: 0.5 * x, MLP.init(2)))
    both(make, members, MLP.batch(ROWS, 0))


def test_vmap_of_a_task_over_rows():
    def make(stage, _):
        def f(params, x):
            rows = jax.vmap(stage(0, mlp_block), in_axes=(None, 0))(params["stages"][0], x)
            return jax.vmap(stage(1, mlp_block), in_axes=(None, 0))(params["stages"][1], rows)

        return f

    both(make, MLP.init(2), MLP.batch(ROWS, 0)["x"])


@pytest.mark.telling("Explicit-context")
@pytest.mark.parametrize("form", ["wrapper", "context"])
@pytest.mark.parametrize("axes", ["names of their own", "the submeshes' name", "Explicit"])
def test_a_call_under_set_mesh_of_all_devices(form, axes):
    """Constraints outside tasks name its axes, those inside the submesh's; arithmetic stands before and after tasks."""
    devices = np.array(jax.devices())
    ambient = {
        "names of their own": Mesh(devices.reshape(2, 4), ("x", "y")),
        "the submeshes' name": Mesh(devices, ("data",)),
        "Explicit": jax.make_mesh((8,), ("data",)),
    }[axes]
    split = Split(submeshes(2, (2,)), form)
    outer = P(ambient.axis_names[0]) if axes != "Explicit" else None

    def model(stage, constrain):
        def block(p, x):
            return constrain(mlp_block(p, x), P("data"))

        def loss(params, batch):
            x = constrain(jnp.sin(batch["x"]), outer)
            y = stage(0, block)(params["stages"][0], x)
            z = stage(1, block)(params["stages"][1], y)
            return squared_error(z + 0.5 * y, batch["y"])

        return loss

    def step(loss, microbatch):
        return lambda p, b: microbatch(jax.value_and_grad(loss), size=4, argnum=1)(p, b)

    args = MLP.init(2), MLP.batch(ROWS, 0)
    expected = jax.jit(step(model(plain, lambda x, _: x), microbatched))(*args)

    def constrain(x, spec):
        return x if spec is None else lax.with_sharding_constraint(x, spec)

    f = mm.jit(step(model(split, constrain), mm.microbatch))
    with jax.set_mesh(ambient):
        actual = [f(*args), f.lower(*args).compile()(*args)]
    for result in actual:
        assert_same(result, jax.device_get(expected))


@jax.custom_vjp
def clipped(x):
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -1e-3, 1e-3) * jnp.cos(x),))


@jax.custom_jvp
def halved_slope(x):
    return jnp.square(x)


halved_slope.defjvp(lambda x, t: (jnp.square(x[0]), x[0] * t[0]))


def scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.mean(x)), x, jnp.stack([p["up"] @ p["down"]] * 3))[0]


def branched(p, x):
    return lax.cond(jnp.sum(x) > 0, lambda x: mlp_block(p, x), lambda x: jnp.sin(x) @ p["up"] @ p["down"], x)


def loop_over(p, x):
    """A while loop has no transpose: the loop's result is a constant of the gradient."""
    power = lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 0.9, c[1] + 1), (lax.stop_gradient(x), 0))[0]
    return mlp_block(p, x) + power


def fori(p, x):
    return lax.fori_loop(0, 3, lambda _, x: mlp_block(p, x), x)


@jax.custom_vjp
def sine_on_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


sine_on_host.defvjp(
    lambda x: (sine_on_host(x), x),
    lambda x, g: (g * jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x),),
)
TABLE = np.random.default_rng(3).normal(size=(64, WIDTH)).astype(np.float32) / 8
TABLE_ELSEWHERE = jax.device_put(TABLE, jax.devices()[5])

BODIES = {
    "custom_vjp": lambda p, x: clipped(mlp_block(p, x)),
    "custom_jvp": lambda p, x: halved_slope(mlp_block(p, x)),
    "scan": scanned,
    "cond": branched,
    "while": loop_over,
    "fori": fori,
    "linalg": lambda p, x: x @ jnp.linalg.inv(jnp.eye(x.shape[-1]) * 4 + p["up"] @ p["down"]),
    "scatter": lambda p, x: mlp_block(p, x).at[jnp.array([0, 1]), 1].add(p["bias"][0]),
    "reversed scan": lambda p, x: lax.scan(
        lambda c, r: (c * 0.5 + r, jnp.sin(c)), mlp_block(p, x), jnp.arange(3.0), reverse=True
    )[1].sum(0),
    "fft": lambda p, x: jnp.fft.irfft(2 * jnp.fft.rfft(mlp_block(p, x))),
    "pure_callback": lambda p, x: mlp_block(p, sine_on_host(x)),
    "large constants": lambda p, x: mlp_block(p, x) + (x @ TABLE.T) @ TABLE_ELSEWHERE / 64,
}


@pytest.mark.telling("scan", "linalg", "pure_callback")
@pytest.mark.parametrize("body", BODIES)
def test_inside_a_task(body):
    def make(stage, microbatch):
        def loss(params, batch):
            x = stage(0, BODIES[body])(params["stages"][0], batch["x"])
            x = stage(1, BODIES[body])(params["stages"][1], x)
            return squared_error(x, batch["y"])

        return microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)

    both(make, MLP.init(2), MLP.batch(ROWS, 0))


def test_custom_vjp_around_tasks():
    """The backward function holds tasks of its own."""

    def make(stage, _):
        @jax.custom_vjp
        def f(p, x):
            return stage(1, mlp_block)(p[1], stage(0, mlp_block)(p[0], x))

        def forward(p, x):
            return f(p, x), (p, x)

        def backward(residuals, g):
            p, x = residuals
            return jax.tree.map(lambda w: w * 0.5, p), stage(0, lambda g, x: g * jnp.cos(x))(g, x)

        f.defvjp(forward, backward)
        return jax.grad(lambda p, x: f(p, x).sum(), argnums=(0, 1))

    params = MLP.init(2)["stages"]
    both(make, params, MLP.batch(ROWS, 0)["x"])


@pytest.mark.parametrize("loop", ["no loop", "loop"])
def test_shard_map_inside_a_task(loop):
    """Column- and row-parallel halves of a block with an explicit psum over the submesh's axis."""
    split = Split(submeshes(2, (2, 2)))

    def parallel_block(mesh):
        def local(p, x):
            hidden = jnp.tanh(x @ p["up"] + p["bias"])
            return x + lax.psum(hidden @ p["down"], "model")

        specs = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))

    def make(stage, microbatch):
        def loss(params, batch):
            x = batch["x"]
            for s, p in enumerate(params["stages"]):
                block = mlp_block if stage is plain else parallel_block(split.mesh(s))
                x = stage(s, block)(p, x)
            return squared_error(x, batch["y"])

        if loop == "no loop":
            return jax.value_and_grad(loss)
        return microbatch(jax.value_and_grad(loss), size=4, argnum=1)

    both(make, MLP.init(2), MLP.batch(ROWS, 0), split=split)


def energy(stage):
    """Two submeshes with a loop over microbatches on them, and a result without derivative."""

    loop = microbatched if stage is plain else functools.partial(mm.microbatch, schedule="1f1b")

    def f(params, x):
        def one(p, x):
            h = stage(0, mlp_block)(p["stages"][0], x)
            return jnp.sum(stage(1, lambda p, h: jnp.square(mlp_block(p, h)))(p["stages"][1], h))

        return loop(one, size=SIZE, argnum=1)(params, x), jnp.argmax(params["stages"][0]["bias"])

    return f


def slope(grads, tangent):
    """Return that of the first stage: arrays on several submeshes are not added outside of a jitted function."""
    return jnp.vdot(grads["stages"][0]["up"], tangent["stages"][0]["up"])


OUTSIDE = {  # a function of (f, params, tangent, x), where f is jitted
    "grad": lambda f, p, t, x: jax.grad(lambda p, x: f(p, x)[0], argnums=(0, 1))(p, x),
    "value_and_grad": lambda f, p, t, x: jax.value_and_grad(f, has_aux=True)(p, x),
    "vjp": lambda f, p, t, x: jax.vjp(lambda p: f(p, x)[0], p)[1](jnp.float32(2)),
    "jvp": lambda f, p, t, x: jax.jvp(lambda p: f(p, x)[0], (p,), (t,)),
    "linearize": lambda f, p, t, x: jax.linearize(lambda p: f(p, x)[0], p)[1](t),
    "forward over reverse": lambda f, p, t, x: jax.jvp(jax.grad(lambda p: f(p, x)[0]), (p,), (t,))[1],
    "reverse over reverse": lambda f, p, t, x: jax.grad(lambda p: slope(jax.grad(lambda p: f(p, x)[0])(p), t))(p),
    "vmap": lambda f, p, t, x: jax.vmap(f, in_axes=(None, 1))(p, jnp.stack([x, 2 * x], 1)),
    "vmap of grad": lambda f, p, t, x: jax.vmap(jax.grad(f, has_aux=True), in_axes=(None, 0))(p, jnp.stack([x, x])),
    "grad of vmap": lambda f, p, t, x: jax.grad(
        lambda p: jax.vmap(f, in_axes=(None, 0))(p, jnp.stack([x, x]))[0].sum()
    )(p),
    "concrete under grad": lambda f, p, t, x: jax.grad(lambda s: s * f(p, x)[0])(2.0),
    "concrete under vmap": lambda f, p, t, x: jax.vmap(lambda s: s * f(p, x)[0])(jnp.arange(3.0)),
}


@pytest.mark.telling("grad", "vmap")
@pytest.mark.parametrize("transform", OUTSIDE)
def test_outside(transform, compilations):
    """The jitted function's arguments lie on their submeshes; once compiled it stays so."""
    split = split_two()
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    placed = {"stages": [jax.device_put(p, split.mesh(s).devices.flat[0]) for s, p in enumerate(params["stages"])]}
    tangent = jax.tree.map(np.cos, params)
    f = mm.jit(energy(split))
    actual = OUTSIDE[transform](f, placed, tangent, x)
    assert_same(actual, OUTSIDE[transform](jax.jit(energy(plain)), params, tangent, x))
    before = len(compilations)
    OUTSIDE[transform](f, placed, tangent, x)
    assert len(compilations) == before


def custom(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: (f(*args), args), lambda args, _: jax.tree.map(jnp.cos, args))
    return jax.grad(g)


INSIDE = {  # f() has no arguments of the trace
    "jit": lambda f: jax.jit(lambda s: s * f())(2.0),
    "scan": lambda f: lax.scan(lambda c, _: (c + f(), c), jnp.float32(0), None, length=2),
    "cond": lambda f: lax.cond(jnp.array(True), f, lambda: jnp.float32(1)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda s: s * f()))(2.0),
    "custom_vjp": lambda f: custom(lambda s: s * f())(2.0),
    "eval_shape": lambda f: jax.tree.map(np.zeros_like, jax.eval_shape(f)),
    "make_jaxpr": lambda f: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)())()[0],
}


@pytest.mark.telling("checkpoint", "scan", "jit")
@pytest.mark.parametrize("trace", INSIDE)
def test_concrete_arguments_inside_another_trace(trace):
    split = split_two()
    args = MLP.init(2), MLP.batch(ROWS, 0)["x"]
    jitted, expected = mm.jit(energy(split)), jax.jit(energy(plain))
    assert_same(INSIDE[trace](lambda: jitted(*args)[0]), INSIDE[trace](lambda: expected(*args)[0]))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_closure_over_a_value_of_the_transformation(transform):
    split = split_two()
    params, x = MLP.init(2), MLP.batch(ROWS, 0)["x"]

    def of(jit, stage):
        def f(scale):
            return jit(lambda p: energy(stage)(p, x)[0] * scale)(params)

        return jax.grad(f)(2.0) if transform == "grad" else jax.vmap(f)(jnp.arange(3.0))

    assert_same(of(mm.jit, split), of(jax.jit, plain))


CONSTRAINED = {  # transformations of a function with a constraint between tasks, inside the jit and around it
    "grad": lambda fn, jit: (jit(jax.grad(fn)), jax.grad(jit(fn))),
    "jvp": lambda fn, jit: [g(lambda x: jax.jvp(f, (x,), (x,))) for f, g in ((fn, jit), (jit(fn), lambda f: f))],
    "linearize": lambda fn, jit: (lambda x: jax.linearize(jit(fn), x)[1](x),),
    "hessian": lambda fn, jit: (jit(jax.hessian(fn)), jax.hessian(jit(fn))),
    "vmap": lambda fn, jit: (jit(lambda x: jax.vmap(fn)(x[None])), lambda x: jax.vmap(jit(fn))(x[None])),
    "checkpoint": lambda fn, jit: (jit(jax.grad(jax.checkpoint(fn))), jax.grad(jit(jax.checkpoint(fn)))),
}


@pytest.mark.telling("grad", "vmap", "checkpoint")
@pytest.mark.parametrize("transform", CONSTRAINED)
def test_a_constraint_between_tasks_is_transformed_as_the_identity(transform):
    first, second = submeshes(2)

    def make(task, constrain):
        def fn(x):
            hidden = constrain(task(lambda x: 2 * x, "first", mesh=first)(x), P("data"))
            return jnp.sum(task(jnp.sin, "second", mesh=second)(hidden))

        return fn

    x = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)
    reference = make(lambda fn, name, mesh: fn, lambda x, spec: x)
    for actual, expected in zip(
        CONSTRAINED[transform](make(mm.task, mm.with_sharding_constraint), mm.jit),
        CONSTRAINED[transform](reference, jax.jit),
        strict=True,
    ):
        assert_same(actual(x), expected(x))


def test_vmap_knows_which_results_have_no_rows():
    split = Split(submeshes(2), "wrapper")
    f = mm.jit(lambda w, x: (split(0, jnp.dot)(x, w), split(1, jnp.sum)(w)))
    w, x = np.ones((4, 4), np.float32), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert_same(jax.vmap(f, in_axes=(None, 0), out_axes=(1, None))(w, x), (np.moveaxis(x @ w, 0, 1), np.float32(16)))
