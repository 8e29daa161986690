"""Layouts in types inside tasks: JAX's transformations, schedules and meshes, against plain ``jax.jit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import FORMS, Split, assert_same, scopes
from test_transforms import halved_slope
from typed_models import LAYER, SIZE, arguments, block, check, decoder, looped, loss_of, typed_meshes

import multimesh as mm

MESHES = typed_meshes()


def train(loss, schedule="1f1b", has_aux=False):
    grad = jax.value_and_grad(loss, has_aux=has_aux)
    return mm.microbatch(grad, size=SIZE, argnum=1, schedule=schedule, reduce="mean")


@pytest.mark.longer
@pytest.mark.telling("interleaved")
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_two_stages_on_a_submesh(schedule):
    args, plain_args = arguments(MESHES)
    route = [MESHES[n] for n in mm.schedules.get(schedule).placement(2)]
    loss = mm.pipeline(decoder(plain), route, interleave=4 // len(route))
    check(train(loss, schedule), looped(jax.value_and_grad(decoder(plain))), args, plain_args, MESHES[0])


@pytest.mark.longer
def test_cuts_within_a_checkpointed_layer_with_auto_axes():
    """More stages than layers: each layer is opened, and a part of it is computed under Auto axes."""
    meshes = typed_meshes(((2, 1),) * 4)
    _, plain_args = arguments(meshes, layers=2)
    loss = decoder(plain, jax.checkpoint(masked))
    pipelined = mm.pipeline(loss, [*meshes, *reversed(meshes)])
    check(train(pipelined, "dualpipe-v"), looped(jax.value_and_grad(loss)), plain_args, plain_args, meshes[0])


@jax.custom_vjp
def clipped(x):
    return jnp.tanh(x)


clipped.defvjp(
    lambda x: (jnp.tanh(x), x),
    lambda x, g: (reshard(jnp.clip(g, -1e-3, 1e-3) * jnp.cos(x), P("data", None)),),
)


def name_hidden(w, x):
    h = checkpoint_name(jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("data", "model")), "hidden")
    return x + jnp.einsum("bf,fd->bd", jnp.sin(h), w["down"], out_sharding=P("data", None))


def partly_sharded(w, x):
    """One axis is Manual inside, the other stays Explicit."""

    def local(up, down, x):
        h = jnp.einsum("bd,df->bf", x, up, out_sharding=P(None, "model"))
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0] + jnp.einsum(
            "bf,fd->bd", jnp.tanh(h), down, out_sharding=P(None, None)
        )

    rows = P("data", None)
    return jax.shard_map(local, in_specs=(P(), P(), rows), out_specs=rows, axis_names={"data"})(w["up"], w["down"], x)


def kernel(w, x):
    """A Pallas kernel, interpreted, on each device's part."""
    from jax.experimental import pallas as pl

    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def call(x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    @jax.custom_vjp
    def run(x):
        return jax.shard_map(call, in_specs=P("data", None), out_specs=P("data", None), check_vma=False)(x)

    run.defvjp(lambda x: (run(x), None), lambda _, g: (2 * g,))
    return block(w, run(x))


def over_rows(w, x):
    """`jax.vmap` over rows that an axis divides."""

    up, down = reshard(w["up"], P()), reshard(w["down"], P())
    return jax.vmap(lambda x: x + jnp.tanh(x @ up) @ down, spmd_axis_name="data")(x)


def masked(w, x):
    """A mask of constants alone inside of `auto_axes`, as attention writes it; its cost is that of the rows."""

    def mix(up, down, x):
        distance = jnp.arange(x.shape[0])[:, None] - jnp.arange(x.shape[0])
        return x + jnp.where((distance >= 0) & (distance < 3), 0.5, 0.0) @ jnp.tanh(x @ up) @ down

    return auto_axes(mix, out_sharding=P("data", None))(w["up"], w["down"], x)


BODIES = {
    "checkpoint": jax.checkpoint(block),
    "policy by name": jax.checkpoint(name_hidden, policy=jax.checkpoint_policies.save_only_these_names("hidden")),
    "scan of checkpoint": lambda w, x: lax.scan(
        jax.checkpoint(lambda x, s: (block(jax.tree.map(lambda a: s * a, w), x), None)), x, jnp.array([1.0, 0.5])
    )[0],
    "while": lambda w, x: (
        block(w, x) + lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 0.9, c[1] + 1), (lax.stop_gradient(x), 0))[0]
    ),
    "shard_map of one axis": partly_sharded,
    "auto_axes": lambda w, x: auto_axes(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"], out_sharding=P("data"))(
        w, x
    ),
    "masked auto_axes": masked,
    "masked auto_axes, checkpointed": jax.checkpoint(masked),
    "explicit_axes": lambda w, x: auto_axes(
        lambda w, x: explicit_axes(block, in_sharding=(LAYER, P("data", None)))(w, x), out_sharding=P("data", None)
    )(w, x),
    "custom_vjp": lambda w, x: clipped(block(w, x)),
    "custom_jvp": lambda w, x: halved_slope(block(w, x)),
    "vmap": over_rows,
    "pallas": kernel,
    "nested jit": jax.jit(block),
    "types": lambda w, x: block(w, (2.0 if jax.typeof(x).sharding.spec[0] == "data" else 0.0) * x),
}


@pytest.mark.telling("task-scan of checkpoint", "pipeline-shard_map of one axis", "task-custom_vjp")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_inside(form, body):
    args, plain_args = arguments(MESHES)
    loss = loss_of(form, MESHES, BODIES[body])
    check(train(loss), looped(jax.value_and_grad(decoder(plain, BODIES[body]))), args, plain_args, MESHES[0])


def losses(stage, loop):
    loss = decoder(stage)

    def with_aux(params, tokens):
        return loss(params, tokens), {"norm": jnp.sqrt(jnp.vdot(params["embed"], params["embed"]))}

    def clip(grads):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)

    def step(params, tokens):
        value, grads = loop(jax.value_and_grad(loss))(params, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, clip(grads))

    return {
        "no loop": jax.value_and_grad(loss),
        "gradient outside": jax.value_and_grad(lambda p, t: loop(loss)(p, t)),
        "checkpointed loss": loop(jax.value_and_grad(jax.checkpoint(loss))),
        "has_aux": loop(jax.value_and_grad(with_aux, has_aux=True)),
        "clipped step": step,
        "clipped microbatches": loop(lambda p, t: clip(jax.grad(loss)(p, t))),
        "jvp": lambda p, t: jax.jvp(lambda p: loss(p, t), (p,), (p,)),
        "hessian product": lambda p, t: jax.jvp(jax.grad(lambda p: loss(p, t)), (p,), (p,))[1],
    }


@pytest.mark.longer
@pytest.mark.telling("clipped step", "gradient outside")
@pytest.mark.parametrize("case", losses(plain, looped))
def test_around(case):
    args, plain_args = arguments(MESHES)
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, reduce="mean")
    actual, expected = losses(Split(MESHES), loop)[case], losses(plain, looped)[case]
    check(actual, expected, args, plain_args, MESHES[0])


OUTSIDE = {
    "grad": lambda f, p, t: jax.grad(f)(p, t),
    "value_and_grad": lambda f, p, t: jax.value_and_grad(f)(p, t),
    "vjp": lambda f, p, t: jax.vjp(lambda p: f(p, t), p)[1](jnp.float32(2)),
    "jvp": lambda f, p, t: jax.jvp(lambda p: f(p, t), (p,), (p,)),
    "vmap": lambda f, p, t: jax.vmap(f, in_axes=(None, 0))(p, jnp.stack([np.asarray(t)] * 2)),
    "hessian product": lambda f, p, t: jax.jvp(jax.grad(lambda p: f(p, t)), (p,), (p,))[1],
}


REFUSED_BY_JAX = {("jvp", "pallas"), ("hessian product", "pallas"), ("jvp", "custom_vjp")}


@pytest.mark.longer
@pytest.mark.telling("grad-custom_vjp", "hessian product-auto_axes")
@pytest.mark.parametrize(
    ("transform", "body"),
    [(name, body) for name in OUTSIDE for body in ("block", *BODIES) if (name, body) not in REFUSED_BY_JAX],
)
def test_outside(transform, body):
    """Transformations of the jitted function; a rule of custom_vjp is typed code too."""
    args, plain_args = arguments(MESHES)
    run = BODIES.get(body, block)
    with jax.set_mesh(MESHES[0]):
        expected = OUTSIDE[transform](jax.jit(decoder(plain, run)), *plain_args)
    actual = OUTSIDE[transform](mm.jit(decoder(Split(MESHES), run)), *args)
    assert_same(actual, jax.device_get(expected))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.grad(f)), jax.make_jaxpr])
def test_one_program_around(transform):
    """JAX makes one program, which needs one mesh: the error says so, and then it runs."""
    args, plain_args = arguments(MESHES)
    fn = transform(mm.jit(decoder(Split(MESHES))))
    with pytest.raises(mm.UsageError, match=r"runs without a submesh here; .* outside of jax.jit"):
        fn(*args)
    with jax.set_mesh(MESHES[0]), mm.context(ignore_transforms=True):
        fn(*plain_args)


AMBIENT = {"none": Mesh(np.empty((), object), ()), "first": MESHES[0], "last": MESHES[1]}


@pytest.mark.telling("scope-first", "context-none")
@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_ambient_meshes(form, ambient):
    args, plain_args = arguments(MESHES)
    split = Split(MESHES, form)
    with scopes(split, 2), jax.set_mesh(AMBIENT[ambient]):
        check(train(decoder(split)), looped(jax.value_and_grad(decoder(plain))), args, plain_args, MESHES[0])


def step_of(loss, loop):
    """A step of SGD whose gradients are summed up over ``data`` once, where it says so."""

    def spec(p):
        return jax.typeof(p).sharding.spec.update(reduced=frozenset())

    def step(params, tokens):
        value, grads = loop(jax.value_and_grad(loss))(params, tokens)

        def update(p, g):
            new = reshard(p, spec(p)) - 0.1 * reshard(g, spec(p))
            return reshard(new, jax.typeof(p).sharding.spec)

        return value, jax.tree.map(update, params, grads)

    return step


def summed(fn):
    return lambda p, t: jax.tree.map(
        jnp.add, *(fn(p, t.reshape(SIZE, 2, out_sharding=P("data"))[:, k]) for k in range(2))
    )


@pytest.mark.telling("pipeline")
@pytest.mark.parametrize("form", ["task", "pipeline"])
def test_gradients_are_reduced_once_a_step(form):
    """The parameters are typed reduced: their gradients are unreduced, and stay so in all microbatches."""
    layer = {"up": P(None, "model", reduced={"data"}), "down": P("model", None, reduced={"data"})}
    specs = {"embed": P(reduced={"data"}), "layers": [layer] * 4}
    args, plain_args = arguments(MESHES, specs)
    loss = loss_of(form, MESHES)
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, reduce="sum")
    jitted = check(step_of(loss, loop), step_of(decoder(plain), summed), args, plain_args, MESHES[0])
    new = jitted(*args)[1]
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, args[0])
    jitted(new, args[1])
    (compiled,) = jitted.compiled
    reduced = [
        (kernel.submesh, run.cell)
        for kernel, collectives in zip(compiled.plan.kernels, compiled.collectives(), strict=True)
        for collective in collectives
        if collective.kind == "all-reduce" and "data" in collective.axes(compiled.plan.submeshes[kernel.submesh])
        for run in compiled.plan.runs
        if compiled.plan.kernels[run.kernel] is kernel
    ]
    assert all(cell is None for _, cell in reduced)  # outside of the loop
    assert sum(submesh == 1 for submesh, _ in reduced) == 1
    assert sum(submesh == 0 for submesh, _ in reduced) <= 2  # the embedding is tied: its sum waits for the other stage


def test_an_unreduced_argument_is_refused():
    w = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(MESHES[0], P()))
    with jax.set_mesh(MESHES[0]):
        terms = jax.jit(lambda w: reshard(w, P(unreduced={"data"})))(w)
    with pytest.raises(mm.UsageError, match=r"unreduced .*reshard"):
        mm.jit(mm.task(jnp.sin, mesh=MESHES[0]))(terms)
