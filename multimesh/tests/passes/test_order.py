"""One global order of a loop's fragments, from its schedule's table."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from multimesh.passes.planning import OrderedLoop, arrange
from programs import on, ones, placed

import multimesh as mm
from multimesh import schedules


def ordered(fn, rows=8, argnum=1, **options):
    """Order of the loop over microbatches of 2 rows; gradients with respect to the first argument."""
    f = mm.microbatch(jax.value_and_grad(fn), argnum=argnum, size=2, **options)
    (part,) = [p for p in arrange(placed(f, ones(3, 3), ones(rows, 3))[0]) if isinstance(p, OrderedLoop)]
    return part.order


def rows_of(order, cells=None):
    """Phase and microbatch of each submesh's cells, in order."""
    lanes = {}
    for s, k in order.cells if cells is None else cells:
        stage = order.stages[s]
        lanes.setdefault(stage.fragment.mesh, []).append(f"{stage.phase}{k}")
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


def test_gpipe():
    assert list(rows_of(ordered(chain, schedule="gpipe")).values()) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3


def test_1f1b_with_the_last_stage_joined():
    """Its forward and backward always run back to back, so they are one program, called B."""
    found = ordered(chain, schedule="1f1b")
    assert list(rows_of(found).values()) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "B0 B1 B2 B3"]
    assert [(s.phase, s.number) for s in found.stages] == [("F", 0), ("F", 1), ("B", 2), ("B", 1), ("B", 0)]
    last = found.stages[2].fragment
    assert {op.backward for op in last.ops} == {False, True}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("fn", [chain, skip], ids=["chain", "skip"])
def test_the_order_is_complete_and_keeps_the_dependencies(fn, schedule):
    found = ordered(fn, schedule=schedule)
    assert sorted(found.cells) == [(s, k) for s in range(len(found.stages)) for k in range(4)]
    position = {cell: n for n, cell in enumerate(found.cells)}
    maker = {o: s for s, stage in enumerate(found.stages) for o in stage.fragment.outs}
    edges = [(maker[v], s) for s, stage in enumerate(found.stages) for v in stage.fragment.ins if v in maker]
    assert edges
    for a, b in edges:
        assert all(position[a, k] < position[b, k] for k in range(4))


def alive(row):
    peak = now = 0
    for cell in row.split():
        now += {"F": 1, "B": -1}[cell[0]]
        peak = max(peak, now)
    return peak


def test_a_loop_that_is_no_pipeline_is_greedy_within_the_schedules_limit():
    """Under gpipe all forwards come first; under 1f1b the first stage never runs far ahead."""
    fill, f1b = ordered(skip, rows=16, schedule="gpipe"), ordered(skip, rows=16, schedule="1f1b")
    for row in rows_of(fill).values():
        phases = "".join(cell[0] for cell in row.split())
        assert "BF" not in phases
    first = [
        [f"{f1b.stages[s].phase}{k}" for s, k in f1b.cells if s in (0, len(f1b.stages) - 1)],
        [f"{fill.stages[s].phase}{k}" for s, k in fill.cells if s in (0, len(fill.stages) - 1)],
    ]
    assert [alive(" ".join(row)) for row in first] == [2, 8]


def test_the_number_of_stages_is_checked():
    assert len(ordered(chain, num_stages=3).stages) == 5
    with pytest.raises(mm.MultiMeshError, match="num_stages=4, but the loop has 3 stages"):
        ordered(chain, num_stages=4)


@dataclasses.dataclass(frozen=True)
class Backwards(schedules.Schedule):
    """A table that can't be run: every submesh starts with a backward."""

    name: ClassVar[str] = "backwards"

    def table(self, submeshes, chunks, microbatches, backward):
        return tuple(
            tuple(schedules.Cell(phase, rank, k) for phase in "BF" for k in range(microbatches))
            for rank in range(submeshes)
        )

    def limit(self, submeshes, rank):
        return None


def test_a_table_that_deadlocks_is_refused():
    with pytest.raises(mm.MultiMeshError, match=r"the schedule deadlocks: B0 of microbatch 0, B1 of microbatch 0"):
        ordered(chain, schedule=Backwards())
