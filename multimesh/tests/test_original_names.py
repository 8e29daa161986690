"""Calls as code for the original MultiMesh writes them, through ``multimesh.jax``."""

import jax
import jax.numpy as jnp
import multimesh.jax as mm
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh

DEVICES = np.array(jax.devices()[:8])
AXES = [("batch", "x"), ("model", "y")]
W = tuple(np.random.default_rng(i).normal(size=(4, 4)).astype("float32") / 2 for i in range(2))
X = np.random.default_rng(9).normal(size=(8, 4)).astype("float32")


@pytest.fixture(autouse=True)
def no_registrations_left():
    yield
    mm.clear_tasks()


def scoped(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(mm.with_sharding_constraint(x, P("batch", "model")) @ w)
    return x


def loss(params, x):
    return jnp.sum(scoped(params, x) ** 2)


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


def places_of(plan):
    runs = [i for i in plan.instructions if i.kind == "RUN"]
    return {(i.task, tuple(d.id for d in plan.submeshes[i.submesh].devices.flat)) for i in runs}


def on(array):
    return {device.id for device in array.devices()}


def test_every_original_name_is_there():
    """They are those that the original's package exports, at its first release and after."""
    contexts = "autoshard context enable_fast_path enable_recomputation enable_task_fusion only_fuse_loop_tasks"
    functions = "ignore_transforms microbatch mjit parallelize register_task task tasks with_sharding_constraint"
    classes = "Context MeshWrapper MultiMesh Task TaskMesh shard_map custom_partitioning slice_global_mesh"
    compiler = (
        "clear_tasks shutdown no_op_custom_call compile_hlo_module set_startup_config register_custom_call_target "
        "replicate_parameters_smaller_than_num_elements recompute_from_arguments_if_cost_less_than"
    )
    assert set(f"{contexts} {functions} {classes} {compiler}".split()) <= set(mm.__all__) <= set(dir(mm))


@pytest.mark.longer
def test_microbatch_takes_dim_and_size_by_position():
    mm.register_task("layer_0", devices=[0, 1], dims=[2, 1], device_axes=["x", "y"], logical_axes=AXES)
    mm.register_task("layer_1", devices=[2, 3], dims=[2, 1], device_axes=["x", "y"], logical_axes=AXES)
    expected = jax.value_and_grad(loss)(W, X)
    for order in ("gpipe", "1f1b", "zero-bubble-h2", None):
        step = mm.microbatch(jax.value_and_grad(loss), 0, 2, 1, None, 2, order, arg_shardings=P("batch", None))
        close(mm.jit(step)(W, X), expected)


def test_microbatch_says_what_it_can_not_do():
    with pytest.raises(mm.UsageError, match=r"unrolling= is not supported.*custom_schedule"):
        mm.microbatch(loss, 0, 2, unrolling=2)
    with pytest.raises(mm.UsageError, match="give size="):
        mm.microbatch(loss, 0)


def test_hello_world_with_mjit():
    first = mm.task(lambda x: (jnp.cos(x), jnp.sin(x)), devices=DEVICES[0:1])
    second = mm.task(lambda x, y: x * x + y * y, devices=DEVICES[1:2])
    batch = mm.mjit(jnp.arange, devices=DEVICES, static_argnums=0)(8)
    result = mm.mjit(lambda x: second(*first(x)), devices=DEVICES)(batch)
    close(result, np.ones(8))
    assert on(result) == {1}


def test_layouts_of_mjit_are_logical():
    mesh = Mesh(DEVICES.reshape(4, 2), ("batch", "model"))
    layout = NamedSharding(mesh, P("batch", None))
    half = Mesh(DEVICES[:4].reshape(2, 2), ("x", "y"))
    layer = mm.task(lambda x, w: x @ w, "layer", mesh=half, logical_axes=AXES)
    with mm.autoshard(autoshard=True):
        out = mm.mjit(layer, mesh=mesh, in_shardings=(layout, None), out_shardings=layout)(X, W[0])
    close(out, X @ W[0])
    assert out.sharding.is_equivalent_to(NamedSharding(half, P("x")), 2)


def test_a_task_without_a_place_is_on_all_devices():
    assert on(mm.jit(mm.task(jnp.sin))(X)) == set(range(8))
    with pytest.raises(multimesh.UsageError, match="either mesh= or devices="):
        multimesh.task(jnp.sin)


def test_register_task_has_names_ids_and_dims():
    mm.register_task("layer_0", name="front", devices=[3, 2], dims=[2, 1], device_axes=["x", "y"], logical_axes=AXES)
    mm.register_task("layer_1", name="back", mesh=Mesh(DEVICES[4:].reshape(2, 2), ("x", "y")), logical_axes=AXES)
    f = mm.jit(scoped)
    assert places_of(f.plan(W, X)) == {("front", (3, 2)), ("back", (4, 5, 6, 7))}
    close(f(W, X), scoped(W, X))


def test_a_callback_needs_no_group_and_may_take_the_name_only():
    def callback(name):
        layer = int(name.split("_")[-1])
        return [4 * layer, 4 * layer + 4], f"lyr_{layer}"

    mm.register_task(r"layer_\d", callback=callback, dims=(2, 2), device_axes=("x", "y"), logical_axes=AXES)
    assert {name for name, _ in places_of(mm.jit(scoped).plan(W, X))} == {"lyr_0", "lyr_1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": Mesh(DEVICES[:2], ("x",)), "devices": DEVICES}, "give either mesh= or devices="),
        ({"devices": [0, 1, 2, 3], "dims": [2]}, r"\(2,\) does not hold the 4 devices; a submesh that rotates"),
        ({"devices": [0, 99]}, "99 is neither a device nor the number of one"),
        ({}, "give either mesh= or devices="),
        ({"callback": print, "name": "n"}, "drop name="),
    ],
)
def test_register_task_refuses_in_one_line(options, message):
    with pytest.raises(mm.UsageError, match=message):
        mm.register_task("layer", **options)


def test_tasks_configures_and_clears():
    class Setup:
        def __call__(self):
            mm.register_task("layer_0", devices=[5], device_axes=["x"], logical_axes=[("batch", "x"), ("model", None)])

    f = mm.jit(lambda x: scoped(W[:1], x))
    with mm.tasks(Setup):
        assert on(f(X)) == {5}
    with mm.tasks(), pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        f.plan(X)


def test_constraints_take_named_shardings_tuples_and_trees():
    global_mesh = Mesh(DEVICES.reshape(4, 2), ("batch", "model"))
    half = Mesh(DEVICES[4:].reshape(2, 2), ("x", "y"))

    def f(x, w):
        spec = NamedSharding(global_mesh, P("batch", None))
        x, w = mm.with_sharding_constraint((x, {"w": w}), (spec, (None, "model")))
        return mm.with_sharding_constraint(x @ w["w"], P("batch", "model"))

    out = mm.jit(mm.task(f, mesh=half, logical_axes=AXES))(X, W[0])
    close(out, X @ W[0])
    assert out.sharding.is_equivalent_to(NamedSharding(half, P("x", "y")), 2)


def test_task_meshes_are_placed():
    front = mm.TaskMesh(devices=(0, 1, 2, 3), axis_names=("x", "y"), axis_sizes=(4, 1))
    first = mm.task(lambda w, x: x @ w, mesh=front, logical_axes=AXES)
    second = mm.task(lambda w, x: x @ w, "second", task=mm.Task(mesh=front.place((4, 5, 6, 7)), extra_axes=AXES))

    def model(params, x):
        x = mm.with_sharding_constraint(x, P("batch", None))
        return mm.with_sharding_constraint(second(params[1], first(params[0], x)), P("batch", None))

    fn, init, get_batch = mm.parallelize(
        model, init_params=lambda: tuple(map(jnp.asarray, W)), get_input_batch=lambda: jnp.asarray(X)
    )
    params, batch = init(), get_batch()
    assert on(params[0]) == on(batch) == {0, 1, 2, 3}
    assert on(params[1]) == {4, 5, 6, 7}
    close(fn(params, batch), X @ W[0] @ W[1])


def test_multimesh_slices_and_owns_its_tasks():
    rows = mm.MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "batch"))
    f = mm.jit(scoped)

    def place(name, backprop):
        return mm.Task(mesh_slice={"stage": int(name)}, extra_axes=(("model", "stage"),))

    with rows:
        mm.register_task(r"layer_(\d)", callback=place)
        out = f(W, X)
    close(out, scoped(W, X))
    assert out.sharding.mesh == rows.slice(stage=1)
    with pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        f.plan(W, X)
    with rows:
        assert len(f.plan(W, X).submeshes) == 2
    with pytest.raises(mm.UsageError, match="stage=2, but the mesh is"):
        rows.slice(stage=2)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"split_backprop": ("a", "w")}, "zb-h1"),
        ({"loop_dependent_mesh_slice": lambda i: {}}, "one submesh"),
        ({"mesh_slice": {"stage": 0}}, "inside `with MultiMesh"),
        ({"colour": 1}, "colour has no meaning"),
    ],
)
def test_fields_of_a_task_that_say_nothing_here(field, message):
    with pytest.raises(mm.UsageError, match=message):
        mm.task(jnp.sin, **field)


def test_what_configured_the_runtime_says_what_to_use():
    mm.shutdown()
    with pytest.raises(mm.UsageError, match=r"set_startup_config has no meaning on stock JAX; .*jax_num_cpu_devices"):
        mm.set_startup_config(cpus=8)
    with mm.enable_task_fusion(), mm.enable_recomputation(), mm.only_fuse_loop_tasks(), mm.enable_fast_path():
        pass


@pytest.fixture
def linen():
    pytest.importorskip("flax.linen")
    pytest.importorskip("optax")
    import flax.linen

    return flax.linen


def block(nn, shard_axes):
    class Block(nn.Module):
        features: int = 4

        @nn.compact
        def __call__(self, x):
            x = mm.with_sharding_constraint(x, P("batch", None))
            return nn.relu(nn.Dense(self.features, kernel_init=shard_axes("data", "model"))(x))

    return Block


@pytest.mark.flax
def test_a_class_of_modules_is_a_task(linen):
    from multimesh.jax.flax import shard_axes, task

    second_mesh = Mesh(DEVICES[4:].reshape(2, 2), ("x", "y"))
    placed_block = task(linen.Dense, mesh=second_mesh, logical_axes=AXES)
    model = placed_block(features=4, kernel_init=shard_axes("batch", "model"))
    params = linen.unbox(model.init(jax.random.key(0), X))
    out = mm.jit(model.apply)(params, X)
    close(out, linen.Dense(4).apply(params, X))
    assert on(out) == {4, 5, 6, 7}
    with pytest.raises(mm.UsageError, match="the first argument must be callable"):
        task("Dense", mesh=second_mesh)


@pytest.mark.flax
def test_parallelize_step_trains_a_model_by_its_names(linen):
    import optax
    from multimesh.jax.flax import parallelize_step, shard_axes

    block_class = block(linen, shard_axes)

    class Pipeline(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(2):
                x = block_class(name=f"layer_{i}")(x)
            return (x * x).sum()

    axes = [("batch", "x"), ("data", "x"), ("model", "y")]
    for i in range(2):
        ids = [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]
        mm.register_task(f"layer_{i}", devices=ids, device_axes=["x", "y"], dims=[4, 1], logical_axes=axes)
    model, mesh = Pipeline(), Mesh(DEVICES.reshape(8, 1), ("x", "y"))
    step, state, mesh, prepare = parallelize_step(model, optax.sgd(0.02), mesh, local_batch=X)
    pair = jax.value_and_grad(model.apply)(model.init(jax.random.key(42), X), X)
    loss, after = step(state, prepare(X))
    close(loss, pair[0])
    close(jax.tree.map(lambda p, g: p - 0.02 * g, jax.device_get(state.params), jax.device_get(pair[1])), after.params)
    for i in range(2):
        kernel = linen.unbox(after.params)["params"][f"layer_{i}"]["Dense_0"]["kernel"]
        assert on(kernel) == {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3}
        assert kernel.addressable_shards[0].data.shape == (1, 4)
