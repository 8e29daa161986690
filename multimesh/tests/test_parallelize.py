"""`autoshard` and `parallelize`: arguments are laid out, and made, as the constraints of the tasks say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from multimesh.calling.parallelize import compile_initializers
from pipelines import assert_same, submeshes

import multimesh as mm

LOGICAL = {"batch": "data", "mlp": "model", "embed": None}
WIDTH, HIDDEN, ROWS, SIZE = 8, 16, 16, 4


def constrained(p, x):
    """A feed-forward block that constrains activations only."""
    h = mm.with_sharding_constraint(jax.nn.relu(x @ p["up"] + p["bias"]), P("batch", "mlp"))
    return mm.with_sharding_constraint(h @ p["down"], P("batch", "embed"))


def loss_fn(stage):
    def loss(params, batch):
        h = stage(0, constrained)(params["front"], batch["x"])
        return stage(1, lambda p, h, y: jnp.mean((constrained(p, h) - y) ** 2))(params["back"], h, batch["y"])

    return loss


def grads_of(stage):
    return mm.microbatch(jax.value_and_grad(loss_fn(stage)), size=SIZE, argnum=1, schedule="1f1b")


def model(meshes):
    return lambda s, fn: mm.task(fn, f"stage{s}", mesh=meshes[s], logical_axes=LOGICAL)


def layer(key):
    keys = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(keys[0], (WIDTH, HIDDEN)),
        "bias": jax.random.normal(keys[1], (HIDDEN,)),
        "down": jax.random.normal(keys[2], (HIDDEN, WIDTH)),
    }


def init_params():
    front, back = jax.random.split(jax.random.key(0))
    return {"front": layer(front), "back": layer(back)}


def get_batch(seed=0):
    draw = np.random.default_rng(seed).normal
    return {k: draw(size=(ROWS, WIDTH)).astype(np.float32) for k in "xy"}


@functools.cache
def plain_result():
    fn = jax.jit(jax.value_and_grad(loss_fn(plain)))
    params, batch, count = init_params(), get_batch(), ROWS // SIZE
    with mm.context(ignore_transforms=True):
        parts = [fn(params, jax.tree.map(lambda x: x[i::count], batch)) for i in range(count)]
    return jax.tree.map(lambda *x: sum(x), *parts)


def specs(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


DERIVED = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}


# autoshard


@pytest.mark.longer
def test_autoshard_lays_out_weights_by_the_constraints_of_activations():
    """A gradient has the layout of its parameter, so it shows what was derived."""
    meshes = submeshes(2, (2, 2))
    step, args = mm.jit(grads_of(model(meshes))), (init_params(), get_batch())
    replicated = step(*args)[1]
    with mm.context(autoshard=True):
        loss, grads = step(*args)
    assert specs(replicated) == jax.tree.map(lambda _: P(), replicated)
    assert specs(grads) == {"front": DERIVED, "back": DERIVED}
    assert {k: set(grads[k]["up"].devices()) for k in grads} == {
        "front": set(meshes[0].devices.flat),
        "back": set(meshes[1].devices.flat),
    }
    assert_same((loss, grads), plain_result())


def test_autoshard_lays_out_the_batch():
    step = mm.jit(grads_of(model(submeshes(2, (2, 2)))))
    shapes = jax.eval_shape(init_params), get_batch()
    with mm.context(autoshard=True):
        *_, x, y = step.lower(*shapes).input_shardings
    assert (x.spec, y.spec) == (P("data"), P("data"))
    *_, x, y = step.lower(*shapes).input_shardings
    assert (x.spec, y.spec) == (P(), P())


def test_autoshard_leaves_what_has_a_layout():
    meshes = submeshes(2, (2, 2))
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(meshes[0], P())), init_params())
    with mm.context(autoshard=True):
        step = mm.jit(grads_of(model(meshes)))
        assert specs(step(params, get_batch())[1]["front"]) == dict.fromkeys(DERIVED, P())
        fixed_step = mm.jit(grads_of(model(meshes)), in_shardings=(P(), None))
        shardings = fixed_step.lower(init_params(), get_batch()).input_shardings
    assert {s.spec for s in shardings[:6]} == {P()}
    assert {s.spec for s in shardings[6:]} == {P("data")}


def test_a_dimension_that_does_not_divide_stays_whole():
    mesh = submeshes(1, (2, 2))[0]
    step = mm.jit(mm.task(constrained, "a", mesh=mesh, logical_axes=LOGICAL))
    params = {"up": np.ones((WIDTH, 3)), "bias": np.ones(3), "down": np.ones((3, WIDTH))}
    with mm.context(autoshard=True):
        shardings = step.lower(params, np.ones((4, WIDTH))).input_shardings
    assert [s.spec for s in shardings] == [P(), P(), P(), P("data")]


def test_the_results_of_one_step_are_the_arguments_of_the_next():
    """Nothing is traced again although parameters that had no layout come back with one."""
    traces = []
    gradient = grads_of(model(submeshes(2, (2, 2))))

    def step(params, state, batch):
        traces.append(1)
        updates, state = optimizer.update(gradient(params, batch)[1], state, params)
        return optax.apply_updates(params, updates), state

    optimizer = optax.adam(0.1)
    params = init_params()
    state, jitted = optimizer.init(params), mm.jit(step)
    with mm.context(autoshard=True):
        for seed in range(3):
            params, state = jitted(params, state, get_batch(seed))
    assert len(traces) == 1
    assert specs(params) == {"front": DERIVED, "back": DERIVED}
    assert specs(state[0].mu) == {"front": DERIVED, "back": DERIVED}


# parallelize


def test_parallelize():
    meshes = submeshes(2, (2, 2))
    step, init, batch = mm.parallelize(grads_of(model(meshes)), init_params=init_params, get_input_batch=get_batch)
    params, data = init(), batch()
    assert specs(params) == {"front": DERIVED, "back": DERIVED}
    assert specs(data) == {"x": P("data"), "y": P("data")}
    assert params["back"]["up"].sharding.mesh == data["y"].sharding.mesh == meshes[1]
    assert_same(params, init_params(), rtol=1e-6)
    assert_same(data, get_batch())
    assert_same(step(params, data), plain_result())


def test_nothing_is_compiled_by_the_first_call(compilations):
    step, init, batch = mm.parallelize(
        grads_of(model(submeshes(2, (2, 2)))), init_params=init_params, get_input_batch=get_batch
    )
    args = init(), batch()
    compilations.clear()
    jax.block_until_ready(step(*args))
    jax.block_until_ready(init())
    assert compilations == []


@pytest.mark.longer
def test_parameters_are_made_where_they_live():
    meshes = submeshes(2, (2, 2))
    _, init = mm.parallelize(grads_of(model(meshes)), init_params=init_params, initial_batch=jax.eval_shape(get_batch))
    before = jax.live_arrays()
    params = init()
    assert len(jax.live_arrays()) - len(before) == len(jax.tree.leaves(params))
    shardings, shapes = zip(*((x.sharding, x.shape) for x in jax.tree.leaves(params)), strict=True)
    wide = jax.make_jaxpr(lambda: [jax.random.normal(jax.random.key(0), [64 * n for n in s]) for s in shapes])()
    total = sum(x.size * x.dtype.itemsize for x in wide.out_avals)
    for program, positions in compile_initializers(wide, shardings):
        stats = program.memory_analysis()
        assert {shardings[i].mesh for i in positions} in ({meshes[0]}, {meshes[1]})
        assert stats.output_size_in_bytes <= total / 4 + 64  # two stages, two devices along `model`
        assert stats.output_size_in_bytes + stats.temp_size_in_bytes < total


def test_a_tied_parameter_is_made_where_its_update_is():
    meshes = submeshes(2, (2,), ("data",))

    def step(params, batch):
        h = mm.task(lambda e, x: e[x], "look up", mesh=meshes[0])(params["emb"], batch)
        return mm.task(lambda e, h: jnp.sum(h @ e.T), "project", mesh=meshes[1])(params["emb"], h)

    def init():
        return {"emb": jnp.arange(12.0).reshape(4, 3)}

    run, make, batch = mm.parallelize(
        lambda p, b: (jax.tree.map(jnp.add, p, jax.grad(step)(p, b)), step(p, b)),
        init_params=init,
        get_input_batch=lambda: jnp.array([0, 1, 3]),
    )
    params = make()
    new, loss = run(params, batch())
    assert new["emb"].sharding.mesh == params["emb"].sharding.mesh
    assert_same(loss, step(init(), jnp.array([0, 1, 3])))


@pytest.mark.longer
def test_a_batch_of_numpy_arrays_is_asked_for_anew():
    seeds = iter(range(9))
    step, init, batch = mm.parallelize(
        grads_of(model(submeshes(2, (2, 2)))), init_params=init_params, get_input_batch=lambda: get_batch(next(seeds))
    )
    first, second = batch(), batch()
    assert_same(first, get_batch(1))
    assert_same(second, get_batch(2))
    step(init(), first)


def test_a_batch_that_jax_computes_is_made_in_place():
    meshes = submeshes(2, (2, 2))
    _, _, batch = mm.parallelize(
        grads_of(model(meshes)),
        init_params=init_params,
        get_input_batch=lambda: {"x": jnp.ones((ROWS, WIDTH)), "y": jnp.zeros((ROWS, WIDTH))},
    )
    assert_same(batch(), {"x": np.ones((ROWS, WIDTH), np.float32), "y": np.zeros((ROWS, WIDTH), np.float32)})
    assert {k: x.sharding.mesh for k, x in batch().items()} == {"x": meshes[0], "y": meshes[1]}


def test_parameters_from_numpy_are_sent():
    meshes = submeshes(2, (2, 2))

    def init():
        return jax.tree.map(np.asarray, params_in) | {"unused": np.float32(1)}

    params_in = init_params()
    _, make = mm.parallelize(grads_of(model(meshes)), init_params=init, initial_batch=get_batch())
    params = make()
    assert specs(params) == {"front": DERIVED, "back": DERIVED, "unused": P()}
    assert_same(params["back"], params_in["back"])


def test_a_given_batch_keeps_its_layout():
    meshes = submeshes(2, (2, 2))
    data = jax.device_put(get_batch(), NamedSharding(meshes[0], P(("data", "model"))))
    step, init = mm.parallelize(grads_of(model(meshes)), init_params=init_params, initial_batch=data)
    assert_same(step(init(), data), plain_result())


def test_a_batch_may_hold_keys():
    mesh = submeshes(1, (4,), ("data",))[0]

    def step(params, batch):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return mm.task(lambda w, x, n: jnp.sum((w * x + n) ** 2), "a", mesh=mesh)(params, batch["x"], noise)

    def load():
        return {"x": np.ones(8, np.float32), "key": jax.random.split(jax.random.key(1), 8)}

    run, init, batch = mm.parallelize(step, init_params=lambda: jnp.ones(()), get_input_batch=load)
    assert_same(run(init(), batch()), step(jnp.ones(()), load()))


def test_while_transforms_are_ignored_nothing_is_laid_out():
    with mm.context(ignore_transforms=True):
        run, init, batch = mm.parallelize(in_tasks, init_params=init_params, get_input_batch=get_batch)
        assert (init, batch) == (init_params, get_batch)
        actual = run(init(), batch())
        with pytest.raises(mm.MultiMeshError, match="tasks are ignored under ignore_transforms"):
            run.plan(init(), batch())
    assert_same(actual, in_tasks(init_params(), get_batch()))


def arguments(**changes):
    return {"init_params": init_params, "get_input_batch": get_batch} | changes


def in_tasks(params, batch):
    return mm.task(lambda p, b: p["front"]["up"].sum() + b["x"].sum(), "a", mesh=submeshes(1)[0])(params, batch)


@pytest.mark.parametrize(
    ("fn", "changes", "error", "message"),
    [
        (3, {}, mm.UsageError, "first argument must be callable, got int"),
        (in_tasks, {"init_params": 3}, mm.UsageError, "init_params must be callable, got int"),
        (in_tasks, {"init_params": lambda key: key}, mm.UsageError, "init_params must be a function without arguments"),
        (in_tasks, {"init_params": lambda: {"a": "b"}}, mm.UsageError, "init_params must return a pytree of arrays"),
        (in_tasks, {"get_input_batch": None}, mm.UsageError, "either get_input_batch= or initial_batch="),
        (in_tasks, {"initial_batch": get_batch()}, mm.UsageError, "either get_input_batch= or initial_batch="),
        (in_tasks, {"devices": [0, 1]}, mm.UsageError, "devices= must be jax devices"),
        (in_tasks, {"devices": jax.devices()[6:]}, mm.UsageError, "task 'a' is on devices that are not among"),
        (lambda p: p, {}, mm.UsageError, "must take parameters and a batch"),
        (lambda p, b: b, {}, mm.MultiMeshError, "nothing in <lambda> is a task"),
    ],
)
def test_what_does_not_fit_together(fn, changes, error, message):
    with pytest.raises(error, match=message):
        mm.parallelize(fn, **arguments(**changes))


def test_a_batch_that_changes_its_shape_raises():
    sizes = iter((4, 8))
    _, _, batch = mm.parallelize(
        in_tasks, init_params=init_params, get_input_batch=lambda: {"x": np.ones((next(sizes), 2), np.float32)}
    )
    with pytest.raises(mm.UsageError, match="get_input_batch now returns other shapes or types"):
        batch()
