"""What most submeshes run alike between loops becomes a program of its own."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from multimesh.passes.arrange import arrange, cut
from multimesh.passes.common import components, cut_common, in_two, signature
from multimesh.passes.fragment import Fragment, fragment
from programs import MESHES, inlined, names, on, ones, placed

import multimesh as mm
from multimesh import _executables

LAYER = (3, 3)


def loss(params, batch):
    x = on(0, lambda e, w, x: jnp.tanh(x @ e @ w), "a")(params["embed"], params["layers"][0], batch)
    x = on(1, lambda w, x: jnp.tanh(x @ w), "b")(params["layers"][1], x)
    return on(2, lambda w, x: jnp.sum(x @ w), "c")(params["layers"][2], x)


def train(params, moments, count, batch):
    """Momentum with a bias correction that reads the number of steps."""
    value, grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2)(params, batch)
    count = count + 1
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    scale = 0.01 / (1 - 0.9 ** count.astype(np.float32))
    return jax.tree.map(lambda p, m: p - scale * m, params, moments), moments, count, value / 2


def arguments(make):
    params = {"embed": make(2, 3), "layers": [make(*LAYER) for _ in range(3)]}
    return params, params, jax.ShapeDtypeStruct((), np.int32) if make is ones else np.int32(3), make(4, 2)


def optimizers():
    program, _ = placed(train, *arguments(ones))
    return [part for part in arrange(cut(program))[-1].fragments if part.outs]


def test_the_update_of_a_layer_is_one_program_on_every_submesh():
    parts = optimizers()
    device = [part.mesh.devices.flat[0].id for part in parts]
    assert sorted(device) == [0, 0, 1, 2, 2]  # the embedding and the count on 0, the loss on 2
    first = {d: parts[device.index(d)] for d in (0, 1, 2)}
    assert len({signature(part.ops, part.outs) for part in first.values()}) == 1
    shapes = {d: {v.aval.shape for v in part.outs} for d, part in first.items()}
    assert shapes == {0: {LAYER}, 1: {LAYER}, 2: {LAYER}}


def test_arithmetic_on_scalars_is_repeated_and_every_value_made_once():
    parts = optimizers()
    made = [v for part in parts for v in part.made]
    assert len(made) == len(set(made))
    assert sum(names(part.ops).count("pow") for part in parts) >= 4


def test_cut_optimizers_compute_what_plain_jit_does():
    rng = np.random.default_rng(0)
    args = arguments(lambda *shape: rng.normal(size=shape).astype(np.float32))
    ours, plain = mm.jit(train)(*args), jax.jit(train)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, plain)


def test_accumulators_that_all_submeshes_have_are_zeroed_by_one_program():
    plan = mm.jit(train).plan(*arguments(ones))
    zeros = [[v.aval.shape for v in k.outs] for k in plan.kernels if k.make == "zeros"]
    assert zeros == [[LAYER], [(2, 3)], [LAYER], [LAYER], [()]]


def test_nothing_is_cut_where_submeshes_share_no_programs(monkeypatch):
    """As on accelerators: a program more a step, and each is compiled for its own devices."""
    plan = mm.jit(train).plan(*arguments(ones))
    monkeypatch.setattr(_executables, "shares_programs", lambda _: False)
    assert len(optimizers()) == 3
    assert len(mm.jit(train).plan(*arguments(ones)).kernels) < len(plan.kernels)


def test_fragments_with_tasks_stay_whole():
    program, _ = placed(lambda x: (on(0, lambda x: (jnp.sin(x), jnp.cos(x)))(x), on(1, jnp.sin)(x)), ones(4))
    parts = fragment(program.items, program.outputs, phased=False)
    cut = cut_common(parts, set(program.outputs))
    assert [part.ops for part in cut] == [part.ops for part in parts]


def test_components_meet_in_arrays_and_in_no_scalars():
    def f(x, y, rate):
        rate = rate * 2
        return jnp.sin(x) * rate, lax.cos(y) * rate, lax.reduce_sum(x, (0,)) + lax.reduce_sum(y, (0,))

    program = inlined(f, ones(2), ones(2), ones())
    part = Fragment(MESHES[0], None, 0, program.items, outs=tuple(program.outputs))
    assert sorted(sorted(names(ops)) for ops in components(part)) == [
        ["add", "reduce_sum", "reduce_sum"],
        ["cos", "mul", "mul"],
        ["mul", "mul", "sin"],
    ]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["ab", "b", "bc"], [["b", "a"], ["b"], ["b", "c"]]),
        (["aab", "ab"], [["ab", "a"], ["ab"]]),
        (["a", "b"], [["a"], ["b"]]),
        (["ab"], [["ab"]]),
        (["ab", "ab", "b"], [["ab"], ["ab"], ["b"]]),
    ],
)
def test_in_two(groups, expected):
    assert [["".join(half) for half in halves] for halves in in_two(groups, groups)] == expected
