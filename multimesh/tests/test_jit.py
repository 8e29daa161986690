"""mm.jit as a jit: what goes in, what comes out, donation, static arguments, retracing, ahead-of-time use."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block, plain
from pipelines import Split, assert_at_home, assert_same, gradient, reference_gradient, submeshes, two_blocks

import multimesh as mm

ROWS, SIZE = 8, 2


@pytest.mark.telling("host", "swapped stages", "all devices")
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

    y, params_out, odd_out, copies = mm.jit(f)(placed, batch["x"], odd)
    assert_same(y, two_blocks(plain)(params, batch["x"]))
    assert_same(params_out, params)
    assert_same(odd_out, jax.jit(lambda o: o)(odd))
    assert_same(copies[0], odd["twice"])
    assert_at_home(split, params_out, MLP.owners(params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))


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


def test_donation(split, case):
    params, batch = case
    owners = MLP.owners(params)
    grads_of = gradient(MLP, split, size=SIZE, rows=ROWS)

    def step(params, batch):
        loss, grads = grads_of(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    donor_free, donated = split.place(params, owners), split.place(params, owners)
    batch = jax.device_put(batch)
    expected, _ = mm.jit(step)(donor_free, batch)
    actual, _ = mm.jit(step, donate_argnums=(0,))(donated, batch)
    assert_same(actual, jax.device_get(expected))
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert not any(x.is_deleted() for x in jax.tree.leaves((donor_free, batch)))
    assert_same(donor_free, params)


def test_static_arguments(split, case):
    params, batch = case
    traces = []

    def f(p, x, repeat, scale):
        traces.append((repeat, scale))
        for _ in range(repeat):
            x = two_blocks(split)(p, x)
        return x * scale

    compiled = mm.jit(f, static_argnums=(2, 3))
    reference = two_blocks(plain)
    first = reference(params, batch["x"])
    assert_same(compiled(params, batch["x"], 1, 2.0), first * 2)
    assert_same(compiled(params, batch["x"], 2, 1.0), reference(params, first))
    compiled(params, batch["x"], 1, 2.0)
    assert traces == [(1, 2.0), (2, 1.0)]


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


def test_another_tree_of_arguments(split):
    """A list where there was a tuple, one more key: another signature, no mix-up."""
    f = mm.jit(lambda t: split(0, lambda *x: sum(x))(*jax.tree.leaves(t)))
    for t in ((1.0, 2.0), [1.0, 2.0], {"a": 1.0, "b": 2.0, "c": 3.0}):
        assert float(f(t)) == sum(jax.tree.leaves(t))


def test_shardings_of_inputs_and_outputs(case):
    split = Split(submeshes(2, (2, 2)))
    params, batch = case
    rows = NamedSharding(split.mesh(0), P("data"))
    out = NamedSharding(split.mesh(1), P("data", "model"))
    f = mm.jit(two_blocks(split), in_shardings=(None, rows), out_shardings=out)
    y = f(params, batch["x"])
    assert y.sharding.is_equivalent_to(out, y.ndim)
    assert_same(y, two_blocks(plain)(params, batch["x"]))


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


@pytest.mark.parametrize("collects", [True, False])
def test_pythons_garbage_collector_rests_while_a_function_is_lowered_and_is_then_as_before(split, case, collects):
    states = []

    def f(p, x):
        states.append(gc.isenabled())
        if len(states) > 1:
            raise ValueError("again")
        return two_blocks(split)(p, x)

    (params, batch), before = case, gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        mm.jit(f).lower(params, batch["x"])
        assert gc.isenabled() == collects
        with pytest.raises(ValueError, match="again"):
            mm.jit(f).lower(params, batch["x"][:2])
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert states == [False, False]


def test_what_a_call_compiled_is_analysed_without_compiling_again(split, case, compilations):
    f = mm.jit(two_blocks(split))
    args = case[0], case[1]["x"]
    f(*args)
    before = len(compilations)
    assert f.memory_analysis(*args) == f.compiled[0].memory_analysis()
    assert f.cost_analysis(*args) == f.compiled[0].cost_analysis()
    assert len(compilations) == before
    with pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        mm.jit(jnp.sin).memory_analysis(args[1])


MISFITS = {  # layouts of x, which has 3 rows, and of the result; what is said of them
    "in": ({"in_shardings": P("data")}, r"in_shardings: x has 3 rows in dimension 0, and .* among 2 devices"),
    "in, with a mesh": (
        {"in_shardings": NamedSharding(submeshes(1, (2,))[0], P("data"))},
        r"in_shardings: x has 3 rows in dimension 0",
    ),
    "out": ({"out_shardings": P("data")}, r"out_shardings: result 0 has 3 rows"),
    "entries": ({"in_shardings": P(None, None, "data")}, r"x has shape \(3, 2\), fewer dimensions than .* has entries"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_layout_that_an_array_cannot_have_is_refused_as_jax_does(misfit):
    layouts, message = MISFITS[misfit]
    (mesh,) = submeshes(1, (2,))
    x = np.ones((3, 2), np.float32)
    with pytest.raises(mm.UsageError, match=message):
        mm.jit(mm.task(lambda x: 2 * x, mesh=mesh), **layouts)(x)
    shardings = {k: v if isinstance(v, NamedSharding) else NamedSharding(mesh, v) for k, v in layouts.items()}
    with pytest.raises(ValueError, match="3"):
        jax.jit(lambda x: 2 * x, **shardings)(x)


def test_an_axis_that_another_submesh_has_says_nothing_of_this_one():
    wide, narrow = (Mesh(np.array(jax.devices()[:n]), (name,)) for n, name in ((2, "rows"), (1, "data")))
    first, second = mm.task(lambda x: 2 * x, mesh=wide), mm.task(jnp.sin, mesh=narrow)
    pair = mm.jit(lambda x, y: (first(x), second(y)), in_shardings=(P("rows"), P("rows")))(np.ones((2, 3)), np.ones(3))
    assert_same(pair, (2 * jnp.ones((2, 3)), jnp.sin(jnp.ones(3))))
