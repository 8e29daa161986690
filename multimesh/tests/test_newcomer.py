"""What someone new to the library would try first: steps of training, with the values and homes of plain jit.

A case is ``case(stage, loop) -> step`` and is written once: ``stage`` places a part and ``loop`` cuts the batch, or
both are plain JAX. In the state and the results what lies below the key ``"s1"`` belongs to stage 1.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, WIDTH, mlp_block, mlp_params, plain, squared_error
from pipelines import Split, assert_same, microbatched, submeshes

import multimesh as mm

pytestmark = pytest.mark.longer

ROWS, SIZE, STAGES = 8, 2, ("s0", "s1")
SPLIT = Split(submeshes(2, (1,)))
PARAMS = {s: mlp_params(n) for n, s in enumerate(STAGES)}
BATCH = MLP.batch(ROWS, 0)


def home(path):
    """Stage of the innermost key like ``"s1"`` in a path of a pytree."""
    names = re.findall(r"\['s(\d)'\]", jax.tree_util.keystr(path))
    return int(names[-1]) if names else None


def put(tree):
    def at_home(path, x):
        s = home(path)
        return x if s is None else jax.device_put(x, NamedSharding(SPLIT.mesh(s), P()))

    return jax.tree.map_with_path(at_home, tree)


def assert_all_at_home(tree):
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        s = home(path)
        assert s is None or set(x.devices()) == SPLIT.devices(s), f"{jax.tree_util.keystr(path)}: {x.devices()}"


def forward(stage, params, x, block=mlp_block):
    for n, s in enumerate(STAGES):
        x = stage(n, block)(params[s], x)
    return x


def loss_of(stage, params, batch):
    return squared_error(forward(stage, params, batch["x"]), batch["y"])


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def train_with(loss, **options):
    """A step by ``loss(stage, params, batch)``."""

    def case(stage, loop):
        gradient = jax.value_and_grad(functools.partial(loss, stage), **options)

        def step(params, batch):
            value, grads = loop(gradient, size=SIZE, argnum=1)(params, batch)
            return descend(params, grads), value

        return step

    return case


def with_odd_leaves(stage, params, batch):
    x = forward(stage, params, batch["x"], lambda p, x: mlp_block(p, x) + p["no rows"].sum())
    return squared_error(x, batch["y"])


def running_statistics(stage, loop):
    """As batch norm: each stage normalizes by its rows and keeps a mean over all of them, beside a counter."""

    def block(p, statistics, x):
        mean = x.mean(0)
        statistics = {"mean": 0.9 * statistics["mean"] + 0.1 * mean, "count": statistics["count"] + 1}
        return mlp_block(p, (x - mean) / jnp.sqrt(x.var(0) + 0.1)), statistics

    def loss(params, statistics, batch):
        x, new = batch["x"], {}
        for n, s in enumerate(STAGES):
            x, new[s] = stage(n, block)(params[s], statistics[s], x)
        return squared_error(x, batch["y"]), new

    def step(state, batch):
        gradient = loop(jax.value_and_grad(loss, has_aux=True), size=SIZE, argnum=2)
        (value, statistics), grads = gradient(*state, batch)
        statistics = jax.tree.map(lambda x: (x / (ROWS // SIZE)).astype(x.dtype), statistics)
        return (descend(state[0], grads), statistics), value

    return step


def moving_average_teacher(stage, loop):
    """Weights learn to do as their exponential moving average does."""

    def loss(params, average, batch):
        target = forward(stage, average, batch["x"][::-1])
        return jnp.mean(jnp.square(forward(stage, params, batch["x"]) - lax.stop_gradient(target)))

    def step(state, batch):
        value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=2)(*state, batch)
        params = descend(state[0], grads)
        return (params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state[1], params)), value

    return step


def none_where_frozen(stage, loop):
    """Trained and frozen parameters are two trees, each with None where the other has a leaf."""

    def step(state, batch):
        learns, frozen = state

        def loss(learns, batch):
            merged = jax.tree.map(lambda a, b: b if a is None else a, learns, frozen, is_leaf=lambda x: x is None)
            return loss_of(stage, merged, batch)

        value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(learns, batch)
        return (descend(learns, grads), frozen), value

    return step


def with_metrics(stage, params, batch):
    """Metrics of several kinds, of both stages, beside the loss."""
    hidden = stage(0, mlp_block)(params["s0"], batch["x"])
    out = stage(1, mlp_block)(params["s1"], hidden)
    metrics = {"hits": jnp.sum(jnp.argmax(out, -1) == 0), "s0": jnp.abs(hidden).max(), "s1": out.mean(), "no": None}
    return squared_error(out, batch["y"]), metrics


def adversaries(stage, loop):
    """Two losses, two loops, each with the gradient of its own stage."""

    def step(params, batch):
        def judge(params, x):
            return stage(1, mlp_block)(params["s1"], x).sum(-1)

        def of_judge(s1, batch):
            p = params | {"s1": s1}
            fake = jax.nn.softplus(judge(p, stage(0, mlp_block)(p["s0"], batch["x"][::-1])))
            return jnp.mean(fake + jax.nn.softplus(-judge(p, batch["x"])))

        def of_maker(s0, batch):
            return jnp.mean(jax.nn.softplus(-judge(params, stage(0, mlp_block)(s0, batch["x"]))))

        losses = {"s0": of_maker, "s1": of_judge}
        both = {s: loop(jax.value_and_grad(f), size=SIZE, argnum=1)(params[s], batch) for s, f in losses.items()}
        return {s: descend(params[s], grads) for s, (_, grads) in both.items()}, [value for value, _ in both.values()]

    return step


def decoding(stage, _):
    """One step of decoding with a cache of keys in every stage."""

    def block(p, cache, x, position):
        keys = lax.dynamic_update_slice(cache["keys"], mlp_block(p, x)[:, None], (0, position, 0))
        scores = jnp.where(jnp.arange(6) <= position, jnp.einsum("bd,btd->bt", x, keys), -1e9)
        return x + jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), keys), {"keys": keys}

    def step(state, batch):
        params, caches, position = state
        x, new = batch["x"], {}
        for n, s in enumerate(STAGES):
            x, new[s] = stage(n, block)(params[s], caches[s], x, position)
        return (params, new, position + 1), jnp.argmax(x, -1)

    return step


def per_example(stage, loop):
    """Gradients of single rows, clipped one by one."""

    def clipped(params, batch):
        gradient = jax.vmap(jax.grad(functools.partial(loss_of, stage)), (None, 0))
        grads = gradient(params, jax.tree.map(lambda x: x[:, None], batch))
        norms = jnp.sqrt(sum(jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 0.1 / norms), g, 1), grads), norms.sum()

    def step(params, batch):
        grads, norms = loop(clipped, size=SIZE, argnum=1)(params, batch)
        return descend(params, grads), norms

    return step


def labels_outside_of_tasks(stage, params, batch):
    """The rows are what the first stage reads, and what the loss outside of tasks compares with."""
    return jnp.mean(jnp.square(forward(stage, params, batch["x"]) - batch["x"]))


def without(*names):
    return {s: p | dict.fromkeys(names) for s, p in PARAMS.items()}


STATISTICS = {s: {"mean": np.zeros(WIDTH, np.float32), "count": np.int32(0)} for s in STAGES}
CACHES = {s: {"keys": np.zeros((ROWS, 6, WIDTH), np.float32)} for s in STAGES}
ODD = {"none": None, "empty": (), "no rows": np.zeros((0, WIDTH), np.float32)}
CASES = {
    "none and empty leaves": (train_with(with_odd_leaves), {s: p | ODD for s, p in PARAMS.items()}),
    "running statistics": (running_statistics, (PARAMS, STATISTICS)),
    "moving average": (moving_average_teacher, (PARAMS, jax.tree.map(np.sin, PARAMS))),
    "None where frozen": (none_where_frozen, (without("bias"), without("up", "down"))),
    "has_aux": (train_with(with_metrics, has_aux=True), PARAMS),
    "adversaries": (adversaries, PARAMS),
    "decoding": (decoding, (PARAMS, CACHES, np.int32(0))),
    "per example": (per_example, PARAMS),
    "labels outside of tasks": (train_with(labels_outside_of_tasks), PARAMS),
}


@pytest.mark.telling("none and empty leaves", "running statistics", "None where frozen", "has_aux", "decoding")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_a_step(name, compilations):
    """Two steps: values, homes, donation; the second compiles nothing."""
    case, desired = CASES[name]
    reference, step = jax.jit(case(plain, microbatched)), mm.jit(case(SPLIT, mm.microbatch), donate_argnums=0)
    actual = put(desired)
    for i in range(2):
        desired, expected = reference(desired, BATCH)
        before = len(compilations)
        actual, result = step(actual, BATCH)
        assert i == 0 or len(compilations) == before
        assert_same((jax.tree.map(jnp.copy, actual), result), (desired, expected))
        assert_all_at_home((actual, result))


def test_functions_that_share_arrays(compilations):
    """One makes the parameters in tasks, one trains and donates them, one evaluates."""

    def init(stage, key):
        drawn = jax.tree.map(lambda x: lambda k: jax.random.normal(k, x.shape), PARAMS)
        return {s: stage(n, lambda k, s=s: jax.tree.map(lambda f: f(k), drawn[s]))(key) for n, s in enumerate(STAGES)}

    key = jax.random.key(0)
    params, desired = mm.jit(functools.partial(init, SPLIT))(key), jax.jit(functools.partial(init, plain))(key)
    assert_all_at_home(params)
    case = train_with(loss_of)
    train, evaluate = mm.jit(case(SPLIT, mm.microbatch), donate_argnums=0), mm.jit(functools.partial(loss_of, SPLIT))
    reference = jax.jit(lambda p, b: (loss_of(plain, p, b), *case(plain, microbatched)(p, b)))
    for i in range(3):
        before = len(compilations)
        actual = evaluate(params, BATCH)
        params, value = train(params, BATCH)
        assert i == 0 or len(compilations) == before
        expected, desired, reference_value = reference(desired, BATCH)
        assert_same((actual, value, jax.tree.map(jnp.copy, params)), (expected, reference_value, desired))


def test_callbacks_in_tasks_happen_once_a_microbatch(capfd):
    """Ordered ones happen in the order that plain jit has within a stage."""
    values = {0: [], 1: []}

    def loss(stage, params, batch):
        def block(s):
            def note(v):
                values[s].append(float(v))
                return np.float32(2)

            def f(p, x):
                jax.debug.print("stage {}", s)
                total = lax.stop_gradient(x.sum())
                return mlp_block(p, x * io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), total, ordered=True))

            return f

        x = stage(0, block(0))(params["s0"], batch["x"])
        return squared_error(stage(1, block(1))(params["s1"], x), batch["y"])

    results, notes, lines = [], [], []
    for jit, *how in ((jax.jit, plain, microbatched), (mm.jit, SPLIT, mm.microbatch)):
        results.append(jit(train_with(loss)(*how))(PARAMS, BATCH))
        jax.effects_barrier()
        notes.append({s: np.array(values[s]) for s in values})
        lines.append(sorted(capfd.readouterr().out.splitlines()))
        values[0].clear(), values[1].clear()
    assert_same(results[1], results[0])
    assert len(notes[0][0]) == ROWS // SIZE
    assert_same(notes[1], notes[0])
    assert lines[0] == lines[1] == ["stage 0"] * (ROWS // SIZE) + ["stage 1"] * (ROWS // SIZE)
