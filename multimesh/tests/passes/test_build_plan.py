"""The plan: slots are freed after their last use, sent before they are received, donated when they are replaced."""

import jax
import jax.numpy as jnp
import pytest
from multimesh.passes.planning.build_plan import build
from programs import on, ones, pipelined, placed

import multimesh as mm

ARGS = (ones(3, 3), ones(3, 3)), ones(8, 3)


def loss(params, x):
    return on(1, lambda w, h: jnp.sum(jnp.sin(h @ w)))(params[1], on(0, lambda w, x: jnp.sin(x @ w))(params[0], x))


def train(params, x):
    value, grads = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def planned(fn=train, args=ARGS, **options):
    return build(pipelined(placed(lambda a, b, x: fn((a, b), x), *jax.tree.leaves(args))), **options)


PLANS = {
    "train": lambda: planned(),
    "gradient": lambda: planned(jax.grad(loss)),
    "forward": lambda: planned(loss),
}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]()


def test_nothing_is_read_before_it_is_there_or_after_it_is_freed(plan):
    there = {slot for _, slot in (*plan.inputs, *plan.constants)}
    for step in plan.instructions:
        assert set(step.ins) <= there, step
        if step.kind == "FREE":
            there -= set(step.ins)
        elif step.kind != "SEND":
            there |= set(step.outs)
    assert {slot for kind, slot in plan.outputs if kind == "slot"} <= there


def test_only_results_constants_and_nothing_else_is_left(plan):
    held = {slot for kind, slot in plan.outputs if kind == "slot"} | {slot for _, slot in plan.constants}
    freed = [slot for step in plan.instructions if step.kind == "FREE" for slot in step.ins]
    assert len(freed) == len(set(freed))
    assert set(freed) == set(range(len(plan.slots))) - held


def test_a_slot_is_freed_directly_after_its_last_use(plan):
    last = {}
    for n, step in enumerate(plan.instructions):
        if step.kind == "FREE":
            for slot in step.ins:
                between = plan.instructions[last[slot] + 1 : n]
                assert {s.kind for s in between} <= {"RECV", "FREE"}
        else:
            last.update(dict.fromkeys((*step.ins, *step.outs), n))
    assert any(step.kind == "FREE" for step in plan.instructions)


def test_every_send_has_its_receive(plan):
    steps = [[(n, s) for n, s in enumerate(plan.instructions) if s.kind == kind] for kind in ("SEND", "RECV")]
    sends, receives = ({s.transfer: (n, s) for n, s in part} for part in steps)
    assert sends
    assert len(plan.transfers) == len(sends) == len(receives) == len(steps[0]) == len(steps[1])
    for transfer in plan.transfers:
        (issued, send), (arrived, receive) = sends[transfer.id], receives[transfer.id]
        assert issued < arrived
        assert (transfer.source, transfer.target) == (send.submesh, send.peer) == (receive.peer, receive.submesh)
        assert (transfer.ins, transfer.outs) == (send.ins, receive.outs)
        assert (send.task, send.microbatch) == (receive.task, receive.microbatch)
        assert [plan.slots[s].shape for s in send.ins] == [plan.slots[s].shape for s in receive.outs]


def test_every_slot_is_used_on_its_own_submesh(plan):
    for step in plan.instructions:
        for slot in (*step.ins, *step.outs):
            assert plan.slots[slot].submesh == step.submesh, step


def test_sums_grow_in_place():
    """A kernel reads its accumulators first, writes them first, and may reuse their memory."""
    plan = planned()
    grown = [s for s in plan.instructions if s.kind == "RUN" and plan.kernels[s.kernel].sums]
    assert {s.submesh for s in grown} == {0, 1}
    for step in grown:
        count = len(plan.kernels[step.kernel].sums)
        assert step.ins[:count] == step.outs[:count]
        assert plan.donations[step.kernel] == tuple(range(count))


def donated_arguments(plan):
    argument = {slot: arg for arg, slot in plan.inputs}
    steps = {s.kernel: s for s in plan.instructions if s.kind == "RUN"}
    read = [steps[kernel].ins[i] for kernel, where in plan.donations.items() for i in where]
    return sorted(argument[slot] for slot in read if slot in argument)


def test_arguments_are_donated_only_when_they_may_be_and_are_replaced():
    replaced = {0: 0, 1: 1}
    assert donated_arguments(planned(alike=replaced)) == []
    assert donated_arguments(planned(donated=frozenset([0]), alike=replaced)) == [0]
    assert donated_arguments(planned(donated=frozenset([0, 1, 2]), alike=replaced)) == [0, 1]


def test_a_result_has_the_layout_of_the_argument_that_it_replaces():
    plan = planned(alike={0: 0, 1: 1})
    results = [slot for _, slot in plan.outputs[:2]]
    assert [plan.like[slot] for slot in results] == [(0,), (1,)]


def test_a_kernel_is_there_once_whatever_the_number_of_microbatches():
    args = ARGS[0], ones(32, 3)
    few, many = planned(), planned(args=args)
    assert len(few.kernels) == len(many.kernels)
    runs = [sum(s.phase == "F" for s in p.instructions if s.kind == "RUN") for p in (few, many)]
    assert runs[1] == 4 * runs[0] > 0


def test_arguments_and_literals_as_results():
    plan = planned(lambda params, x: (loss(params, x), params[0], jnp.float32(3)))
    assert [kind for kind, _ in plan.outputs] == ["slot", "slot", "literal"]
    (given,) = [slot for arg, slot in plan.inputs if arg == 0]
    (copy,) = [step for step in plan.instructions if plan.outputs[1][1] in step.outs]
    assert (copy.task, copy.ins) == ("results", (given,))
