"""mm.jit takes what jax.jit takes: arguments by name, methods, classes, weak types, memory kinds; it compiles once."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block, plain
from pipelines import assert_same, two_blocks

import multimesh as mm

ROWS, SIZE = 8, 2


def scaled(split, jit=mm.jit, **options):
    """A function with every kind of parameter."""
    stage = plain if split is None else split

    def f(p, x, repeat=1, /, scale=2.0, *args, shift, **kwargs):
        x = stage(0, mlp_block)(p["stages"][0], x * scale)
        for _ in range(repeat):
            x = stage(1, mlp_block)(p["stages"][1], x + shift)
        return {"x": x, **{k: v + sum(args) for k, v in kwargs.items()}}

    return jit(f, **options)


CALLS = {
    "keywords": ({}, lambda f, p, x: f(p, x, shift=1.0, kwargs=x, b=np.float32(2))),
    "in another order": ({}, lambda f, p, x: f(p, x, b=1.0, kwargs=x, shift=np.float32(1), scale=np.float32(3))),
    "everything by position": ({}, lambda f, p, x: f(p, x, 1, 3.0, 4.0, 5.0, shift=1.0, kwargs=1.0)),
    "static number": ({"static_argnums": 2}, lambda f, p, x: f(p, x, 3, shift=1.0)),
    "static by name": ({"static_argnames": ("shift",)}, lambda f, p, x: f(p, x, shift=3)),
    "static name by position": (
        {"static_argnames": "scale", "static_argnums": 2},
        lambda f, p, x: f(p, x, 1, 2, shift=1.0),
    ),
    "static number by name": ({"static_argnums": (2, 3)}, lambda f, p, x: f(p, x, 1, scale=2, shift=1.0)),
    "static among the rest": ({"static_argnames": "why"}, lambda f, p, x: f(p, x, shift=1.0, why=2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_by_name(split, case, call):
    params, batch = case
    options, run = CALLS[call]
    if "everything" in call:
        options = {"static_argnums": 2}
    f = scaled(split, **options)
    expected = run(scaled(None, jax.jit, **options), params, batch["x"])
    assert_same(run(f, params, batch["x"]), expected)
    shapes = run(f.eval_shape, params, batch["x"])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_ahead_of_time_with_keywords(split, case):
    params, batch = case
    f = scaled(split)
    compiled = f.lower(params, batch["x"], shift=np.float32(1)).compile()
    reference = scaled(None, jax.jit).lower(params, batch["x"], shift=np.float32(1)).compile()
    assert (compiled.in_tree, compiled.out_tree) == (reference.in_tree, reference.out_tree)
    actual = compiled(params, batch["x"], shift=np.float32(1))
    assert_same(actual, reference(params, batch["x"], shift=np.float32(1)))
    assert jax.tree.map(lambda x: x.sharding, actual) == compiled.output_shardings
    (shardings, _), by_name = compiled.input_shardings
    assert {s.mesh for s in jax.tree.leaves(shardings["stages"][1])} == {split.mesh(1)}
    assert by_name["shift"].mesh in split.meshes
    assert "HloModule" in compiled.as_text()
    traced = f.trace(params, batch["x"], shift=np.float32(1))
    assert (traced.in_tree, traced.out_tree, traced.fun_name) == (reference.in_tree, reference.out_tree, "f")
    assert str(traced.out_info) == str(jax.eval_shape(lambda: actual))
    assert str(traced.lower().plan) == str(compiled.plan)
    with pytest.raises(mm.UsageError, match="compiled for arguments"):
        compiled(params, batch["x"])


def test_donation_by_name(split, case):
    params, batch = case
    placed = split.place(params, MLP.owners(params))

    @mm.jit(donate_argnames="params")
    def f(x, *, params):
        return jax.tree.map(split(0, lambda w: w + x.mean()), params)

    f(batch["x"], params=placed["stages"][0])
    assert all(w.is_deleted() for w in jax.tree.leaves(placed["stages"][0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"static_argnames": "nothing"}, "no parameter 'nothing'"),
        ({"static_argnums": 1, "donate_argnames": "b"}, "static and donated"),
        ({"static_argnames": 3}, "must be a str"),
    ],
)
def test_parameters_that_do_not_fit(options, words):
    with pytest.raises(mm.UsageError, match=words):
        mm.jit(lambda a, b: a, **options)


@pytest.mark.parametrize("form", ["bare", "options", "partial"])
def test_a_method(split, case, form):
    params, batch = case
    decorate = {
        "bare": lambda f: mm.jit(f, static_argnums=0),
        "options": mm.jit(static_argnames="self"),
        "partial": functools.partial(mm.jit, static_argnums=(0,)),
    }[form]

    class Model:
        def __init__(self, scale):
            self.scale = scale

        @decorate
        def apply(self, params, x):
            return two_blocks(split)(params, x * self.scale)

    for scale in (1.0, 3.0):
        model = Model(scale)
        assert_same(model.apply(params, batch["x"]), jax.jit(two_blocks(plain))(params, batch["x"] * scale))
    assert Model.apply(model, params, x=batch["x"]).devices() == split.devices(1)


def test_a_class_of_tasks(split, case):
    params, batch = case

    class Block:
        def __init__(self, gain):
            self.gain = gain

        def __call__(self, p, x):
            return mlp_block(p, x) * self.gain

    front, back = (mm.task(Block, mesh=split.mesh(s)) for s in range(2))
    assert isinstance(front(1.0), Block)

    def f(first, second):
        return lambda p, x: second(p["stages"][1], first(p["stages"][0], x))

    actual = mm.jit(f(front(2.0), back(3.0)))(params, batch["x"])
    assert_same(actual, jax.jit(f(Block(2.0), Block(3.0)))(params, batch["x"]))
    assert actual.devices() == split.devices(1)
    with pytest.raises(mm.UsageError, match="can't be called"):
        mm.task(type("Nothing", (), {}), mesh=split.mesh(0))


def test_results_have_the_weak_types_of_jax(split, case):
    params, _ = case

    def make(stage):
        def f(p, x, y):
            a = stage(0, lambda p, x: (x * 2, p["bias"].sum() * x, x))(p["stages"][0], x)
            b = stage(1, lambda x, y: (x + 1, x + y, jnp.float32(3), 4.0))(a[0], y)
            return a, b, x, 1, 2.0, jnp.zeros(3), x * 3, (y + 1).astype(float)

        return f

    args = params, 2.0, 3
    actual, ref = mm.jit(make(split))(*args), jax.jit(make(plain))(*args)
    assert_same(actual, ref)
    assert jax.tree.map(lambda x: (x.dtype, x.weak_type), actual) == jax.tree.map(lambda x: (x.dtype, x.weak_type), ref)


def test_a_result_in_the_memory_that_was_asked_for(split, case):
    params, batch = case
    host = NamedSharding(split.mesh(1), P("data"), memory_kind="pinned_host")
    expected = jax.jit(two_blocks(plain))(params, batch["x"])
    f = mm.jit(lambda p, x: (two_blocks(split)(p, x), x), out_shardings=host)
    for actual in f(params, batch["x"]):
        assert actual.sharding.memory_kind == "pinned_host"
        assert actual.sharding.spec == P("data")
    assert_same(f(params, batch["x"])[0], expected)
    on_device = jax.device_put(f(params, batch["x"])[1], NamedSharding(split.mesh(0), P("data")))  # to compute with it
    assert_same(mm.jit(two_blocks(split))(params, on_device), expected)
    assert f.lower(params, batch["x"]).compile().output_shardings == (
        host,
        NamedSharding(split.mesh(0), P("data"), memory_kind="pinned_host"),
    )


def test_an_inline_jit_compiles_once(split, case, compilations):
    """As of jax.jit: for as long as the function lives; in each way that it is jitted."""
    params, batch = case
    f = two_blocks(split)
    expected = mm.jit(f)(params, batch["x"])
    assert_same(
        jax.grad(lambda x: mm.jit(f)(params, x).sum())(batch["x"]),
        jax.grad(lambda x: two_blocks(plain)(params, x).sum())(batch["x"]),
    )
    before = len(compilations)
    assert_same(mm.jit(f)(params, batch["x"]), expected)
    jax.grad(lambda x: mm.jit(f)(params, x).sum())(batch["x"])
    assert len(compilations) <= before + 1  # the sum outside
    mm.jit(f, out_shardings=P("data"))(params, batch["x"])
    assert len(compilations) > before + 1
    mm.jit(f).clear_cache()
    assert mm.jit(f).compiled == ()


def test_a_cache_does_not_keep_its_function(split, case):
    f = two_blocks(split)
    mm.jit(f)(case[0], case[1]["x"])
    mm.jit(lambda x: x + 1)(1.0)  # no task
    jax.grad(lambda x: mm.jit(f)(case[0], x).sum())(case[1]["x"])
    reference = weakref.ref(f)
    f = None
    gc.collect()
    assert reference() is None


def test_a_task_by_itself_compiles_nothing_again(split, case, compilations):
    params, batch = case

    def f(p, x):
        x = mm.with_sharding_constraint(x, P("batch"))
        return mm.task(lambda p, x: mlp_block(p, x), mesh=split.mesh(0), logical_axes={"batch": "data"})(
            p["stages"][0], x
        )

    assert_same(f(params, batch["x"]), mlp_block(params["stages"][0], batch["x"]))
    jax.grad(lambda x: f(params, x).sum())(batch["x"])
    before = len(compilations)
    f(params, batch["x"])
    jax.grad(lambda x: f(params, x).sum())(batch["x"])
    assert len(compilations) == before


def test_an_open_dimension_of_an_argument_is_replicated(split):
    front, back = split.meshes

    def f(w, x):
        return mm.task(jnp.matmul, mesh=back)(mm.task(jnp.matmul, mesh=front)(x, w), w)

    w, x = np.eye(8, dtype=np.float32), np.ones((4, 8), np.float32)
    axis = front.axis_names[0]
    jitted = mm.jit(f, in_shardings=(P(P.UNCONSTRAINED, axis), P(axis)))
    np.testing.assert_array_equal(jitted(w, x), x)
    assert jitted.lower(w, x).input_shardings[0].spec == P(None, axis)
