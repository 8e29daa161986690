"""Meshes with Explicit axes, as ``jax.make_mesh`` makes: plain jit's values, results on the mesh given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block
from pipelines import Split, assert_same, gradient, reference_gradient, submeshes

import multimesh as mm

AUTO, EXPLICIT, MIXED = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)
KINDS = {"explicit": (EXPLICIT, EXPLICIT), "mixed axes": (MIXED, MIXED), "one submesh": (AUTO, EXPLICIT)}
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
NO_MESH = Mesh(np.empty((), object), ())


def split_of(kinds, form="wrapper"):
    meshes = submeshes(2, (2, 2))
    return Split(tuple(Mesh(m.devices, m.axis_names, axis_types=k) for m, k in zip(meshes, kinds, strict=True)), form)


SPLIT = split_of((EXPLICIT, EXPLICIT))


def place(split, params, owners, spec=lambda path: P("model") if "down" in path else P(None, "model")):
    """Arrays on the mesh of their stage; matrices split over ``model``, so that JAX can type the products."""
    leaves, tree = jax.tree.flatten_with_path(params)
    layouts = [
        NamedSharding(split.mesh(o[0]), spec(jax.tree_util.keystr(path)) if x.ndim == 2 else P())
        for (path, x), o in zip(leaves, jax.tree.leaves(owners, is_leaf=lambda o: isinstance(o, tuple)), strict=True)
    ]
    return jax.device_put(jax.tree.map(jnp.array, params), jax.tree.unflatten(tree, layouts))


@pytest.mark.longer
@pytest.mark.parametrize(
    ("kinds", "schedule", "where"),
    [("explicit", "wavefront", "outside"), ("mixed axes", "zb-v", "inside"), ("one submesh", "1f1b", "inside")],
)
def test_a_training_step(kinds, schedule, where):
    """Rows over ``data``: sums are delayed, arguments donated, and the next step takes its own results."""
    kind, model = mm.schedules.get(schedule), MLP
    split, stages = dataclasses.replace(split_of(KINDS[kinds]), placement=kind.placement(2)), 2 * kind.usual
    owners = model.owners(model.init(stages))
    grad = gradient(model, split, size=4, rows=16, where=where, schedule=schedule)

    def step(params, batch):
        loss, grads = grad(params, batch)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, batch = place(split, model.init(stages), owners), split.lay_out(model.batch(16, 0))
    layouts = jax.tree.map(lambda x: x.sharding, params)
    loss, grads = reference_gradient(model, stages, 16, 4)
    jitted = mm.jit(step, donate_argnums=0)
    actual, new = jitted(params, batch)
    assert_same((actual, new), (loss, jax.tree.map(lambda p, g: p - np.float32(0.1) * g, model.init(stages), grads)))
    assert jax.tree.map(lambda x: x.sharding, new) == layouts
    assert actual.sharding.mesh in split.meshes
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    jitted(new, batch)
    assert len(jitted.compiled) == 1


@pytest.mark.telling(
    "grad of eager-spec0-4",
    "grad of eager-spec3-1",
    "mm.jit-spec1-2",
    "mm.jit-spec2-4",
    "jax.jit-spec0-4",
    "eager-spec2-4",
)
@pytest.mark.parametrize(
    ("spec", "size"), [(P("data"), 4), (P(("data", "model")), 2), (P(None, "model"), 4), (P("model", "data"), 1)]
)
@pytest.mark.parametrize("how", ["eager", "jax.jit", "mm.jit", "grad of eager"])
def test_a_loop_without_tasks(spec, size, how):
    """The loop alone is plain JAX in Explicit mode: rows split where a microbatch divides, else are replicated."""

    def loss(w, x):
        return jnp.square(jnp.tanh(x) * w).sum()

    loop = mm.microbatch(jax.value_and_grad(loss), size=size, argnum=1)
    if how == "grad of eager":
        loop = jax.value_and_grad(mm.microbatch(loss, size=size, argnum=1))
    run = {"jax.jit": jax.jit, "mm.jit": mm.jit}.get(how, lambda f: f)(loop)
    w = jax.device_put(W[0], NamedSharding(SPLIT.mesh(0), P(spec[1] if len(spec) > 1 else None)))
    x = jax.device_put(X, NamedSharding(SPLIT.mesh(0), spec))
    ambient = SPLIT.mesh(0) if how == "grad of eager" else NO_MESH  # JAX itself needs one there
    with jax.set_mesh(ambient):
        assert_same(run(w, x), jax.value_and_grad(loss)(W[0], X))


def two(first, **options):
    """``first(w, x)`` on one submesh, then a task on another."""
    last = mm.task(lambda h: h * 2, "last", mesh=SPLIT.mesh(1))
    return mm.jit(lambda w, x: last(mm.task(first, "first", mesh=SPLIT.mesh(0))(w, x)), **options)


def on(spec, x=X):
    return jax.device_put(x, NamedSharding(SPLIT.mesh(0), spec))


def explicit_product(w, x):
    return jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data", "model"))


HELD = on(P(None, "model"), W)
WORKS = {
    "constraint": lambda w, x: jax.lax.with_sharding_constraint(explicit_product(w, x), P("data", "model")),
    "logical constraint": lambda w, x: mm.with_sharding_constraint(x @ w, P("data", "model")),
    "reshard": lambda w, x: jax.sharding.reshard(x @ w, P("data")),
    "reshape": lambda w, x: jax.lax.reshape(jax.lax.reshape(x @ w, (2, 4, 8), out_sharding=P("data")), (8, 8)),
    "at get": lambda w, x: (x @ w).at[jnp.arange(8)].get(out_sharding=P("data")),
    "shard_map": lambda w, x: jax.shard_map(lambda x: x * 1, in_specs=P("data"), out_specs=P("data"))(
        jax.sharding.reshard(x @ w, P("data"))
    ),
    "shard_map of a mesh": lambda w, x: jax.shard_map(
        lambda x: x * 1, mesh=SPLIT.mesh(0), in_specs=P("data"), out_specs=P("data")
    )(jax.sharding.reshard(x @ w, P("data"))),
    "captured": lambda w, x: x @ HELD + 0 * (x @ w),
}


@pytest.mark.longer
@pytest.mark.parametrize("case", WORKS)
def test_code_that_names_layouts(case):
    """As under plain jax.jit: values, gradients, and the layouts in the types of results."""
    first = WORKS[case]
    args = on(P(None, "model"), W), on(P("data"))
    total = jax.value_and_grad(lambda f, w, x: (2 * f(w, x)).sum(), argnums=(1, 2))
    one = mm.task(first, "first", mesh=SPLIT.mesh(0))
    with jax.set_mesh(SPLIT.mesh(0)):
        expected, value = jax.jit(total, static_argnums=0)(first, *args), jax.jit(first)(*args)
    actual = mm.jit(functools.partial(total, one))(*args)
    assert_same(actual, expected)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    assert jax.typeof(mm.jit(one)(*args)) == jax.typeof(value)
    assert_same(two(first)(*args), 2 * value)


@pytest.mark.parametrize("case", ["reshard", "at get", "shard_map"])
def test_arguments_without_a_layout_are_replicated(case):
    f = two(WORKS[case])
    assert f.plan(W, X).submeshes == SPLIT.meshes
    assert_same(f(W, X), 2 * X @ W)


REFUSED = {  # by JAX, on any mesh with Explicit axes, and what the message advises
    "constraint": (lambda w, x: jax.lax.with_sharding_constraint(x @ w, P("model")), "reshard"),
    "product": (lambda w, x: (x @ w) @ w.T, "out_sharding=.*Auto"),
    "gather": (lambda w, x: (x @ w)[x[:, 0].astype(int)], "out_sharding=.*Auto"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_code_that_jax_can_not_type_is_refused_with_the_remedy(case):
    fn, remedy = REFUSED[case]
    with pytest.raises(mm.UsageError, match=rf"test_explicit.py:\d+: task 'first': .*Explicit.*{remedy}.*JAX says"):
        two(fn)(on(P(None, "model"), W), on(P("data")))


def test_jaxs_error_about_auto_axes_stays_jaxs():
    with pytest.raises(ValueError, match="type Auto"):
        mm.jit(mm.task(explicit_product, mesh=submeshes(1, (2, 2))[0]))(W, X)


def test_an_explicit_array_that_is_captured_outside_tasks():
    actual = two(lambda w, x: x @ w)
    f = mm.jit(lambda x: actual._fn(jnp.zeros_like(HELD) + HELD, x))
    assert_same(f(on(P("data"))), 2 * X @ W)


@pytest.mark.parametrize("ambient", ["the first submesh", "none"])
def test_shardings_of_arguments_and_results(ambient):
    mesh = SPLIT.mesh(0)
    rows = NamedSharding(mesh, P("model"))
    scale = mm.jit(mm.task(lambda w, x: w + x.sum(), "first", mesh=mesh), in_shardings=(rows, None), out_shardings=rows)
    with jax.set_mesh(mesh if ambient != "none" else NO_MESH):
        y = scale(W, X)
        assert_same(two(lambda w, x: x @ w)(W, X), 2 * X @ W)
    assert y.sharding == rows
    assert jax.typeof(y).sharding.spec == P("model", None)
    assert_same(y, jax.jit(lambda w, x: w + x.sum())(W, X))


def test_parallelize_makes_arrays_on_the_given_mesh():
    logical = {"rows": "data", "wide": "model"}
    stages = [mm.task(mlp_block, f"stage{s}", mesh=SPLIT.mesh(s), logical_axes=logical) for s in range(2)]

    def loss(params, x):
        x = stages[0](params[0], mm.with_sharding_constraint(x, P("rows", "wide")))
        return stages[1](params[1], x).sum()

    init = lambda: [jax.tree.map(lambda a: jnp.array(a), MLP.init(2)["stages"][s]) for s in range(2)]  # noqa: E731
    x = MLP.batch(8, 0)["x"]
    f, make = mm.parallelize(loss, init_params=init, initial_batch=x)
    params = make()
    assert [jax.tree.leaves(p)[0].sharding.mesh for p in params] == list(SPLIT.meshes)
    assert_same(f(params, x), jax.jit(lambda p, x: mlp_block(p[1], mlp_block(p[0], x)).sum())(init(), x))


@pytest.mark.parametrize("make", [mm.task, lambda fn, name, mesh: mm.register_task(name, mesh=mesh)])
def test_manual_axes_are_refused_where_the_mesh_is_given(make):
    mesh = Mesh(SPLIT.mesh(0).devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Manual))
    with pytest.raises(mm.UsageError, match=r"task 'one': axis 'model' .*Manual.*shard_map"):
        make(mlp_block, "one", mesh=mesh)
