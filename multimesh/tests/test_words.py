"""What users get wrong, in the words that they get: what, where, and the remedy."""

import importlib
import sys
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from pipelines import assert_same, submeshes

import multimesh as mm

pytestmark = pytest.mark.flax

A, B = submeshes(2, (1,))
WIDE = submeshes(1, (2,))[0]
SIZE, WIDTH = 4, 8
draw = np.random.default_rng(0).normal
W, X = (draw(size=(n, WIDTH)).astype(np.float32) / 3 for n in (WIDTH, 4 * SIZE))
HERE = r"test_words.py:\d+: "
loss = mm.task(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), mesh=A)


def assert_refused(message, step, *args, kind=mm.UsageError):
    with pytest.raises(kind, match=message):
        mm.jit(step)(*args)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
        return nn.Dense(WIDTH, kernel_init=init)(x)


def wide(fn, name, **options):
    return mm.task(fn, name, mesh=WIDE, **options)


def move(x, state):
    return mm.task(lambda x, s: 0.5 * s + x.sum(0), mesh=A)(x, state)


def constrained(*spec):
    return lambda x: jax.lax.with_sharding_constraint(x, P(*spec))


LACKS = HERE + r"task 'lost'.* names axis 'model', which its submesh \[data=2 .* does not have; make the submesh"
TWICE = HERE + r"task 'twice': P\('data', 'data'\) lays out two dimensions along axis 'data'.*; name it once"
LOGICAL = {"rows": "data", "columns": "data"}
REFUSED = {  # what is said, the step, and its arguments
    "argnum left at 0 cuts the parameters": (
        HERE + ".*argument 0, which argnum=0 cuts; if the batch is another argument, say so: argnum=1",
        *(mm.microbatch(jax.value_and_grad(loss), size=SIZE), W, X),
    ),
    "a count among means": (
        r"dtype int32 can't be averaged: result\['seen'\]; sum it, as reduce=\(\"mean\", \"sum\"\)",
        *(mm.microbatch(lambda x: {"loss": x.mean(), "seen": jnp.sum(x > 0)}, size=SIZE, reduce="mean"), X),
    ),
    "a module of equinox as an argument": (
        r"model.activation of type \w+ is no array.*eqx.partition\(model, eqx.is_array\)",
        *(lambda model, x: jax.vmap(model)(x), eqx.nn.MLP(WIDTH, WIDTH, 8, 2, key=jax.random.key(0)), X),
    ),
    "an axis of a module that a submesh lacks": (
        *(LACKS, wide(lambda p, x: Partitioned().apply(p, x), "lost"), Partitioned().init(jax.random.key(0), X), X),
    ),
    "an axis that a submesh lacks": (LACKS, wide(constrained("model"), "lost"), X),
    "one axis for two dimensions": (TWICE, wide(constrained("data", "data"), "twice"), X),
    "one axis for two logical ones": (
        TWICE,
        wide(lambda x: mm.with_sharding_constraint(x, P("rows", "columns")), "twice", logical_axes=LOGICAL),
        X,
    ),
    "a state that comes second": (
        r"returns \(state, result\), not \(result, state\)",
        *(mm.microbatch(lambda x, state: (x.sum(), move(x, state)), size=SIZE, carry=1), X, jnp.zeros(WIDTH)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    assert_refused(*REFUSED[case])


def test_a_fault_of_a_microbatched_function_is_told_as_it_is():
    with pytest.raises(TypeError, match="contracting"):
        mm.jit(mm.microbatch(lambda w, x: loss(w, x[:, :3]), size=SIZE, argnum=1))(W, X)
    with pytest.raises(ValueError, match="mine"):
        mm.jit(mm.microbatch(lambda x, w: _raise(), size=SIZE))(X, W)


def _raise():
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.float32(3), r"argument 1\['t'\] of shape \(\) has no rows along dim=0; give what all rows share"),
        (
            np.ones((1, WIDTH)),
            r"argument 1\['t'\] has 1, others 16; give what all rows share as an argument of its own",
        ),
        (jax.random.key(0), r"argument 1\['t'\] of shape \(\).*; give a key as an argument of its own.* which index="),
        (jax.random.PRNGKey(0), r"argument 1\['t'\] has 2, others 16; give a key as an argument of its own"),
    ],
)
def test_a_leaf_of_the_batch_without_its_rows(leaf, message):
    step = mm.microbatch(lambda w, batch: loss(w, batch["x"]), size=SIZE, argnum=1)
    assert_refused(message, step, W, {"x": X, "y": X, "t": leaf})


def test_a_constraint_that_does_not_divide_is_told():
    step = mm.jit(mm.task(lambda x: jax.lax.with_sharding_constraint(x, P("data")) * 1, mesh=WIDE))
    with pytest.warns(
        UserWarning, match=r"shape \(3, 8\) as P\('data',\), but axis 'data' of submesh .* not divide"
    ) as record:
        assert_same(step(X[:3]), X[:3])
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X[:4])


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_several_stages_a_submesh_of_a_function_that_is_cut(schedule):
    def chain(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(order):
        body = jax.value_and_grad(mm.pipeline(chain, order))
        return mm.microbatch(body, size=SIZE, argnum=1, schedule=schedule)

    message = r"pass the meshes to multimesh.pipeline once for each stage: \[a, b, b, a\]"
    assert_refused(message, step([A, B]), [W] * 4, X)
    mm.jit(step([A, B, B, A])).plan([W] * 4, X)


def test_lbfgs():
    def chain(ws):
        first = mm.task(lambda w, x: jnp.tanh(x @ w), "first", mesh=A)(ws[0], X)
        return jnp.mean(mm.task(lambda w, x: jnp.tanh(x @ w) - 1, "second", mesh=B)(ws[1], first) ** 2)

    def step_of(optimizer):
        def step(ws, state):
            value, grads = jax.value_and_grad(chain)(ws)
            updates, state = optimizer.update(grads, state, ws, value=value, grad=grads, value_fn=chain)
            return optax.apply_updates(ws, updates), state

        return step, [W, W], optimizer.init([W, W])

    message = HERE + r"this \w+ has tasks on 2 submeshes.*optax.lbfgs.*linesearch=None"
    assert_refused(message, *step_of(optax.lbfgs()), kind=mm.MultiMeshError)
    step, *args = step_of(optax.lbfgs(0.1, linesearch=None))
    assert_same(mm.jit(step)(*args), jax.jit(step)(*args), rtol=1e-4)


def test_lines_are_those_of_the_user_and_not_of_a_library():
    """An axis that shards nothing is told at a line of this file, whatever library the model is of."""

    class Block(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(x)

    graph, state = nnx.split(Block())
    linen = nn.Dense(WIDTH)
    steps = {
        "nnx": (lambda state, x: nnx.merge(graph, state)(x), nnx.to_pure_dict(state)),
        "linen": (linen.apply, linen.init(jax.random.key(0), X)),
    }
    for fn, params in steps.values():
        step = mm.jit(lambda p, x, fn=fn: mm.task(lambda p, x: fn(p, x), mesh=WIDE)(p, x))
        with pytest.warns(UserWarning, match="shards nothing") as record:
            step(params, X)
        assert {warning.filename for warning in record} == {__file__}


LIBRARY = """
import jax

def dense(w, x):
    return jax.lax.with_sharding_constraint(x, SPEC) @ w

def transform(fn):
    scope = {"fn": fn}
    exec("def apply(*args):\\n    return fn(*args)", scope)
    return scope["apply"]
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_lines_are_those_of_the_user_of_a_library_that_writes_code(folder, tmp_path, monkeypatch):
    """As Haiku does, of which JAX knows nothing: what it runs between is its own file, or a `<string>`."""
    name = f"library_in_{folder.replace('-', '_')}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / folder)
    library = importlib.import_module(name)
    apply = library.transform(lambda w, x: library.dense(w, x))
    steps = {
        "library": lambda w, x: mm.task(lambda w, x: library.dense(w, x), "inner", mesh=WIDE)(w, x),
        "written": lambda w, x: mm.task(apply, "inner", mesh=WIDE)(w, x),
    }
    for step in steps.values():
        library.SPEC = P(None)
        with pytest.warns(UserWarning, match="shards nothing") as record:
            mm.jit(lambda w, x, step=step: step(w, x))(W, X)
        assert {warning.filename for warning in record} == {__file__}
        library.SPEC = P("model")
        assert_refused(HERE + "task 'inner'.* names axis 'model'", lambda w, x, step=step: step(w, x), W, X)
    del sys.modules[name]


def test_lines_of_code_without_a_file_are_those_of_its_caller():
    code = "step = mm.jit(mm.task(lambda w, x: x @ w, mesh=mesh))\nstep(w, x)"
    with pytest.warns(UserWarning, match="shards nothing") as record:
        exec(code, {"mm": mm, "mesh": WIDE, "w": W, "x": X})
    assert {warning.filename for warning in record} == {__file__}
