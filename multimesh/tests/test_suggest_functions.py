"""Suggestions for functions: pieces of a program, their costs, and what the search makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from multimesh.errors import DoesNotFitError, UsageError
from multimesh.hardware.devices import device
from multimesh.planner.pieces import Portion, pieces

import multimesh as mm

LAYERS, WIDTH, ROWS = 16, 4096, 4096
H100 = device("h100")


def of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def block(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def scanned(params: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x), None), x, params)[0] ** 2)


def unrolled(params: Any, x: Any) -> Any:
    for w in params:
        x = jax.jit(block)(w, x)
    return jnp.sum(x**2)


STACKED = {"up": of(LAYERS, WIDTH, 4 * WIDTH), "down": of(LAYERS, 4 * WIDTH, WIDTH)}
LISTED = [{"up": of(WIDTH, 4 * WIDTH), "down": of(4 * WIDTH, WIDTH)}] * LAYERS
BATCH = of(ROWS, WIDTH)


def found(fn: Any, params: Any) -> tuple[Portion, ...]:
    return pieces(fn, params, (BATCH,), H100, 0.0)


@pytest.mark.parametrize(("fn", "params"), [(scanned, STACKED), (unrolled, LISTED)], ids=["scan", "unrolled"])
def test_pieces_are_layers_with_their_parameters(fn: Any, params: Any):
    row = found(fn, params)
    assert len(row) >= LAYERS
    held = 2 * 4 * WIDTH * WIDTH * 2
    assert sum(piece.parameters for piece in row) == LAYERS * held
    assert sum(piece.numbers for piece in row) == LAYERS * held / 2
    assert sum(piece.operations for piece in row) == pytest.approx(2 * ROWS * LAYERS * held / 2, rel=0.01)
    assert {piece.crossing for piece in row[:-1]} == {ROWS * WIDTH * 2.0}  # what a layer hands to the next
    assert row[-1].crossing == 0
    assert sum(piece.kept for piece in row) >= LAYERS * ROWS * 4 * WIDTH * 2  # at least the results of tanh


def test_a_loop_costs_what_its_rounds_cost():
    one, other = (sum(piece.seconds for piece in found(*case)) for case in ((scanned, STACKED), (unrolled, LISTED)))
    assert one == pytest.approx(other, rel=0.1)


def test_a_function_gets_a_table_with_what_it_does_not_see():
    table = mm.suggest(scanned, (STACKED, BATCH), devices=8)
    assert "scanned on 8 h100, batch of 4096 rows" in str(table)
    assert max(map(len, str(table).splitlines())) <= 100
    assert any("no tensor parallelism" in note or "no tensor" in note for note in table.notes)
    for option in table.options:
        assert option.how.devices == 8
        assert option.bytes <= 0.75 * H100.memory
        assert sum(seconds for _, seconds in option.shares) == pytest.approx(option.seconds)
        assert 0 < option.utilization < 1
    assert [o.seconds for o in table.options] == sorted(o.seconds for o in table.options)


def test_what_is_fixed_stays():
    table = mm.suggest(scanned, (STACKED, BATCH), devices=8, pp=4, interleave=2, schedule="zb-v", microbatch=512)
    for option in table.options:
        how = option.how
        assert (how.pp, how.interleave, how.schedule, how.microbatch) == (4, 2, "zb-v", 512)
        assert len(how.layers) == 8


def test_more_devices_need_less_memory_each():
    few, many = (mm.suggest(scanned, (STACKED, BATCH), devices=n, dp=1, fsdp=1) for n in (2, 8))
    assert min(o.bytes for o in many.options) < min(o.bytes for o in few.options)


@pytest.mark.parametrize(
    ("args", "fields", "error", "message"),
    [
        ((STACKED,), {}, UsageError, "args must be"),
        ((STACKED, of()), {}, UsageError, "rows along their first dimension"),
        ((STACKED, BATCH), {"tp": 2}, UsageError, "tp is not searched for functions"),
        ((STACKED, BATCH), {"colour": 2}, UsageError, "'colour' cannot be fixed"),
        ((STACKED, BATCH), {"memory": 1e9}, DoesNotFitError, "nothing fits into 1 GB .* nearest"),
        ((STACKED, BATCH), {"pp": 3}, UsageError, "no configuration of 8 devices"),
    ],
)
def test_what_cannot_be_says_why(args: Any, fields: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        mm.suggest(scanned, args, devices=8, **fields)
