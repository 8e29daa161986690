"""zb-h1 makes weight gradients apart from what other stages wait for, also where a stage scans its layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multimesh.passes.cutting.order_cells import join_forward_backward, order_cells
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.cutting.split_weight_gradients import split_weight_gradients
from pipelines import assert_same
from programs import names, on, pipelined, place_program

import multimesh as mm

WIDTH, HIDDEN, LAYERS = 4, 6, 3


def arguments(stages):
    """Weights of each stage's layers, and four microbatches."""
    draw = np.random.default_rng(0).normal
    shapes = {"up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    stage = [{k: (draw(size=(LAYERS, *s)) / 3).astype(np.float32) for k, s in shapes.items()} for _ in range(stages)]
    return stage, draw(size=(8, WIDTH)).astype(np.float32)


def layer(w, x):
    return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def unrolled(w, x, layer=layer):
    """Layers one after the other."""
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda a, i=i: a[i], w), x)
    return x


def unrolled_and_checkpointed(w, x):
    """Each layer is computed again in the backward pass."""
    return unrolled(w, x, jax.checkpoint(layer))


def scanned(w, x, layer=layer):
    """Layers as the rows of a scan."""
    return jax.lax.scan(lambda x, row: (layer(row, x), None), x, w)[0]


def checkpointed(w, x):
    """Each layer is computed again in the backward pass."""
    return scanned(w, x, jax.checkpoint(layer))


def shared(w, x):
    """One layer many times: its gradient is carried from row to row."""
    return jax.lax.scan(lambda x, _: (layer(jax.tree.map(lambda a: a[0], w), x), None), x, length=LAYERS)[0]


def one_bias(w, x):
    """Layers with one bias for all: its gradient is a small sum, carried from row to row by W alone."""
    bias, rows = w["bias"][0], {k: w[k] for k in ("up", "down")}
    return jax.lax.scan(lambda x, row: (layer({**row, "bias": bias}, x), None), x, rows)[0]


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def recurrent(w, x):
    """A scan over time, of whose repetition W alone needs the carries as rows."""
    square = w["up"][0] @ w["down"][0]
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ square + row),) * 2, x, jnp.stack([x] * 3))[1].sum(0)


def nested(w, x):
    """A scan over blocks of layers, each a scan."""
    return jax.lax.scan(lambda x, _: (scanned(w, x), None), x, length=2)[0]


def with_rows(w, x):
    """Every layer gives a row too, which counts for the result."""
    x, rows = jax.lax.scan(lambda x, row: (layer(row, x), jnp.sin(x)), x, w)
    return x + rows.mean(0)


def normed(w, x):
    """Layers that scale a norm of their product, as attention does with queries and keys."""

    @jax.checkpoint
    def layer(w, x):
        hidden = x @ w["up"]
        hidden *= w["bias"] / (1 + jnp.mean(hidden**2, axis=-1, keepdims=True))
        return x + jnp.tanh(hidden)[:, :WIDTH]

    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda a, i=i: a[i], w), x)
    return x


STACKS = (
    unrolled,
    unrolled_and_checkpointed,
    scanned,
    checkpointed,
    shared,
    one_bias,
    recurrent,
    nested,
    with_rows,
    normed,
)


def loss(stack, placed_on):
    def f(w, x):
        for s, row in enumerate(w):
            x = placed_on(s, lambda w, x: stack(w, x))(row, x)
        return placed_on(len(w) - 1, lambda x: jnp.mean(jnp.square(x)))(x)

    return f


def step(stack, schedule, placed_on=on):
    return mm.microbatch(jax.value_and_grad(loss(stack, placed_on)), argnum=1, size=2, schedule=schedule)


def fragments(stack, schedule="zb-h1"):
    """Phase to fragment of the middle stage."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments(3))
    (part,) = [p for p in pipelined(place_program(step(stack, schedule), *shapes)).parts if isinstance(p, Pipeline)]
    return {f.phase: f for f in part.fragments if f.stage == 1}


@pytest.mark.telling("nested", "checkpointed")
@pytest.mark.parametrize("stack", STACKS[1:], ids=lambda f: f.__name__)
def test_the_gradients_are_those_of_plain_jit(stack):
    args = arguments(2)
    actual = mm.jit(step(stack, "zb-h1"))(*args)
    assert_same(actual, jax.jit(step(stack, "zb-h1", lambda _, f: f))(*args))


@pytest.mark.parametrize("stack", STACKS, ids=lambda f: f.__name__)
def test_no_weight_gradient_is_made_in_b(stack):
    """All gradients of weights, and nothing that another fragment waits for, are in W."""
    parts = fragments(stack)
    assert set(parts) == {"F", "B", "W"}
    of_weights = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    products = {phase: len([shape for shape in dots(parts[phase].ops) if shape in of_weights]) for phase in "BW"}
    assert products["B"] == 0
    assert products["W"] > 0
    others = {v for phase in "FB" for v in parts[phase].ins}
    assert not others & parts["W"].values


def dots(ops):
    """Shapes of the results of matrix products, also inside scans."""
    pending = [op.params["jaxpr"].jaxpr for op in ops if op.prim.name == "scan"]
    yield from (op.outs[0].aval.shape for op in ops if op.prim.name == "dot_general")
    while pending:
        for eqn in pending.pop().eqns:
            if eqn.primitive.name == "dot_general":
                yield eqn.outvars[0].aval.shape
            elif "jaxpr" in eqn.params:
                pending.append(getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]))


def test_a_gradient_that_is_a_small_sum_is_made_in_b():
    """A norm's scale has such a gradient: W would compute the product again whose rows are summed."""
    shapes = {phase: [*dots(part.ops)] for phase, part in fragments(normed).items()}
    assert shapes["W"] == [(HIDDEN, WIDTH)] * LAYERS
    assert shapes["B"].count((2, HIDDEN)) == LAYERS


def test_b_of_a_scan_has_only_the_products_that_carry_the_cotangent():
    """Two a layer backwards, two for the weights, and with checkpoint the forward's, of which W repeats one."""
    count = {f: {p: len(list(dots(part.ops))) for p, part in fragments(f).items()} for f in (scanned, checkpointed)}
    assert count == {scanned: {"F": 2, "B": 2, "W": 2}, checkpointed: {"F": 2, "B": 3, "W": 3}}


def test_w_of_a_checkpointed_scan_reads_the_layers_inputs_and_not_their_activations():
    """A row: input, its cotangent and one cotangent within the layer; the hidden activations are computed again."""
    later = fragments(checkpointed)["W"]
    rows = sorted(v.aval.shape for v in later.ins if v.aval.shape[:2] == (LAYERS, 2))
    assert rows == [(LAYERS, 2, WIDTH), (LAYERS, 2, WIDTH), (LAYERS, 2, HIDDEN)]


def test_other_schedules_do_not_split():
    parts = fragments(scanned, "1f1b")
    assert set(parts) == {"F", "B"}
    assert names(parts["B"].ops).count("scan") == 1


def rows_between(stack, schedule, owner=lambda device: device.id):
    """Phase and microbatch of the cells of each of three submeshes, whose devices are of processes ``owner``."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments(3))
    cut = pipelined(place_program(step(stack, schedule), *shapes), upto="schedule_cells")
    (part,) = [p for p in cut.parts if isinstance(p, Pipeline)]
    pipeline = order_cells(join_forward_backward(split_weight_gradients(part, owner)))
    cells = [(pipeline.fragments[n], k) for n, k in pipeline.cells]
    return [" ".join(f"{f.phase}{k}" for f, k in cells if f.mesh == mesh) for mesh in pipeline.submeshes]


def test_what_another_process_waits_for_leaves_before_the_weight_gradients():
    """Each W is right behind its B, so as many microbatches are alive as without it. Nobody waits for stage 0."""
    assert rows_between(unrolled, "1f1b") == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3",
        "B0 W0 B1 W1 B2 W2 B3 W3",
    ]
    assert rows_between(scanned, "eager-1f1b")[1:] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "B0 W0 B1 W1 B2 W2 B3 W3",
    ]


@pytest.mark.parametrize(
    ("stack", "schedule", "owner"),
    [
        (unrolled, "1f1b", lambda device: 0),  # one process, which starts both kernels itself
        (unrolled, "gpipe", lambda device: device.id),  # other microbatches hide the transfer
        (unrolled, "wavefront", lambda device: device.id),  # which says when a value is sent
        (checkpointed, "1f1b", lambda device: device.id),  # W would compute a product again
    ],
    ids=["one process", "gpipe", "wavefront", "checkpointed"],
)
def test_weight_gradients_stay_in_b_where_that_is_cheaper(stack, schedule, owner):
    assert not any("W" in row for row in rows_between(stack, schedule, owner))


def test_two_stages_of_a_process_stay_as_they_are():
    """Submeshes 1 and 2 are of one process: only the first of them sends to another."""
    rows = rows_between(unrolled, "1f1b", lambda device: min(device.id, 1))
    assert ["W" in row for row in rows] == [False, True, False]
