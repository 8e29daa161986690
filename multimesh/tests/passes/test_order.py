"""One global order of a loop's fragments, from its schedule's table."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from multimesh.passes.cutting.parts import Pipeline
from programs import on, ones, pipelined, placed

import multimesh as mm
from multimesh import schedules


def ordered(fn, rows=8, argnum=1, **options):
    """Order of the loop over microbatches of 2 rows; gradients with respect to the first argument."""
    f = mm.microbatch(jax.value_and_grad(fn), argnum=argnum, size=2, **options)
    (part,) = [p for p in pipelined(placed(f, ones(3, 3), ones(rows, 3))).parts if isinstance(p, Pipeline)]
    return part


def rows_of(order, cells=None):
    """Phase and microbatch of each submesh's cells, in order."""
    lanes = {}
    for s, k in order.cells if cells is None else cells:
        stage = order.fragments[s]
        lanes.setdefault(stage.mesh, []).append(f"{stage.phase}{k}")
    return {mesh: " ".join(row) for mesh, row in lanes.items()}


def chain(w, x):
    """Three stages in a row."""
    x = on(0, lambda w, x: jnp.sin(x @ w))(w, x)
    x = on(1, lambda w, x: jnp.sin(x @ w))(w, x)
    return on(2, lambda w, x: jnp.sum(jnp.sin(x @ w)))(w, x)


def skip(w, x):
    """No plain pipeline: the first submesh comes again after the second."""
    a = on(0, lambda w, x: jnp.sin(x @ w))(w, x)
    b = on(1, lambda w, x: jnp.sin(x @ w))(w, a)
    return on(0, lambda w, a, b: jnp.sum(jnp.sin(a + b @ w)))(w, a, b)


def test_1f1b_with_the_last_stage_joined():
    """Its forward and backward always run back to back, so they are one program, called B."""
    found = ordered(chain, schedule="1f1b")
    assert list(rows_of(found).values()) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "B0 B1 B2 B3"]
    assert [(s.phase, s.stage) for s in found.fragments] == [("F", 0), ("F", 1), ("B", 2), ("B", 1), ("B", 0)]
    last = found.fragments[2]
    assert {op.backward for op in last.ops} == {False, True}


def test_a_submesh_that_comes_again_has_a_second_stage():
    """F0 F1 F2 go 0 -> 1 -> 0; the table is that of two stages a submesh, less the cells of stage 3."""
    for schedule in ("gpipe", "1f1b", "interleaved", "wavefront"):
        found = ordered(skip, rows=16, schedule=schedule)
        assert [(s.phase, s.stage) for s in found.fragments] == [
            *(("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0))
        ]
        table = schedules.get(schedule).table(2, 2, 8, True)
        wanted = [" ".join(f"{c.phase}{c.microbatch}" for c in row if c.stage < 3) for row in table]
        assert list(rows_of(found).values()) == wanted


@dataclasses.dataclass(frozen=True)
class Backwards(schedules.Schedule):
    """A table that can't be run: every submesh starts with a backward."""

    name: ClassVar[str] = "backwards"

    def table(self, submeshes, chunks, microbatches, backward):
        return tuple(
            tuple(schedules.Cell(phase, rank, k) for phase in "BF" for k in range(microbatches))
            for rank in range(submeshes)
        )


def test_a_table_that_cannot_be_run_is_refused():
    """With the line of the microbatch call and the cell."""
    with pytest.raises(
        mm.UsageError,
        match=r"\.py:\d+: schedule table: submesh 0, position 0: B0 of microbatch 0 waits for F0 of microbatch 0",
    ):
        ordered(chain, schedule=Backwards())


def linear(w, x):
    """Only its gradient is asked for, so the last stage has no forward."""
    x = on(0, lambda w, x: jnp.sin(x @ w))(w, x)
    x = on(1, lambda w, x: jnp.sin(x @ w))(w, x)
    return on(2, lambda w, x: jnp.sum(x @ w))(w, x)


def balanced(w, x):
    """Every stage gives an auxiliary loss that no later stage reads, and one has a weight of its own."""
    total = 0.0
    for s in range(3):
        x, aux = on(s, lambda w, x: (jnp.sin(x @ w), jnp.sum(jnp.square(w))))(w, x)
        total = total + aux
    return total + on(2, lambda x: jnp.sum(x))(x)


@pytest.mark.parametrize("fn", [linear, balanced], ids=lambda f: f.__name__)
def test_loops_that_are_almost_pipelines_follow_the_table(fn):
    f = mm.microbatch(jax.grad(fn), argnum=1, size=2, schedule="1f1b")
    (part,) = [p for p in pipelined(placed(f, ones(3, 3), ones(8, 3))).parts if isinstance(p, Pipeline)]
    assert list(rows_of(part).values()) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "B0 B1 B2 B3"]


def test_a_schedule_that_has_no_table_for_the_loop_is_refused():
    with pytest.raises(
        mm.UsageError, match=r"\.py:\d+: schedule zb-h1 has one stage a submesh, but the loop has 2; use"
    ):
        ordered(skip, schedule="zb-h1")
