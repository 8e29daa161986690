"""Placement: every operation gets a submesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from multimesh.ir.program import has_tasks
from multimesh.passes.placing.place_operations import place_operations, task_meshes
from programs import MESHES, loops, on, ones, placed, separated

import multimesh as mm


def where(program, name):
    """Submeshes of the operations of this name, by index."""
    return [MESHES.index(op.mesh) for op in program.items if op.prim.name == name]


def test_an_unmarked_operation_follows_its_operand():
    program = placed(lambda x, y: (jnp.cos(on(0, jnp.sin)(x)), jnp.tan(on(1, jnp.sin)(y))), ones(2), ones(2))
    assert (where(program, "sin"), where(program, "cos"), where(program, "tan")) == ([0, 1], [0], [1])
    assert [MESHES.index(program.homes[o]) for o in program.outputs] == [0, 1]


def test_straight_code_follows_the_largest_operand():
    """An optimizer works where its moments are, although the norm that scales them was computed elsewhere."""

    def f(x, y):
        big, small = on(1, jnp.sin)(x), on(0, jnp.cos)(y)
        return jnp.exp(big * small), jnp.log(small * big)

    program = placed(f, ones(8), ones())
    assert where(program, "mul") == [1, 1]


def test_a_loop_body_follows_the_operand_furthest_along_the_pipeline():
    def f(x):
        early = on(0, lambda x: jnp.sin(x))(x)
        late = on(1, jnp.sum)(early)
        return jnp.sum(early * late)

    program = placed(mm.microbatch(f, size=4), ones(8))
    (loop,) = loops(program)
    assert [MESHES.index(op.mesh) for op in loop.ops if op.prim.name == "mul"] == [1]


def test_what_depends_on_inputs_only_is_cloned_to_each_reader():
    def f(x):
        doubled = 2 * x
        return on(0, jnp.sin)(doubled), on(1, jnp.cos)(doubled)

    program = placed(f, ones(2))
    made = {op.outs[0]: op.mesh for op in program.items if op.prim.name == "mul"}
    readers = [op for op in program.items if op.task is not None]
    assert len(made) == len(readers) == 2
    assert [made[op.ins[0]] for op in readers] == [MESHES[0], MESHES[1]]


def test_what_only_results_read_goes_to_the_first_task():
    def f(x, y):
        return on(1, jnp.sin)(x), jnp.cos(y)

    assert where(placed(f, ones(2), ones(2)), "cos") == [1]


def test_a_constraint_outside_goes_to_the_task_that_reads_the_value():
    def f(x):
        y = mm.with_sharding_constraint(on(0, jnp.sin)(x), P())
        return on(1, jnp.cos)(y), on(2, jnp.tan)(y)

    program = placed(f, ones(2))
    readers = {op.ins[0]: op.task.name for op in program.items if op.prim.name in ("cos", "tan")}
    constraints = [op for op in program.items if "logical" in op.params]
    assert {op.task.name for op in constraints} == {"b", "c"}
    assert all(readers[op.outs[0]] == op.task.name for op in constraints)


def test_a_constraint_on_a_result_goes_to_the_task_that_makes_it():
    program = placed(lambda x: mm.with_sharding_constraint(on(1, jnp.sin)(x), P()), ones(2))
    (constraint,) = [op for op in program.items if "logical" in op.params]
    assert constraint.task.name == "b"
    assert program.homes[program.outputs[0]] == MESHES[1]


def test_a_constraint_that_no_task_could_resolve():
    def f(x, y):
        return on(0, jnp.sin)(x), jnp.cos(mm.with_sharding_constraint(2 * y, P("rows")))

    with pytest.raises(mm.MultiMeshError, match=r"test_place.py:.*no task beside it reads or makes the value"):
        placed(f, ones(2), ones(2))


def test_submeshes_stand_in_the_order_of_their_forward_use():
    def f(x):
        return jnp.sum(on(0, jnp.cos)(on(2, jnp.sin)(x)))

    for fn in (f, jax.grad(f)):
        assert task_meshes(separated(fn, ones(2))) == (MESHES[2], MESHES[0])


def test_a_function_without_tasks():
    program = separated(jnp.sin, ones(2))
    assert not has_tasks(program)
    assert has_tasks(separated(on(0, jnp.sin), ones(2)))
    with pytest.raises(mm.MultiMeshError, match="nothing in this function is a task"):
        place_operations(program)
