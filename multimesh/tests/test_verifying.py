"""The verifier: for each rule something broken that this rule refuses; what has none is refused by the plan's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.passes import pipeline, verifying
from multimesh.passes.cutting.parts import Pipeline
from multimesh.plan.instructions import Free, Recv, Send, Slot, Transfer

import multimesh as mm
from multimesh import ir

MESHES = [Mesh(np.array([d]), ("data",)) for d in jax.devices()[:2]]


def loss(params, x):
    y = mm.task(lambda w, x: jnp.tanh(x @ w), "front", mesh=MESHES[0])(params[0], x)
    return mm.task(lambda w, y: jnp.sum((y @ w) ** 2), "back", mesh=MESHES[1])(params[1], y)


def step(params, x):
    grads = mm.microbatch(jax.grad(loss), size=2, argnum=1)(params, x)
    copy = mm.microbatch(lambda params, x: (loss(params, x), params[0] + 0), size=2, argnum=1)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], copy


@pytest.fixture(scope="module")
def lowered():
    return mm.jit(step).lower([np.ones((4, 4), np.float32)] * 2, np.ones((4, 4), np.float32))


@pytest.fixture(scope="module")
def passes(lowered):
    return {record.name: record for record in lowered.passes()}


def broken_rules(name, result):
    return {rule for rule, _ in verifying.faults(name, result)}


@pytest.mark.parametrize("name", pipeline.PASSES)
def test_all_on_the_way_is_whole(passes, name):
    assert not broken_rules(name, passes[name].result)


def with_loop(program, change):
    """The program with its first loop changed."""
    first = next(item for item in program.items if isinstance(item, ir.Loop))
    return replace(program, items=tuple(change(i) if i is first else i for i in program.items))


def of_type(like):
    return ir.Value(like.aval)


def with_const(loop, inner):
    return replace(loop, consts={**loop.consts, inner: next(iter(loop.consts.values()))})


def move_mesh(mesh):
    return next(m for m in MESHES if m != mesh)


def with_task_elsewhere(loop):
    """The first operation of a task says that its task is on the other submesh."""
    first = next(op for op in loop.ops if op.task is not None)
    moved = replace(first, task=replace(first.task, mesh=move_mesh(first.mesh)))
    return replace(loop, ops=tuple(moved if op is first else op for op in loop.ops))


PROGRAMS = {
    "values_are_made_once_then_read: made twice": lambda p: replace(p, items=(*p.items, p.items[-1])),
    "values_are_made_once_then_read: not made": lambda p: replace(p, outputs=(*p.outputs, of_type(p.inputs[0]))),
    "edges_are_of_one_type": lambda p: with_loop(
        p, lambda loop: with_const(loop, ir.Value(jax.core.ShapedArray((3,), jnp.float32)))
    ),
    "tasks_are_at_home": lambda p: with_loop(p, with_task_elsewhere),
}


def change_parts(parts, change):
    """Parts with the first loop changed."""
    first = next(part for part in parts.parts if isinstance(part, Pipeline))
    return parts.each_pipeline(lambda part: change(part) if part is first else part)


def with_fragment(change, which=lambda f: f.phase == "F"):
    """A change of the first fragment of a cut loop for which ``which`` holds."""

    def cut(part):
        first = next(f for f in part.fragments if which(f))
        fragments = tuple(change(f, part) if f is first else f for f in part.fragments)
        return replace(part, fragments=fragments)

    return lambda parts: change_parts(parts, cut)


def without(values, fragment):
    return replace(fragment, outs=tuple(v for v in fragment.outs if v not in values))


def last_microbatch_backwards(cells):
    late = iter([cell for cell in cells if cell[1] == 1][::-1])
    return tuple(next(late) if cell[1] == 1 else cell for cell in cells)


def reorder(change):
    return lambda parts: change_parts(parts, lambda part: replace(part, cells=change(part.cells)))


PARTS = {
    "leaves_are_given": with_fragment(lambda f, part: without(part.results, f), lambda f: f.phase == "B"),
    "cells_run_once": reorder(lambda cells: cells[:-1]),
}
LATER_PARTS = {
    "an operation on another submesh": with_fragment(lambda f, _: replace(f, mesh=MESHES[1])),
    "a fragment makes a value twice": with_fragment(lambda f, _: replace(f, ops=(*f.ops, f.ops[-1]))),
    "a fragment in a wrong order": with_fragment(lambda f, _: replace(f, ops=f.ops[::-1])),
    "a fragment that lacks an operand": with_fragment(lambda f, _: replace(f, ins=f.ins[1:])),
    "a fragment that keeps its result": with_fragment(lambda f, part: without(set(f.outs) - part.results, f)),
    "cells before their inputs": reorder(last_microbatch_backwards),
}


def forward(plan):
    """Number of the kernel of the first stage, and the first instruction that runs it."""
    return next((s.kernel, s) for s in plan.instructions if s.phase == "F")


def with_kernel(plan, change):
    number, _ = forward(plan)
    return replace(plan, kernels=tuple(change(k) if n == number else k for n, k in enumerate(plan.kernels)))


def with_slot(plan, slot, **fields):
    return replace(plan, slots=tuple(replace(s, **fields) if n == slot else s for n, s in enumerate(plan.slots)))


def accumulator(plan):
    """A slot that no transfer has."""
    return first(plan, "RUN", task="zeros").outs[0]


def repeat(plan, which):
    steps = [step for s in plan.instructions for step in ([s, s] if s is which else [s])]
    return replace(plan, instructions=tuple(steps))


def first(plan, kind, **fields):
    return next(s for s in plan.instructions if s.kind == kind and all(getattr(s, k) == v for k, v in fields.items()))


def with_transfer_to_another_type(plan):
    """The first argument is sent to a slot of another shape, and nobody reads it there."""
    (_, a), b, n = plan.inputs[0], len(plan.slots), len(plan.transfers)
    source = plan.slots[a].submesh
    target = 1 - source
    ends = Transfer(n, source, target, (a,), (b,))
    steps = (
        Send(source, target, n, (a,)),
        Recv(target, source, n, (b,)),
        Free(target, (b,)),
    )
    slots = (*plan.slots, Slot(target, (3,), plan.slots[a].dtype, 12))
    return replace(plan, slots=slots, transfers=(*plan.transfers, ends), instructions=(*steps, *plan.instructions))


PLANS = {
    "kernels_are_in_order": lambda plan: with_kernel(plan, lambda k: replace(k, ops=k.ops[::-1])),
    "kernels_are_in_order: made twice": lambda plan: with_kernel(plan, lambda k: replace(k, ops=(*k.ops, k.ops[-1]))),
    "slots_are_where_they_are_used": lambda plan: with_slot(plan, accumulator(plan), submesh=1),
    "slots_are_used_in_order: an argument is missing": lambda plan: replace(plan, inputs=plan.inputs[1:]),
    "slots_are_used_in_order: written twice": lambda plan: repeat(plan, first(plan, "RUN", task="zeros")),
    "slots_are_used_in_order: freed twice": lambda plan: repeat(plan, first(plan, "FREE")),
    "slots_are_used_in_order: a result twice": lambda plan: replace(plan, outputs=(*plan.outputs, plan.outputs[0])),
    "slots_are_used_in_order: donated too early": lambda plan: replace(
        plan, donations={**plan.donations, forward(plan)[0]: (len(forward(plan)[1].ins) - 1,)}
    ),
    "slots_are_of_the_types_of_values": lambda plan: with_slot(plan, accumulator(plan), shape=(3,)),
    "transfers_are_sent_then_received: another type": with_transfer_to_another_type,
    "transfers_are_sent_then_received: twice": lambda plan: repeat(plan, first(plan, "SEND")),
    "layouts_fit": lambda plan: replace(
        plan, layouts=tuple(NamedSharding(MESHES[1 - s.submesh], P()) for s in plan.slots)
    ),
}


BROKEN = {"place_operations": PROGRAMS, "check_states": PARTS, "build_plan": PLANS}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BROKEN.items() for case in cases])
def test_what_breaks_a_rule(passes, name, case):
    assert broken_rules(name, BROKEN[name][case](passes[name].result)) == {case.partition(":")[0]}


def test_every_rule_has_a_test():
    tested = {case.partition(":")[0] for cases in BROKEN.values() for case in cases}
    assert {rule.__name__ for rules in verifying.RULES.values() for rule in rules} == tested


@pytest.mark.parametrize("case", LATER_PARTS)
def test_what_no_rule_of_its_own_refuses_is_refused_later(passes, lowered, case):
    break_part = LATER_PARTS[case](passes["check_states"].result)
    with pytest.raises(mm.MultiMeshError, match="please report it"):
        list(pipeline.run(lowered.traced, after=pipeline.Pass("check_states", break_part)))


def test_the_error_names_the_pass_the_rule_the_value_and_the_users_line(passes, monkeypatch):
    """A pass that breaks something is found out under MULTIMESH_VERIFY=1; otherwise nothing is checked."""
    monkeypatch.setattr(pipeline, "hoist_slices", PROGRAMS["edges_are_of_one_type"])
    params, x = [np.ones((4, 4), np.float32)] * 2, np.ones((4, 4), np.float32)
    monkeypatch.setenv("MULTIMESH_VERIFY", "1")
    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(lambda params, x: step(params, x)).plan(params, x)
    message = str(error.value)
    assert "pass 'hoist_slices' broke the rule 'edges_are_of_one_type'" in message
    assert "%" in message
    assert "test_verifying.py:" in message
    assert "please report it" in message
    monkeypatch.undo()
    monkeypatch.setenv("MULTIMESH_VERIFY", "0")
    monkeypatch.setattr(verifying, "verify", lambda *_: pytest.fail("checked although it is off"))
    mm.jit(lambda params, x: step(params, x)).plan(params, x)
