"""Compiler contexts: what each changes in a plan, and that no result changes."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block, squared_error
from multimesh.marking import contexts
from multimesh.runtime.between import transports
from pipelines import Split, assert_same, reference_gradient, submeshes

import multimesh as mm

ROWS, SIZE, STAGES = 8, 2, 2
PARTS = (
    "autoshard",
    "enable_task_fusion",
    "only_fuse_loop_tasks",
    "enable_recomputation",
    "enable_fast_path",
    "ignore_transforms",
)


def ones(*shape):
    return np.ones(shape, np.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def runs(plan, phase="any"):
    return [s for s in plan.instructions if s.kind == "RUN" and (phase == "any" or s.phase == phase)]


def two_layers_a_stage(split):
    """Four tasks on two submeshes: two layers follow each other on each."""

    def loss(params, batch):
        x = batch["x"]
        for i, p in enumerate(params["stages"]):
            layer = squared_layer if i == 3 else mlp_block
            x = mm.task(layer, f"layer{i}", mesh=split.mesh(i // 2))(p, x, *([batch["y"]] if i == 3 else []))
        return x

    def squared_layer(p, x, y):
        return squared_error(mlp_block(p, x), y)

    return mm.jit(lambda p, b: mm.microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)(p, b))


# Options


def test_unknown_options_and_other_types_raise_at_once():
    with pytest.raises(mm.UsageError, match="unknown option 'fuse'; options are autoshard, enable_task_fusion"):
        mm.context(fuse=True)
    with pytest.raises(mm.UsageError, match=r"enable_task_fusion: give True, False or None .* not 1"):
        mm.context(enable_task_fusion=1)
    with pytest.raises(mm.UsageError, match=r"transport: give one of pull, device_put or None .* not 'ppermute'"):
        mm.context(transport="ppermute")


def test_the_environment_names_the_transport_where_no_context_does(monkeypatch):
    monkeypatch.setattr(transports, "CLASSES", {"pull": lambda: "pulls", "device_put": lambda: "puts"})
    monkeypatch.setattr(transports, "_create", lambda name: transports.CLASSES[name]())
    assert (transports.get_transport(None), transports.get_transport("device_put")) == ("pulls", "puts")
    monkeypatch.setenv("MULTIMESH_TRANSPORT", "device_put")
    assert (transports.get_transport(None), transports.get_transport("pull")) == ("puts", "pulls")
    monkeypatch.setenv("MULTIMESH_TRANSPORT", "nccl")
    with pytest.raises(
        mm.UsageError, match="MULTIMESH_TRANSPORT: give one of pull, device_put or unset it, not 'nccl'"
    ):
        transports.get_transport(None)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_sets_its_option_and_restores_it(name):
    before = contexts.current()
    for value in (True, False):
        with contextlib.suppress(RuntimeError), mm.context(**{name: value}):
            assert getattr(contexts.current(), name) is value
            with mm.context(**{name: None}):
                assert getattr(contexts.current(), name) is value
            raise RuntimeError
        assert contexts.current() == before


def test_options_of_one_thread_are_not_those_of_another():
    values = []
    with mm.context(enable_task_fusion=False):
        thread = threading.Thread(target=lambda: values.append(contexts.current().enable_task_fusion))
        thread.start()
        thread.join()
        assert not contexts.current().enable_task_fusion
    assert values == [True]


def test_a_context_that_comes_too_late_raises():
    def f(x):
        with mm.context(enable_task_fusion=False):
            return mm.task(jnp.sin, "a", mesh=submeshes(1)[0])(x)

    with pytest.raises(mm.UsageError, match=r"enable_task_fusion: .* open it around the call"):
        mm.jit(f)(ones(2))


def test_options_are_part_of_the_signature():
    traces = []

    def f(x):
        traces.append(1)
        return mm.task(jnp.sin, "a", mesh=submeshes(1)[0])(x)

    jitted = mm.jit(f)
    jitted(ones(2)), jitted(ones(2))
    with mm.context(enable_task_fusion=False):
        jitted(ones(2)), jitted(ones(2))
    jitted(ones(2))
    assert len(traces) == 2


# Task fusion


@pytest.mark.longer
def test_fusion_makes_one_program_of_the_tasks_of_a_submesh():
    split, params, batch = Split(submeshes(2)), MLP.init(4), MLP.batch(ROWS, 0)
    step = two_layers_a_stage(split)
    fused = step.plan(params, batch)
    with mm.context(enable_task_fusion=False):
        single = step.plan(params, batch)
        actual = step(params, batch)
    assert {s.task for s in runs(fused, "F")} == {"layer0+layer1"}
    tasks = {s.task for s in runs(single) if s.phase}
    assert tasks == {"layer0", "layer1", "layer2", "layer3"}
    count = ROWS // SIZE
    assert len([s for s in runs(fused) if s.phase]) == 3 * count  # F0, B0, and F1 joined with B1
    assert len([s for s in runs(single) if s.phase]) == 8 * count
    assert sum(single.peak_bytes()) > sum(fused.peak_bytes())
    assert_same(jax.tree.map(lambda x: x / count, actual), reference_gradient(MLP, 4, ROWS, SIZE))

    def order(plan, submesh):  # which stays that of the schedule
        cells = [(s.phase, s.microbatch) for s in runs(plan) if s.phase and s.submesh == submesh]
        return [c for i, c in enumerate(cells) if i == 0 or cells[i - 1] != c]

    assert order(single, 0) == order(fused, 0)
    assert order(single, 1) == [(phase, m) for m in range(count) for phase in "FB"]


def test_fusion_only_in_loops():
    mesh = submeshes(1)[0]

    def f(w, x):
        first = mm.task(lambda w, x: jnp.sum(w * x), "inside0", mesh=mesh)
        second = mm.task(lambda y, x: y + jnp.sum(x), "inside1", mesh=mesh)
        total = mm.microbatch(lambda w, x: second(first(w, x), x), size=2, argnum=1)(w, x)
        y = mm.task(jnp.sin, "after0", mesh=mesh)(total)
        return mm.task(lambda y, w: y * w, "after1", mesh=mesh)(y, w)

    args = (normal(0, 3), normal(1, 4, 3))
    step, expected = mm.jit(f), None
    for options, inside, after in (
        ({}, {"inside0+inside1"}, {"after0+after1"}),
        ({"only_fuse_loop_tasks": True}, {"inside0+inside1"}, {"after0", "after1"}),
        ({"only_fuse_loop_tasks": True, "enable_task_fusion": False}, {"inside0", "inside1"}, {"after0", "after1"}),
    ):
        with mm.context(**options):
            plan, actual = step.plan(*args), step(*args)
        assert {s.task for s in runs(plan) if s.phase} == inside
        assert {s.task for s in runs(plan, None)} - {"zeros", "unmarked"} == after
        expected = actual if expected is None else expected
        assert_same(actual, expected)


# Recomputation


def test_recomputation_keeps_less():
    split, params, batch = Split(submeshes(2)), MLP.init(2), MLP.batch(ROWS, 0)

    def wide(p, x):
        h = x @ p["up"]
        return jax.nn.silu(h) @ p["down"]

    def loss(p, b):
        h = mm.task(wide, "front", mesh=split.mesh(0))(p["stages"][0], b["x"])
        return mm.task(lambda p, h, y: squared_error(wide(p, h), y), "back", mesh=split.mesh(1))(
            p["stages"][1], h, b["y"]
        )

    step = mm.jit(lambda p, b: mm.microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)(p, b))
    recomputing, actual = step.plan(params, batch), step(params, batch)
    with mm.context(enable_recomputation=False):
        default, expected = step.plan(params, batch), step(params, batch)
    assert recomputing.peak_bytes()[0] < default.peak_bytes()[0]
    assert recomputing.traffic() == default.traffic()
    assert_same(actual, expected)


def test_recomputation_sends_less():
    """A gate that two stages read follows, on each, from what the forward pass sends there anyway."""
    split = Split(submeshes(3))

    def loss(p, b):
        a = mm.task(lambda w, x: x @ w, "front", mesh=split.mesh(0))(p["front"], b)
        gate = jnp.sin(a)
        c = mm.task(lambda w, x, g: x @ w + g, "middle", mesh=split.mesh(1))(p["middle"], a, gate)
        return mm.task(lambda w, x, g, c: jnp.sum(x @ w * g + c), "back", mesh=split.mesh(2))(p["back"], a, gate, c)

    step = mm.jit(lambda p, b: mm.microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)(p, b))
    args = {"front": normal(0, 3, 5), "middle": normal(1, 5, 5), "back": normal(2, 5, 5)}, normal(3, ROWS, 3)
    recomputing, actual = step.plan(*args), step(*args)
    with mm.context(enable_recomputation=False):
        default, expected = step.plan(*args), step(*args)
    assert recomputing.traffic()[0] < default.traffic()[0]
    assert recomputing.traffic()[1] < default.traffic()[1]
    assert_same(actual, expected)


# The fast path


def untasked(w, x):
    return mm.microbatch(lambda w, x: jnp.sum(jnp.tanh(x @ w)), size=2, argnum=1)(w, x)


def test_without_the_fast_path_every_function_has_a_plan():
    step, args = mm.jit(untasked), (normal(0, 3, 4), normal(1, 6, 3))
    expected = step(*args)
    with pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        step.plan(*args)
    with mm.context(enable_fast_path=False):
        plan, actual = step.plan(*args), step(*args)
    assert [s.microbatch for s in runs(plan, "F")] == [0, 1, 2]
    assert [m.devices.tolist() for m in plan.submeshes] == [[jax.devices()[0]]]
    assert_same(actual, expected)


def test_without_the_fast_path_a_function_runs_on_the_mesh_of_its_arguments():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    w, x = normal(0, 3, 4), jax.device_put(normal(1, 8, 3), NamedSharding(mesh, P("data")))
    with mm.context(enable_fast_path=False):
        step = mm.jit(lambda w, x: jnp.tanh(x @ w))
        actual = step(w, x)
        assert step.plan(w, x).submeshes == (mesh,)
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert_same(actual, np.tanh(np.asarray(x) @ w))


# Ignoring


def test_ignoring_transforms_is_plain_jax():
    """The model sums over its rows, so that one call with all rows has the sum of the microbatches."""
    meshes = submeshes(2)
    context = mm.register_task("scoped", mesh=meshes[1])
    shapes = []

    def loss(w, x):
        shapes.append(x.shape)
        h = mm.task(jnp.tanh, "front", mesh=meshes[0])(mm.with_sharding_constraint(x @ w, P("nowhere")))
        with mm.task(name="block", mesh=meshes[0]):
            h = 2 * h
        with jax.named_scope("scoped"):
            return jnp.sum(h)

    with context:
        step = mm.jit(mm.microbatch(loss, size=2, argnum=1), in_shardings=P("data"))
        w, x = normal(0, 3, 4), jax.device_put(normal(1, 8, 3), jax.devices()[5])
        with mm.context(ignore_transforms=True):
            actual = step(jax.device_put(w, jax.devices()[1]), x)
            text = str(jax.make_jaxpr(mm.microbatch(loss, size=2, argnum=1))(w, x))
    assert set(shapes) == {(8, 3)}
    assert "scan" not in text
    assert "multimesh" not in text
    assert len(actual.devices()) == 1
    assert_same(actual, np.sum(2 * np.tanh(np.asarray(x) @ w), dtype=np.float32))


def test_ignoring_a_part_of_a_trace():
    meshes = submeshes(2)

    def f(x):
        with mm.context(ignore_transforms=True):
            x = mm.task(jnp.sin, "ignored", mesh=meshes[1])(x)
        return mm.task(jnp.cos, "kept", mesh=meshes[0])(x)

    plan = mm.jit(f).plan(ones(2))
    assert plan.submeshes == meshes[:1]
    assert_same(mm.jit(f)(ones(2)), np.cos(np.sin(ones(2))))


@pytest.mark.parametrize("cached", [jax.checkpoint, jax.jit])
def test_what_jax_traced_while_ignoring_is_not_taken_for_a_task_later(cached):
    block = cached(mm.task(jnp.sin, "task", mesh=submeshes(1)[0]))

    def f(x):
        with mm.context(ignore_transforms=True):
            x = block(x)
        return block(x)

    (kernel,) = mm.jit(f).lower(ones(2)).plan.kernels
    assert [op.task and op.task.name for op in kernel.ops if op.prim.name == "sin"] == [None, "task"]


def test_ignoring_a_stacked_result_raises():
    f = mm.microbatch(lambda x: x, size=2, reduce="stack")
    with mm.context(ignore_transforms=True), pytest.raises(mm.UsageError, match=r"stack.*leave ignore_transforms"):
        f(ones(4))
    with mm.context(ignore_transforms=True):
        assert_same(mm.microbatch(lambda x: x.sum(), size=2)(jnp.ones(4)), np.float32(4))
