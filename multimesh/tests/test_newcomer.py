"""What someone new to the library would try first: one step of training each, with the values and homes of plain jit.

A case is ``case(stage, loop) -> (step, state, batch)`` and is written once: ``stage`` places a part and ``loop``
cuts the batch, or both are plain JAX. In the state and the results what lies below the key ``"s1"`` belongs to stage 1.
"""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from newcomer_layers import (
    BATCHES,
    DEVICES,
    ROWS,
    SIZE,
    WIDTH,
    dense,
    descend,
    layer,
    loss_of,
    normal,
    of_block,
    of_optimizer,
    per_stage,
    regression,
    squared_error,
    trained,
)
from newcomer_steps import CASES, STAGES, TELLING
from pipelines import Split, assert_same, microbatched, submeshes

import multimesh as mm

pytestmark = pytest.mark.longer


def home(path):
    """Stage of the innermost key like ``"s1"`` in a path of a pytree."""
    found = re.findall(r"\['s(\d)'\]", jax.tree_util.keystr(path))
    return int(found[-1]) if found else None


def put(split, tree):
    def at_home(path, x):
        s = home(path)
        return x if s is None else jax.device_put(x, NamedSharding(split.mesh(s), P()))

    return jax.tree.map_with_path(at_home, tree)


def assert_all_at_home(split, tree):
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        s = home(path)
        assert s is None or set(x.devices()) == split.devices(s), f"{jax.tree_util.keystr(path)}: {x.devices()}"


def check(case, split, compilations, rtol=1e-5):
    """Two steps: values, homes, donation; the second compiles nothing."""
    step, want, batch = case(plain, microbatched)
    reference = jax.jit(step)
    step, state, _ = case(split, mm.microbatch)
    placed, got = mm.jit(step, donate_argnums=0), put(split, state)
    for i in range(2):
        want, expected = reference(want, batch)
        before = len(compilations)
        got, result = placed(got, batch)
        assert i == 0 or len(compilations) == before
        assert_same((jax.tree.map(jnp.copy, got), result), (want, expected), rtol)
        assert_all_at_home(split, (got, result))
    return placed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in TELLING else pytest.mark.full) for n in CASES])
def test_a_step(name, compilations):
    check(CASES[name], Split(submeshes(STAGES.get(name, 2), (1,))), compilations)


def mesh(*devices, shape=None):
    return Mesh(DEVICES[list(devices)].reshape(shape or -1), ("data", "model")[: len(shape or "1")])


@pytest.mark.parametrize(
    "meshes",
    [
        (mesh(0, 2, 4, 6), mesh(1, 3, 5, 7)),
        pytest.param((mesh(7, 3), mesh(6, 0)), marks=pytest.mark.full),
        pytest.param((mesh(0, 3, 5, 6, shape=(2, 2)), mesh(1, 2, 4, 7, shape=(2, 2))), marks=pytest.mark.full),
        pytest.param((mesh(5, 6, 7), mesh(0, 1, 2, 3, 4)), marks=pytest.mark.full),
    ],
    ids=["every other", "backwards", "scattered", "3 to 5"],
)
def test_devices_in_any_order(meshes, compilations):
    check(of_block(layer), Split(meshes), compilations)


@pytest.mark.full
def test_double_precision(compilations):
    """The same function with 32 bits, with 64, and with 32 again."""
    split = Split(submeshes(2, (1,)))
    single = check(of_block(layer), split, compilations)
    with jax.enable_x64(True):

        def case(stage, loop):
            step, params, batch = of_block(layer)(stage, loop)
            return step, *jax.tree.map(lambda x: x.astype(np.float64), (params, batch))

        check(case, split, compilations, rtol=1e-13)
        _, params, batch = case(plain, None)
        assert single(params, batch)[1].dtype == jnp.float64
    before = len(compilations)
    _, params, batch = of_block(layer)(plain, None)
    assert single(put(split, params), batch)[1].dtype == jnp.float32
    assert len(compilations) == before


def test_functions_that_share_arrays(compilations):
    """One makes the parameters in tasks, one trains and donates them, one evaluates."""
    split = Split(submeshes(2, (1,)))
    step, _, batch = of_block(layer)(split, mm.microbatch)

    def init(stage, key):
        return {
            f"s{s}": stage(s, lambda k, s=s: jax.tree.map(lambda x: jax.random.normal(k, x.shape), dense(s)))(key)
            for s in range(2)
        }

    key = jax.random.key(0)
    params, want = mm.jit(functools.partial(init, split))(key), jax.jit(functools.partial(init, plain))(key)
    assert_all_at_home(split, params)
    train, evaluate = mm.jit(step, donate_argnums=0), mm.jit(loss_of(split))
    reference = jax.jit(lambda p, b: (loss_of(plain)(p, b), *of_block(layer)(plain, microbatched)[0](p, b)))
    for i in range(3):
        before = len(compilations)
        got = evaluate(params, batch)
        params, value = train(params, batch)
        assert i == 0 or len(compilations) == before
        expected, want, wanted = reference(want, batch)
        assert_same((got, value, jax.tree.map(jnp.copy, params)), (expected, wanted, want))


@pytest.mark.full
def test_first_calls_in_several_threads():
    split = Split(submeshes(2, (1,)))
    step, params, batch = of_block(layer)(split, mm.microbatch)
    want = jax.jit(of_block(layer)(plain, microbatched)[0])(params, batch)
    shared, errors = mm.jit(step), []

    def work():
        try:
            for f in (shared, mm.jit(lambda *args: step(*args))):
                assert_same(f(params, batch), want)
        except BaseException as e:  # noqa: BLE001 - handed to the main thread
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_callbacks_in_tasks_happen_once_a_microbatch(capfd):
    """In the order that plain jit has within a stage, where they are ordered."""
    seen = {0: [], 1: []}

    def case(stage):
        def block(s):
            def f(p, x):
                def note(v):
                    seen[s].append(float(v))
                    return np.float32(2)

                jax.debug.print("stage {}", s)
                x = x * io_callback(
                    note, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(x.sum()), ordered=True
                )
                return layer(p, x)

            return f

        def loss(params, batch):
            x = stage(0, block(0))(params["s0"], batch["x"])
            return squared_error(stage(1, block(1))(params["s1"], x), batch["y"])

        loop = microbatched if stage is plain else mm.microbatch
        return lambda params, batch: trained(loss, loop, params, batch)

    results, notes, lines = [], [], []
    for jit, stage in ((jax.jit, plain), (mm.jit, Split(submeshes(2, (1,))))):
        results.append(jit(case(stage))(per_stage(2), regression()))
        jax.effects_barrier()
        notes.append({s: np.array(seen[s]) for s in seen})
        lines.append(sorted(capfd.readouterr().out.splitlines()))
        seen[0].clear(), seen[1].clear()
    assert_same(results[1], results[0])
    assert len(notes[0][0]) == BATCHES
    assert_same(notes[1], notes[0])
    assert lines[0] == lines[1] == ["stage 0"] * BATCHES + ["stage 1"] * BATCHES


def test_orbax_takes_a_state_and_gives_it_back(tmp_path, compilations):
    """The restored state has the layouts that were saved, and goes on as the one that was not."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    split = Split(submeshes(2, (2,)))
    step, state, batch = of_optimizer(lambda: optax.adam(1e-2))(split, mm.microbatch)
    train = mm.jit(step)
    state, _ = train(put(split, state), batch)
    state, _ = train(state, batch)
    with checkpoint.StandardCheckpointer() as files:
        files.save(tmp_path / "state", state)
        files.wait_until_finished()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = files.restore(tmp_path / "state", like)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)
    before = len(compilations)
    assert_same(train(restored, batch), train(state, batch), rtol=0)
    assert len(compilations) == before


def test_a_loop_in_a_loop_is_refused():
    split = Split(submeshes(2, (1,)))

    def inner(params, batch):
        return mm.microbatch(loss_of(split), size=1, argnum=1)(params, batch)

    with pytest.raises(
        mm.MultiMeshError, match=r"test_newcomer\.py:\d+.*a microbatch loop inside another; use one loop"
    ):
        mm.jit(mm.microbatch(inner, size=2, argnum=1))(per_stage(2), regression())


TOKENS = (np.arange(ROWS * 5).reshape(ROWS, 5) * 7 % 11).astype(np.int32)


def next_token(logits, tokens):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -jnp.mean(picked)


def registered(split, first, second):
    return mm.register_task(first, mesh=split.mesh(0)), mm.register_task(second, mesh=split.mesh(1))


@pytest.mark.full
@pytest.mark.flax
@pytest.mark.filterwarnings("error")  # tokens are inputs of the first stage and labels of the last
def test_a_linen_transformer_with_tied_embeddings_and_dropout():
    nn = pytest.importorskip("flax.linen")
    split = Split(submeshes(2, (1,)))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False, use_bias=False)(
                h, mask=mask
            )
            h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
            return x + nn.Dropout(0.1, deterministic=False)(h)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, WIDTH, name="embed")
            x = embed(tokens)
            for i in range(2):
                x = Block(name=f"s{i}")(x)
            with jax.named_scope("head"):
                return embed.attend(nn.LayerNorm(name="norm")(x))

    def step(loop):
        def loss(params, batch, key):
            return next_token(Transformer().apply(params, batch, rngs={"dropout": key}), batch)

        def step(params, batch, key):
            value, grads = loop(jax.value_and_grad(loss), size=SIZE, argnum=1)(params, batch, key)
            return descend(params, grads), value

        return step

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.device_get(jax.jit(Transformer().init)(keys, TOKENS))
    one, two = registered(split, r"(embed|s0)(?!\d)", r"(s1|norm|head)(?!\d)")
    with one, two:
        got = mm.jit(step(mm.microbatch))(params, TOKENS, jax.random.key(2))
    assert_same(got, jax.jit(step(microbatched))(params, TOKENS, jax.random.key(2)))
    assert_all_at_home(split, got)


@pytest.mark.full
@pytest.mark.flax
def test_batch_norm_of_linen():
    nn = pytest.importorskip("flax.linen")
    split = Split(submeshes(2, (1,)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                with jax.named_scope(f"part{i}"):
                    x = nn.Conv(3, (3,), name=f"s{i}")(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9, name="s2")(x).mean((1, 2))

    def case(loop):
        def loss(params, kept, batch):
            out, new = Net().apply({"params": params, "batch_stats": kept}, batch["x"], mutable=["batch_stats"])
            return jnp.mean(jnp.square(out - batch["y"])), new["batch_stats"]

        def step(params, kept, batch):
            (value, kept), grads = trained(loss, loop, params, kept, batch, has_aux=True)
            return descend(params, grads), jax.tree.map(lambda x: x / BATCHES, kept), value

        return step

    batch = {"x": normal(0, ROWS, 6, 3), "y": normal(1, ROWS)}
    state = jax.device_get(jax.jit(Net().init)(jax.random.key(0), batch["x"]))
    args = state["params"], state["batch_stats"], batch
    one, two = registered(split, r"part0", r"(part1|s2)")
    with one, two:
        got = mm.jit(case(mm.microbatch))(*args)
    assert_same(got, jax.jit(case(microbatched))(*args))
    assert_all_at_home(Split((*split.meshes, split.mesh(1))), got)


@pytest.mark.full
@pytest.mark.flax
def test_an_nnx_transformer_with_batch_norm_and_dropout():
    nnx = pytest.importorskip("flax.nnx")
    split = Split(submeshes(2, (1,)))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=WIDTH, decode=False, use_bias=False, rngs=rngs
            )
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.batch_norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.dropout(self.batch_norm(nnx.gelu(self.dense(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
            self.s0, self.s1 = Block(rngs), Block(rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.s1(self.s0(self.embed(tokens))))

    def case(loop, scope):
        graph, params, rest = nnx.split(scope(Transformer(nnx.Rngs(0))), nnx.Param, ...)

        def loss(params, rest, batch):
            model = nnx.merge(graph, params, rest, copy=True)  # or Flax refuses to change statistics under grad
            return next_token(model(batch), batch), nnx.state(model, nnx.BatchStat)

        def step(params, rest, batch):
            (value, kept), grads = trained(loss, loop, params, rest, batch, has_aux=True)
            return *map(nnx.to_pure_dict, (descend(params, grads), kept)), value

        return step, params, rest, TOKENS

    step, *args = case(mm.microbatch, mm.scope_nnx)
    one, two = registered(split, r"(embed|s0)(?!\d)", r"s1(?!\d)")
    with one, two:
        got = mm.jit(step)(*args)
    step, *args = case(microbatched, lambda model: model)
    assert_same(got, jax.jit(step)(*args))
    assert_all_at_home(split, got)
