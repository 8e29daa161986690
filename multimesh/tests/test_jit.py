"""mm.jit as a jit: what goes in, what comes out, donation, static arguments, retracing, ahead-of-time use."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from models import MLP, TRANSFORMER, mlp_block, plain
from pipelines import Split, assert_at_home, assert_same, gradient, reference_gradient, submeshes

import multimesh as mm

ROWS, SIZE = 8, 2


@pytest.fixture
def split():
    return Split(submeshes(2, (2,)))


@pytest.fixture
def case():
    params = MLP.init(2)
    return params, MLP.batch(ROWS, 0)


def two_blocks(split):
    def f(p, x):
        return split(1, mlp_block)(p["stages"][1], split(0, mlp_block)(p["stages"][0], x))

    return f


@pytest.mark.promise("Inputs on the wrong devices are resharded")
@pytest.mark.parametrize("where", ["host", "device 0", "device 7", "all devices", "swapped stages"])
def test_inputs_may_lie_anywhere(split, case, where):
    params, batch = case
    everywhere = submeshes(1, (8,))[0]
    if where == "swapped stages":
        owners = jax.tree.map(lambda o: 1 - o, MLP.owners(params))
        args = split.place(params, owners), batch
    else:
        to = {
            "host": None,
            "device 0": SingleDeviceSharding(jax.devices()[0]),
            "device 7": SingleDeviceSharding(jax.devices()[7]),
            "all devices": NamedSharding(everywhere, P()),
        }[where]
        args = case if to is None else jax.device_put(case, to)
    loss, grads = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS))(*args)
    assert_same((loss, grads), reference_gradient(MLP, 2, ROWS, SIZE))
    assert_at_home(split, grads, MLP.owners(params))


@pytest.mark.promise("Inputs may be passed straight through")
def test_inputs_passed_straight_through(split, case):
    params, batch = case
    placed = split.place(params, MLP.owners(params))
    odd = {
        "key": jax.random.key(3),
        "none": None,
        "scalar": 3,
        "host": np.arange(4),
        "twice": placed["stages"][0]["up"],
    }

    def f(p, x, odd):
        return two_blocks(split)(p, x), p, odd, [odd["twice"], ()]

    y, same, odd_out, again = mm.jit(f)(placed, batch["x"], odd)
    assert_same(y, two_blocks(Plain())(params, batch["x"]))
    assert_same(same, params)
    assert_same(odd_out, jax.jit(lambda o: o)(odd))
    assert_same(again[0], odd["twice"])
    assert_at_home(split, same, MLP.owners(params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))


class Plain:
    def __call__(self, stage, fn):
        return plain(stage, fn)


def test_odd_outputs(split, case):
    """Constants, the same value twice, unused arguments, values that no task touches, empty trees."""
    params, batch = case
    table = np.arange(6.0, dtype=np.float32)
    on_device = jnp.ones(3)

    def make(stage):
        def f(p, x, unused):
            y = stage(0, mlp_block)(p["stages"][0], x)
            return {
                "y": (y, y),
                "constant": jnp.arange(3),
                "literal": 2.5,
                "closure": table + 1,
                "captured": stage(1, lambda v: v * on_device)(on_device),
                "untouched": x[0] * 2,
                "none": None,
                "empty": (),
            }

        return f

    args = (params, batch["x"], np.zeros((2, 2)))
    assert_same(mm.jit(make(split))(*args), jax.jit(make(plain))(*args))


def test_a_function_without_tasks():
    x = np.arange(8.0, dtype=np.float32)
    assert_same(mm.jit(lambda x: {"a": jnp.sin(x).sum(), "b": x[::2]})(x), {"a": jnp.sin(x).sum(), "b": x[::2]})


def test_a_task_that_does_nothing_still_places_its_value(split):
    """``task(lambda x: x, mesh=m)`` is how a user says: this value on that submesh."""
    x = np.arange(8.0, dtype=np.float32)
    y = mm.jit(split(1, lambda x: x))(x)
    assert_same(y, x)
    assert set(y.devices()) == split.devices(1)


@pytest.mark.promise("Donated arguments are consumed, all others stay usable")
def test_donation(split, case):
    params, batch = case
    owners = MLP.owners(params)
    grads_of = gradient(MLP, split, size=SIZE, rows=ROWS)

    def step(params, batch):
        loss, grads = grads_of(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    kept, donated = split.place(params, owners), split.place(params, owners)
    batch = jax.device_put(batch)
    want, _ = mm.jit(step)(kept, batch)
    got, _ = mm.jit(step, donate_argnums=(0,))(donated, batch)
    assert_same(got, jax.device_get(want))
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert not any(x.is_deleted() for x in jax.tree.leaves((kept, batch)))
    assert_same(kept, params)


@pytest.mark.promise("Donated arguments really reuse memory")
def test_a_donated_parameter_is_updated_in_place(split, case):
    params, batch = case
    placed = split.place(params, MLP.owners(params))
    addresses = {a for x in jax.tree.leaves(placed) for a in buffers(x)}
    grads_of = gradient(MLP, split, size=SIZE, rows=ROWS)

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads_of(params, batch)[1])

    updated = jax.block_until_ready(mm.jit(step, donate_argnums=0)(placed, batch))
    assert {a for x in jax.tree.leaves(updated) for a in buffers(x)} == addresses


def buffers(x):
    return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]


def test_donating_an_input_that_is_passed_through(split, case):
    params, batch = case
    placed = split.place(params, MLP.owners(params))
    f = mm.jit(lambda p, x: (p, two_blocks(split)(p, x)), donate_argnums=(0,))
    same, y = f(placed, batch["x"])
    assert_same(same, params)
    assert_same(y, two_blocks(Plain())(params, batch["x"]))


@pytest.mark.promise("Static arguments select a program")
def test_static_arguments(split, case):
    params, batch = case
    traces = []

    def f(p, x, repeat, scale):
        traces.append((repeat, scale))
        for _ in range(repeat):
            x = two_blocks(split)(p, x)
        return x * scale

    compiled = mm.jit(f, static_argnums=(2, 3))
    reference = two_blocks(Plain())
    once = reference(params, batch["x"])
    assert_same(compiled(params, batch["x"], 1, 2.0), once * 2)
    assert_same(compiled(params, batch["x"], 2, 1.0), reference(params, once))
    compiled(params, batch["x"], 1, 2.0)
    assert traces == [(1, 2.0), (2, 1.0)]


@pytest.mark.promise("A new shape, dtype or sharding of an input retraces or recompiles, and the old one stays cached")
def test_new_shapes_and_dtypes(split):
    params = MLP.init(2)
    traces = []

    def f(p, b):
        traces.append(b["x"].shape)
        return gradient(MLP, split, size=SIZE, rows=b["x"].shape[0])(p, b)

    compiled = mm.jit(f)
    for rows in (8, 4, 8, 4):
        assert_same(compiled(params, MLP.batch(rows, 0)), reference_gradient(MLP, 2, rows, SIZE))
    assert [s[0] for s in traces] == [8, 4]

    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loss, grads = compiled(low, MLP.batch(8, 0))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert np.isfinite(loss)
    assert_same(compiled(params, MLP.batch(8, 0)), reference_gradient(MLP, 2, 8, SIZE))
    assert len(traces) == 3


def test_new_shardings(case):
    split = Split(submeshes(2, (2, 2)))
    params, batch = case
    compiled = mm.jit(gradient(MLP, split, size=4, rows=ROWS))
    want = reference_gradient(MLP, 2, ROWS, 4)
    replicated = split.place(params, MLP.owners(params))
    sharded = {
        "stages": [
            {k: jax.device_put(v, NamedSharding(split.mesh(s), P("model"))) for k, v in p.items()}
            for s, p in enumerate(params["stages"])
        ]
    }
    for args in (replicated, sharded, params, sharded, replicated):
        loss, grads = compiled(args, batch)
        assert_same((loss, grads), want)
        assert_at_home(split, grads, MLP.owners(params))


def test_another_tree_of_arguments(split):
    """A list where there was a tuple, one more key: another signature, no mix-up."""
    f = mm.jit(lambda t: split(0, lambda *x: sum(x))(*jax.tree.leaves(t)))
    for t in ((1.0, 2.0), [1.0, 2.0], {"a": 1.0, "b": 2.0, "c": 3.0}):
        assert float(f(t)) == sum(jax.tree.leaves(t))


@pytest.mark.promise("jit has .lower().compile(), .plan(), .memory_analysis() and .cost_analysis()")
def test_ahead_of_time(split, case):
    f = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case)
    compiled = f.lower(*shapes).compile()
    assert_same(compiled(*case), reference_gradient(MLP, 2, ROWS, SIZE))
    with pytest.raises((mm.MultiMeshError, TypeError, ValueError)):
        compiled(case[0], MLP.batch(4, 0))


def test_analyses_are_per_submesh(split, case):
    f = mm.jit(gradient(MLP, split, size=SIZE, rows=ROWS))
    memory, cost = f.memory_analysis(*case), f.cost_analysis(*case)
    assert len(memory) == len(cost) == 2
    assert f.plan(*case).instructions


@pytest.mark.promise("in_shardings and out_shardings are honoured")
def test_shardings_of_inputs_and_outputs(case):
    split = Split(submeshes(2, (2, 2)))
    params, batch = case
    rows = NamedSharding(split.mesh(0), P("data"))
    out = NamedSharding(split.mesh(1), P("data", "model"))
    f = mm.jit(two_blocks(split), in_shardings=(None, rows), out_shardings=out)
    y = f(params, batch["x"])
    assert y.sharding.is_equivalent_to(out, y.ndim)
    assert_same(y, two_blocks(Plain())(params, batch["x"]))


def test_the_state_of_one_step_is_the_input_of_the_next_without_a_second_compilation(compilations):
    """Outputs come back with the shardings that the inputs had: a training loop has one signature."""
    split = Split(submeshes(2, (2, 2)))
    params = TRANSFORMER.init(2)
    state = split.place(params, TRANSFORMER.owners(params))
    grads_of = gradient(TRANSFORMER, split, size=4, rows=ROWS)
    step = mm.jit(lambda p, b: jax.tree.map(lambda p, g: p - 0.1 * g, p, grads_of(p, b)[1]), donate_argnums=(0,))
    batch = jax.device_put(TRANSFORMER.batch(ROWS, 0))
    state = step(state, batch)
    first = len(compilations)
    for _ in range(3):
        state = step(state, batch)
    assert first > 0
    assert len(compilations) == first


@pytest.mark.promise("Each fragment is compiled once, whatever the number of microbatches")
def test_compilations_do_not_grow_with_microbatches(compilations, case):
    split = Split(submeshes(2, (2,)))
    params = MLP.init(2)
    counts = []
    for rows in (4, 16):
        f = mm.jit(gradient(MLP, split, size=SIZE, rows=rows))
        placed, batch = split.place(params, MLP.owners(params)), jax.device_put(MLP.batch(rows, 0))
        before = len(compilations)
        f(placed, batch)
        counts.append(len(compilations) - before)
        f(placed, batch)
        assert len(compilations) - before == counts[-1]
    assert counts[0] == counts[1]


def scaled(split, jit=mm.jit, **options):
    """A function with every kind of parameter."""
    stage = plain if split is None else split

    def f(p, x, repeat=1, /, scale=2.0, *rest, shift, **more):
        x = stage(0, mlp_block)(p["stages"][0], x * scale)
        for _ in range(repeat):
            x = stage(1, mlp_block)(p["stages"][1], x + shift)
        return {"x": x, **{k: v + sum(rest) for k, v in more.items()}}

    return jit(f, **options)


CALLS = {
    "keywords": ({}, lambda f, p, x: f(p, x, shift=1.0, more=x, b=np.float32(2))),
    "in another order": ({}, lambda f, p, x: f(p, x, b=1.0, more=x, shift=np.float32(1), scale=np.float32(3))),
    "everything by position": ({}, lambda f, p, x: f(p, x, 1, 3.0, 4.0, 5.0, shift=1.0, more=1.0)),
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
    want = run(scaled(None, jax.jit, **options), params, batch["x"])
    assert_same(run(f, params, batch["x"]), want)
    shapes = run(f.eval_shape, params, batch["x"])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), want)


def test_ahead_of_time_with_keywords(split, case):
    params, batch = case
    f = scaled(split)
    compiled = f.lower(params, batch["x"], shift=np.float32(1)).compile()
    theirs = scaled(None, jax.jit).lower(params, batch["x"], shift=np.float32(1)).compile()
    assert (compiled.in_tree, compiled.out_tree) == (theirs.in_tree, theirs.out_tree)
    got = compiled(params, batch["x"], shift=np.float32(1))
    assert_same(got, theirs(params, batch["x"], shift=np.float32(1)))
    assert jax.tree.map(lambda x: x.sharding, got) == compiled.output_shardings
    (shardings, _), named = compiled.input_shardings
    assert {s.mesh for s in jax.tree.leaves(shardings["stages"][1])} == {split.mesh(1)}
    assert named["shift"].mesh in split.meshes
    assert "HloModule" in compiled.as_text()
    traced = f.trace(params, batch["x"], shift=np.float32(1))
    assert (traced.in_tree, traced.out_tree, traced.fun_name) == (theirs.in_tree, theirs.out_tree, "f")
    assert str(traced.out_info) == str(jax.eval_shape(lambda: got))
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

    got = mm.jit(f(front(2.0), back(3.0)))(params, batch["x"])
    assert_same(got, jax.jit(f(Block(2.0), Block(3.0)))(params, batch["x"]))
    assert got.devices() == split.devices(1)
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
    got, want = mm.jit(make(split))(*args), jax.jit(make(plain))(*args)
    assert_same(got, want)
    assert jax.tree.map(lambda x: (x.dtype, x.weak_type), got) == jax.tree.map(lambda x: (x.dtype, x.weak_type), want)


def test_a_result_in_the_memory_that_was_asked_for(split, case):
    params, batch = case
    host = NamedSharding(split.mesh(1), P("data"), memory_kind="pinned_host")
    want = jax.jit(two_blocks(plain))(params, batch["x"])
    f = mm.jit(lambda p, x: (two_blocks(split)(p, x), x), out_shardings=host)
    for got in f(params, batch["x"]):
        assert got.sharding.memory_kind == "pinned_host"
        assert got.sharding.spec == P("data")
    assert_same(f(params, batch["x"])[0], want)
    assert_same(mm.jit(two_blocks(split))(params, f(params, batch["x"])[1]), want)
    assert f.lower(params, batch["x"]).compile().output_shardings == (
        host,
        NamedSharding(split.mesh(0), P("data"), memory_kind="pinned_host"),
    )


def test_an_inline_jit_compiles_once(split, case, compilations):
    """As of jax.jit: for as long as the function lives; in each way that it is jitted."""
    params, batch = case
    f = two_blocks(split)
    want = mm.jit(f)(params, batch["x"])
    assert_same(
        jax.grad(lambda x: mm.jit(f)(params, x).sum())(batch["x"]),
        jax.grad(lambda x: two_blocks(plain)(params, x).sum())(batch["x"]),
    )
    before = len(compilations)
    assert_same(mm.jit(f)(params, batch["x"]), want)
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
