"""Forecasts of memory: sizes, layouts read off constraints, and a pipeline's need against what XLA compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm
from multimesh.errors import DoesNotFitError, UsageError
from multimesh_maxtext.forecasting import needs
from multimesh_maxtext.layouts import carried, slot_axes, ways
from multimesh_maxtext.memory import Need, check_fits, parse_size, show_size

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", GIB // 2), ("7", 7)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1e9", "3 apples"])
def test_what_is_no_size(text: str):
    with pytest.raises(UsageError, match=r"--device-memory: .* is no size; write e.g. 80GiB or 24GB"):
        parse_size(text)


def test_sizes_are_shown_with_three_digits():
    assert [show_size(size) for size in (17, 2000, 3 * GIB, 2000 * GIB)] == ["17 B", "1.95 KiB", "3 GiB", "1.95 TiB"]


@pytest.mark.parametrize(
    ("need", "remedy"),
    [
        (Need(9 * GIB, 4 * GIB, 0, 0, 0, 0), "more --pp, --tp or --fsdp"),
        (Need(GIB, 0, 0, 0, 12 * GIB, 0), "--remat full, a smaller --microbatch-size or --schedule 1f1b"),
        (Need(GIB, 0, 0, 0, 0, 12 * GIB), "a smaller --microbatch-size or more --tp"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(need: Need, remedy: str):
    small = Need(1, 1, 1, 1, 1, 1)
    check_fits([small, need], 13 * GIB)
    with pytest.raises(
        DoesNotFitError, match=rf"stage 1 needs 13 GiB on each device .* a device has 12 GiB; use {remedy}"
    ):
        check_fits([small, need], 12 * GIB)


@pytest.fixture(scope="module")
def stages() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices[0], ("data", "model")), Mesh(devices[1], ("data", "model"))


@pytest.mark.parametrize(
    ("name", "params", "operands", "shapes", "out", "expected"),
    [
        (
            "dot_general",
            {"dimension_numbers": (((1,), (0,)), ((), ()))},
            [(("data",), ()), ((), ("model",))],
            [(8, 4), (4, 6)],
            (8, 6),
            (("data",), ("model",)),
        ),
        # An axis divides one dimension of a result only.
        (
            "dot_general",
            {"dimension_numbers": (((1,), (0,)), ((), ()))},
            [(("data",), ()), ((), ("data",))],
            [(8, 4), (4, 6)],
            (8, 6),
            (("data",), ()),
        ),
        ("transpose", {"permutation": (1, 0)}, [(("data",), ())], [(8, 4)], (4, 8), ((), ("data",))),
        ("reshape", {}, [(("data",), (), ("model",))], [(8, 3, 4)], (24, 2, 2), (("data",), ("model",), ())),
        ("reduce_sum", {"axes": (0,)}, [(("data",), ("model",))], [(8, 4)], (4,), (("model",),)),
        ("broadcast_in_dim", {"broadcast_dimensions": (1,)}, [(("model",),)], [(4,)], (8, 4), ((), ("model",))),
        ("add", {}, [((), ()), (("data",), ())], [(8, 4), (8, 4)], (8, 4), (("data",), ())),
        ("slice", {}, [(("data",), ("model",))], [(8, 4)], (8, 3), (("data",), ())),
        ("add", {}, [(("data",),)], [(7,)], (7,), ((),)),
    ],
)
def test_layouts_are_carried_through_operations(
    stages: tuple[Mesh, Mesh],
    name: str,
    params: dict[str, Any],
    operands: list[Any],
    shapes: list[Any],
    out: tuple[int, ...],
    expected: Any,
):
    assert carried(name, params, operands, shapes, [out], stages[0]) == [expected]


WIDTH, ROWS = 64, 256


@pytest.fixture(scope="module")
def lowered(stages: tuple[Mesh, Mesh]) -> tuple[Any, Any]:
    """A training step of two stages in MaxText's manner: state with model and optimizer, rows sharded over data."""

    def layer(number: int, weights: Any, y: jax.Array) -> jax.Array:
        y = jax.lax.with_sharding_constraint(y, NamedSharding(stages[number].abstract_mesh, P("data")))
        hidden = jnp.tanh(y @ weights["up"])
        return hidden @ weights["down"]

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        for number in range(2):
            y = mm.task(lambda w, y, n=number: layer(n, w, y), f"layer{number}", mesh=stages[number])(
                model[number], rows
            )
            rows = y
        return jnp.sum(rows**2)

    def step(state: Any, batch: jax.Array) -> Any:
        grads = mm.microbatch(lambda rows: jax.grad(loss)(state["model"], rows), size=ROWS // 4)(batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"], grads)
        return {"model": jax.tree.map(lambda w, m: w - 0.1 * m, state["model"], moments), "optimizer": moments}

    def weights(number: int) -> Any:
        def leaf(shape: tuple[int, int], spec: P) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(stages[number], spec))

        return {"up": leaf((WIDTH, 4 * WIDTH), P(None, "model")), "down": leaf((4 * WIDTH, WIDTH), P("model"))}

    model = [weights(0), weights(1)]
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(stages[0], P("data")))
    state = {"model": model, "optimizer": model}
    return mm.jit(step, donate_argnums=0).lower(state, batch), state


def test_parameters_and_moments_are_exact(lowered: tuple[Any, Any]):
    found = needs(lowered[0].plan, lowered[0].specs, lowered[1])
    held = 2 * 4 * WIDTH * WIDTH * 4 // 2  # two matrices of float32, over two devices of the model axis
    assert [(need.parameters, need.optimizer, need.gradients) for need in found] == [(held, held, held)] * 2


def test_layouts_are_those_that_xla_chooses(lowered: tuple[Any, Any]):
    plan, compiled = lowered[0].plan, lowered[0].compile().compiled_plan
    slots, _ = slot_axes(plan, lowered[0].specs)
    found, expected = 0.0, 0.0
    for slot, layout in enumerate(compiled.layouts):
        where = plan.slots[slot]
        found += where.nbytes / ways(slots.get(slot, ()), plan.submeshes[where.submesh])
        expected += where.nbytes * np.prod(layout.shard_shape(where.shape)) / max(1, np.prod(where.shape))
    assert found == pytest.approx(expected, rel=0.1)


def test_the_workspace_is_near_that_of_xla(lowered: tuple[Any, Any]):
    scratch = [stats["scratch"] / 4 for stats in lowered[0].compile().memory_analysis()]
    found = needs(lowered[0].plan, lowered[0].specs, lowered[1])
    for need, measured in zip(found, scratch, strict=True):
        assert 0.5 * measured <= need.workspace <= 2 * measured
