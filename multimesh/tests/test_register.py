"""Named scopes become tasks: by pattern, by callback, for as long as the registration stands."""

import jax
import numpy as np
import pytest
from models import MLP, mlp_block, squared_error
from pipelines import Split, assert_at_home, assert_same, reference_gradient, submeshes
from test_errors import scoped

import multimesh as mm

ROWS, SIZE = 8, 2


def scoped_loss(params, batch):
    """A model that knows nothing of submeshes: four blocks in scopes, as Flax linen names them."""
    x = batch["x"]
    with jax.named_scope("decoder"):
        for s, p in enumerate(params["stages"]):
            with jax.named_scope(f"layers_{s}"):
                x = mlp_block(p, x)
    return squared_error(x, batch["y"])


def step(params, batch):
    count = ROWS // SIZE
    total = mm.microbatch(jax.value_and_grad(scoped_loss), size=SIZE, argnum=1)(params, batch)
    return jax.tree.map(lambda x: x / count, total)


def outside(params, batch):
    return jax.value_and_grad(lambda p: mm.microbatch(scoped_loss, size=SIZE, argnum=1)(p, batch) / (ROWS // SIZE))(
        params
    )


@pytest.fixture
def case():
    return MLP.init(4), MLP.batch(ROWS, 0)


@pytest.mark.parametrize("f", [step, outside], ids=["inside", "outside"])
def test_one_pattern_a_stage(case, f):
    split = Split(submeshes(2, (2,)))
    params, batch = case
    with (
        mm.register_task(r"layers_([01])(?!\d)", mesh=split.mesh(0)),
        mm.register_task(r"layers_([23])(?!\d)", mesh=split.mesh(1)),
    ):
        loss, grads = mm.jit(f)(params, batch)
    assert_same((loss, grads), reference_gradient(MLP, 4, ROWS, SIZE))
    owners = {"stages": [jax.tree.map(lambda _, s=s: (s // 2,), p) for s, p in enumerate(params["stages"])]}
    assert_at_home(split, grads, owners)


@pytest.mark.parametrize("f", [step, outside], ids=["inside", "outside"])
def test_callback(case, f):
    """The callback gets group 1 and the direction, and answers with a range of devices and the task's name."""
    params, batch = case
    scopes = set()

    def place(name, backprop):
        scopes.add((name, backprop))
        stage = int(name) // 2
        return (2 * stage, 2 * stage + 2), f"stage{stage}"

    with mm.register_task(r"layers_(\d+)", callback=place, dims=(2,), device_axes=("data",)):
        compiled = mm.jit(f)
        loss, grads = compiled(params, batch)
        tasks = {
            i.task for i in compiled.plan(params, batch).instructions if i.kind == "RUN" and i.microbatch is not None
        }
    assert_same((loss, grads), reference_gradient(MLP, 4, ROWS, SIZE))
    assert {name for name, _ in scopes} == {"0", "1", "2", "3"}
    assert {type(backprop) for _, backprop in scopes} == {bool}
    assert {"stage0", "stage1"} <= tasks
    owners = {"stages": [jax.tree.map(lambda _, s=s: (s // 2,), p) for s, p in enumerate(params["stages"])]}
    assert_at_home(Split(submeshes(2, (2,))), grads, owners)


def test_devices_and_logical_axes(case):
    params, batch = case
    devices = np.array(jax.devices()[:4]).reshape(2, 2)

    def f(p, x):
        with jax.named_scope("block"):
            return mm.with_sharding_constraint(mlp_block(p, x), jax.sharding.PartitionSpec("rows"))

    with mm.register_task("block", devices=devices, device_axes=("a", "b"), logical_axes={"rows": ("a", "b")}):
        y = mm.jit(f)(params["stages"][0], batch["x"])
    assert y.addressable_shards[0].data.shape == (ROWS // 4, y.shape[1])
    assert set(y.devices()) == set(devices.flat)
    assert_same(y, mlp_block(params["stages"][0], batch["x"]))


@pytest.mark.parametrize("policy", [None, "dots"])
def test_remat_of_scoped_blocks(case, policy):
    """Names are relative inside remat and lose their direction: placement must not depend on either."""
    params, batch = case
    split = Split(submeshes(2, (2,)))
    chosen = jax.checkpoint_policies.dots_saveable if policy else None

    def loss(p, b):
        x = b["x"]
        for s, w in enumerate(p["stages"]):
            with jax.named_scope(f"layers_{s}"):
                x = jax.checkpoint(mlp_block, policy=chosen)(w, x)
        return squared_error(x, b["y"])

    with (
        mm.register_task(r"layers_([01])(?!\d)", mesh=split.mesh(0)),
        mm.register_task(r"layers_([23])(?!\d)", mesh=split.mesh(1)),
    ):
        actual = mm.jit(mm.microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1))(params, batch)
    actual = jax.tree.map(lambda x: x / (ROWS // SIZE), actual)
    assert_same(actual, reference_gradient(MLP, 4, ROWS, SIZE))


@pytest.mark.parametrize(
    "answer",
    [None, 3, "ab", (0, "n"), ((0, 1),), ((0, 1, 2), "n"), ((0, 0.5), "n"), ((0, 1), 3), ((1, 0), "n"), ((0, 99), "n")],
)
def test_a_callback_that_returns_something_else(answer):
    with (
        mm.register_task(r"layers_(\d+)", callback=lambda name, backprop: answer),
        pytest.raises(mm.UsageError, match=r"register_task\('layers_.*callback .*'0'"),
    ):
        mm.jit(scoped)(np.ones((8, 4), np.float32))


def test_a_callback_that_takes_other_arguments_is_refused_at_once():
    with pytest.raises(mm.UsageError, match=r"callback= is called with \(name, backprop\), which it does not"):
        mm.register_task(r"layers_(\d+)", callback=lambda name: ((0, 1), name))
    for callback in (lambda *args: ((0, 1), "a"), lambda name, backprop, extra=0: ((0, 1), "a"), divmod):
        mm.register_task(r"layers_(\d+)", callback=callback).remove()
