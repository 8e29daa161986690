"""What belongs to a stage stays there, whatever is done with it outside of tasks, with the values of plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from models import MLP, WIDTH, plain
from pipelines import Split, assert_at_home, assert_same, foreign_inputs, gradient, microbatched, submeshes
from test_optimizers import ROWS, SIZE, moments_of

import multimesh as mm

STAGES, COUNT = 3, ROWS // SIZE
SPLIT = Split(submeshes(STAGES, (1,)))
LARGEST = 4 * SIZE * WIDTH  # bytes of a microbatch's activations: nothing larger travels


def total(tree, of=jnp.square):
    return sum(jnp.sum(of(x)) for x in jax.tree.leaves(tree))


def spectral(params):
    """Two power iterations for each matrix."""
    norm = 0.0
    for w in (w for w in jax.tree.leaves(params) if w.ndim == 2):
        v = jnp.ones(w.shape[1]) / w.shape[1]
        for _ in range(2):
            v = w.T @ (w @ v)
            v = v / jnp.linalg.norm(v)
        norm += jnp.linalg.norm(w @ v)
    return norm


PENALTIES = {
    "l2": total,
    "l1": lambda params: total(params, jnp.abs),
    "norm": lambda params: jnp.sqrt(total(params)),
    "spectral": spectral,
}


def clipped(grads):
    scale = jnp.minimum(1.0, 0.1 / jnp.sqrt(total(grads)))
    return jax.tree.map(lambda g: g * scale, grads)


def raveled(grads):
    flat, unravel = ravel_pytree(grads)
    return unravel(flat * jnp.minimum(1.0, 0.1 / jnp.linalg.norm(flat)))


def is_finite(grads):
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))


def guarded(grads):
    good = is_finite(grads)
    return jax.tree.map(lambda g: jnp.where(good, g, 0.0), grads)


def check(make, *state, most=LARGEST):
    """``make(stage, loop)`` is a step of params, ``state``, batch; what it returns like params lies as they do."""
    params, batch = MLP.init(STAGES), MLP.batch(ROWS, 0)
    owners = MLP.owners(params)
    expected = jax.jit(make(plain, microbatched))(params, *state, batch)
    step = mm.jit(make(SPLIT, mm.microbatch))
    actual = step(SPLIT.place(params, owners), *state, batch)
    assert_same(actual, expected)
    trees = moments_of(actual, params)
    assert trees
    for tree in trees:
        assert_at_home(SPLIT, tree, owners)
    plan = step.compiled[0].plan
    leaves = [leaf for part in (params, *state) for leaf in jax.tree.leaves(part)]
    assert not foreign_inputs(plan, [n for n, leaf in enumerate(leaves) if np.size(leaf) > 4])
    assert max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= most
    return plan


def loss_of(stage, penalty=lambda params: 0.0):
    return lambda params, batch: MLP.loss(params, batch, stage) + 0.01 * penalty(params)


@pytest.mark.telling("l2-inside", "l1-after")
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("l2", "inside"),
        ("l2", "outside"),
        ("l2", "straight"),
        ("l1", "after"),
        ("norm", "inside"),
        ("spectral", "outside"),
    ],
)
def test_a_penalty_in_the_loss(name, where):
    """Each weight's part of it is computed beside the weight; the gradient stays there."""
    penalty = PENALTIES[name]

    def make(stage, loop):
        loss = loss_of(stage, penalty)
        if where == "inside":
            return lambda params, batch: loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(params, batch)
        if where == "outside":
            return lambda p, batch: jax.value_and_grad(lambda p: loop(loss, size=SIZE, argnum=1)(p, batch))(p)
        if where == "straight":
            return jax.value_and_grad(loss)
        loop_loss = loop(loss_of(stage), size=SIZE, argnum=1)
        return lambda p, batch: jax.value_and_grad(lambda p: loop_loss(p, batch) + penalty(p))(p)

    check(make, most=ROWS // SIZE * LARGEST if where == "straight" else LARGEST)


@pytest.mark.telling("clipped-1f1b")
@pytest.mark.parametrize(("change", "schedule"), [(clipped, "1f1b"), (guarded, "wavefront"), (raveled, "gpipe")])
def test_gradients_changed_per_microbatch(change, schedule):
    def make(stage, loop):
        def one(params, batch):
            value, grads = jax.value_and_grad(loss_of(stage))(params, batch)
            return value, change(grads)

        options = {} if loop is microbatched else {"schedule": schedule}
        return loop(one, size=SIZE, argnum=1, **options)

    check(make)


def noisy(grads):
    """DP-SGD: what each microbatch was clipped to, and noise."""
    leaves, tree = jax.tree.flatten(grads)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([g + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)])


def flat_update(params, grads):
    """All in one vector, which nothing needs to make."""
    flat, unravel = ravel_pytree(params)
    step, _ = ravel_pytree(grads)
    noise = 0.01 * jax.random.normal(jax.random.key(0), step.shape)
    return unravel(flat - 0.1 * (step / jnp.maximum(1.0, jnp.sqrt(jnp.vdot(step, step))) + noise))


UPDATES = {
    "noise": lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, noisy(clipped(grads))),
    "ravel": lambda params, grads: raveled(grads),
    "flat": flat_update,
}


@pytest.mark.telling("flat")
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_gradients_changed_after_the_loop(update):
    def make(stage, loop):
        grads_of = gradient(MLP, stage, size=SIZE, rows=ROWS, schedule=None if loop is microbatched else "1f1b")
        return lambda params, batch: update(params, grads_of(params, batch)[1])

    check(make)


OPTIMIZERS = {
    "adamw with a mask": optax.adamw(1e-3, eps=1e-4, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "lamb": optax.lamb(1e-3, eps=1e-4),
    "lion": optax.lion(1e-3),
    "agc": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1, momentum=0.9)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
    "schedule-free": optax.contrib.schedule_free_sgd(1e-3),
    "finite": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-4)), 3),
    "multisteps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-4)), 2
    ).gradient_transformation(),
}


@pytest.mark.longer
@pytest.mark.telling("adamw with a mask", "lamb")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_and_an_average_with_a_penalty(optimizer):
    """The moments and an exponential average of the weights are computed beside them."""
    params = MLP.init(STAGES)

    def make(stage, loop):
        grads_of = loop(jax.grad(loss_of(stage, total)), size=SIZE, argnum=1)

        def step(params, state, average, batch):
            updates, state = optimizer.update(grads_of(params, batch), state, params)
            average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
            return optax.apply_updates(params, updates), state, average

        return step

    check(make, jax.jit(optimizer.init)(params), params)


@pytest.mark.longer
@pytest.mark.telling("where-8")
@pytest.mark.parametrize(("scale", "times"), [(8, 1), (2.0**127, 1e10)], ids=["8", "overflows"])
@pytest.mark.parametrize("form", ["cond", "where"])
def test_loss_scaling_skips_an_update(form, scale, times):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-4))

    def make(stage, loop):
        def step(params, state, scale, batch):
            grads = loop(jax.grad(lambda p, b: times * scale * loss_of(stage)(p, b)), size=SIZE, argnum=1)(
                params, batch
            )
            grads = jax.tree.map(lambda g: g / scale, grads)
            good = is_finite(grads)

            def update(operands):
                params, state, grads = operands
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            if form == "cond":
                new = jax.lax.cond(good, update, lambda operands: operands[:2], (params, state, grads))
            else:
                updated = update((params, state, grads))
                new = jax.tree.map(lambda a, b: jnp.where(good, a, b), updated, (params, state))
            return *new, jnp.where(good, 2 * scale, scale / 2)

        return step

    check(make, jax.jit(optimizer.init)(MLP.init(STAGES)), np.float32(scale))


def test_adapters_of_frozen_weights():
    """LoRA: the adapters and their gradients lie beside the weights that they are added to."""
    frozen = MLP.init(STAGES)
    adapters = [{"a": np.full((WIDTH, 2), 0.1, np.float32), "b": np.ones((2, 32), np.float32)} for _ in range(STAGES)]

    def make(stage, loop):
        def loss(adapters, frozen, batch):
            pairs = zip(frozen["stages"], adapters, strict=True)
            return MLP.loss({"stages": [p | {"up": p["up"] + a["a"] @ a["b"]} for p, a in pairs]}, batch, stage)

        return loop(jax.grad(loss), size=SIZE, argnum=2)

    batch = MLP.batch(ROWS, 0)
    actual = mm.jit(make(SPLIT, mm.microbatch))(adapters, frozen, batch)
    assert_same(actual, jax.jit(make(plain, microbatched))(adapters, frozen, batch))
    assert_at_home(SPLIT, actual, [jax.tree.map(lambda _, s=s: (s,), a) for s, a in enumerate(adapters)])


TAKES = {
    "slice": lambda w, s: w[2 * s : 2 * s + 2],
    "split": lambda w, s: jnp.split(w, STAGES)[s],
    "index": lambda w, s: [w[2 * s], w[2 * s + 1]],
}


@pytest.mark.telling("slice-inside")
@pytest.mark.parametrize(
    ("take", "where"), [("slice", "inside"), ("slice", "outside"), ("split", "outside"), ("index", "outside")]
)
def test_stacked_weights_of_which_each_stage_takes_a_part(take, where):
    """Each stage has its part of the stack, and its gradients come into being there: no rows are sent."""
    layers = np.stack([p["up"][:, :WIDTH] for p in MLP.init(2 * STAGES)["stages"]])

    def make(stage, loop):
        def run(weights, x):
            for w in (weights[0], weights[1]):
                x = x + jnp.tanh(x @ w)
            return x

        def loss(params, batch):
            x = batch["x"]
            for s in range(STAGES):
                x = stage(s, run)(TAKES[take](params["layers"], s), x)
            return stage(STAGES - 1, lambda x, y: jnp.mean((x.mean(-1, keepdims=True) - y) ** 2))(x, batch["y"])

        def step(params, batch):
            if where == "inside":
                grads = loop(jax.grad(loss), size=SIZE, argnum=1)(params, batch)
            else:
                grads = jax.grad(lambda p: loop(loss, size=SIZE, argnum=1)(p, batch))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        return step

    params, batch = {"layers": layers, "other": np.ones(3, np.float32)}, MLP.batch(ROWS, 0)
    step = mm.jit(make(SPLIT, mm.microbatch))
    actual = step(params, batch)
    assert_same(actual, jax.jit(make(plain, microbatched))(params, batch))
    plan = step.compiled[0].plan
    assert not foreign_inputs(plan, range(STAGES))  # the blocks of the stack
    for shard in actual["layers"].addressable_shards:
        assert shard.device in SPLIT.mesh(shard.index[0].start // 2).devices
    assert max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= LARGEST


@pytest.mark.telling("zb-h1")
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b", "interleaved"])
def test_only_layers_are_tasks_and_the_table_is_tied(schedule):
    """Embedding, head and loss are unmarked, and gradients are added to zeros: as many stages as there are tasks."""
    pieces = 2 * STAGES if schedule == "interleaved" else STAGES
    table = np.random.default_rng(0).normal(size=(256, WIDTH)).astype(np.float32) / 8
    params = {"table": table, "stages": [p["up"][:, :WIDTH] for p in MLP.init(pieces)["stages"]]}
    tokens = np.random.default_rng(1).integers(0, 256, (ROWS, 2), np.int32)

    def make(stage, loop):
        def loss(params, tokens):
            x = params["table"][tokens[:, :1]]
            for s, w in enumerate(params["stages"]):
                x = stage(s % STAGES, lambda w, x: x + jnp.tanh(x @ w))(w, x)
            x = x - x.mean(-1, keepdims=True)
            logits = jax.nn.log_softmax(x @ params["table"].T)
            return -jnp.take_along_axis(logits[:, 0], tokens[:, 1:], 1).mean()

        def one(params, tokens):
            value, grads = jax.value_and_grad(loss)(params, tokens)
            return value, jax.tree.map(lambda g: jnp.zeros_like(g) + g, grads)

        def step(params, tokens):
            scaled = jax.tree.map(lambda w: w * 1.5, params)  # what tasks read is made before the loop
            options = {} if loop is microbatched else {"schedule": schedule}
            return loop(one, size=SIZE, argnum=1, **options)(scaled, tokens)

        return step

    step = mm.jit(make(SPLIT, mm.microbatch))
    assert_same(step(params, tokens), jax.jit(make(plain, microbatched))(params, tokens))
    plan = step.compiled[0].plan
    tied = len(params["stages"])  # its number among the leaves
    assert f"arguments on several submeshes: {tied} (16.4 kB) on " in str(plan)
    assert max(plan.slots[s].nbytes for t in plan.transfers for s in t.ins) <= table.nbytes
    assert sum(plan.slots[s].nbytes == table.nbytes for t in plan.transfers for s in t.ins) <= 2


@pytest.mark.longer
@pytest.mark.telling(
    "False-sliced-True",
    "True-reduced-False",
    "False-of what the other task made-True",
    "True-of what the other task made-False",
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ["sliced", "of what the other task made", "reduced"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.filterwarnings("ignore:.*lies on 2 submeshes")
def test_a_loop_gets_no_stage_on_a_submesh_that_only_others_use(stacked, way, first):
    """Operations outside of tasks with an argument of such a submesh run on one of the loop's own."""
    other = submeshes(STAGES + 1, (1,))[-1]

    def make(stage, loop):
        far = plain if stage is plain else Split((other,))

        def step(weights, x, c):
            before = far(0, jnp.sin)(c) if first else c

            def one(weights, x):
                for s, w in enumerate(weights):
                    x = stage(s, lambda w, x: jnp.tanh(x @ w))(w, x)
                late = {"sliced": c[:2], "reduced": (c * c).sum(), "of what the other task made": before[:2]}
                return x.sum(), late[way]

            options = {"reduce": ("sum", "stack" if stacked else "sum")} if stage is not plain else {}
            gradient = jax.value_and_grad(lambda *args: loop(one, size=SIZE, argnum=1, **options)(*args), has_aux=True)
            return gradient(weights, x), before if first else far(0, jnp.sin)(c)

        return step

    draw = np.random.default_rng(0)
    weights = [draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(STAGES)]
    args = weights, *(draw.normal(size=(n, WIDTH)).astype(np.float32) for n in (ROWS, 4))
    step = mm.jit(make(SPLIT, mm.microbatch))
    actual, expected = step(*args), jax.jit(make(plain, microbatched))(*args)
    if stacked:
        (loss, late), grads = actual[0]
        actual = ((loss, late.sum(0)), grads), actual[1]
    assert_same(actual, expected)
    on = {run.submesh for run in step.plan(*args).runs if run.cell is not None}
    assert {step.plan(*args).submeshes[n] for n in on} == set(SPLIT.meshes)


def test_an_argument_read_between_two_tasks_has_one_submesh():
    """Its new value too, so that no further call moves it."""

    def step_of(stage):
        def loss(p, x):
            x = stage(0, lambda w, x: jnp.tanh(x @ w))(p["a"], x) + jnp.sin(p["between"])
            return jnp.mean(stage(1, lambda w, x: jnp.tanh(x @ w))(p["b"], x) ** 2)

        def step(p, x):
            grads = mm.microbatch(jax.grad(loss), argnum=1, size=2, reduce="mean")(p, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

        return step

    params = {"a": jnp.eye(WIDTH), "b": jnp.eye(WIDTH), "between": jnp.ones(WIDTH)}
    run, x = mm.jit(step_of(SPLIT)), jnp.ones((4, WIDTH))
    assert "several submeshes" not in str(run.plan(params, x))
    new = run(params, x)
    assert new["between"].sharding.device_set == new["a"].sharding.device_set
    with mm.context(ignore_transforms=True):
        assert_same(new, jax.jit(step_of(plain))(params, x))
