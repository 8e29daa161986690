"""Rules of a `Plan`: what its instructions do with slots, and what its kernels compute."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.passes.verifying.faults import Fault, in_order, kind, shown, twice
from multimesh.plan.instructions import Instruction, Kernel
from multimesh.plan.plan import Plan

Rule = Callable[[Plan], Iterator[Fault]]


def kernels_are_in_order(plan: Plan) -> Iterator[Fault]:
    """Every operation of a kernel comes after what it reads, and every result is made."""
    for kernel in _computing(plan):
        given = (*kernel.rows, *kernel.ins)
        yield from in_order(kernel.ops, given, f"in kernel {kernel.name}")
        made = {*given, *(o for op in kernel.ops for o in op.outs)}
        for v in (*kernel.sums, *kernel.outs):
            if v not in made:
                yield Fault(f"kernel {kernel.name} gives {shown(v)}, which it does not make", _source(kernel))


def kernels_assign_once(plan: Plan) -> Iterator[Fault]:
    """No kernel makes a value twice, or one that it is given."""
    for kernel in _computing(plan):
        yield from twice([((*kernel.rows, *kernel.ins), None), *((op.outs, op.source) for op in kernel.ops)])


def slots_are_where_they_are_used(plan: Plan) -> Iterator[Fault]:
    """A kernel runs on its submesh, with slots of that submesh; so do the ends of a transfer."""
    for step in plan.instructions:
        if step.kernel is not None and plan.kernels[step.kernel].submesh != step.submesh:
            yield Fault(f"'{step}' is of another submesh than its kernel", _source(plan.kernels[step.kernel]))
        for slot in (*step.ins, *step.outs):
            if plan.slots[slot].submesh != step.submesh:
                yield Fault(f"'{step}' uses s{slot} of submesh {plan.slots[slot].submesh}", _of(plan, step))


def slots_are_written_before_they_are_read(plan: Plan) -> Iterator[Fault]:
    """An instruction reads arguments, constants and what an instruction before it wrote; so does the caller."""
    full = _given(plan)
    for step in plan.instructions:
        if step.kind != "FREE":
            for slot in step.ins:
                if slot not in full:
                    yield Fault(f"'{step}' reads s{slot}, which is empty", _of(plan, step))
            full.update(step.outs)
    for position, (what, slot) in enumerate(plan.outputs):
        if what == "slot" and slot not in full:
            yield Fault(f"result {position} is s{slot}, which is empty")


def slots_are_written_once(plan: Plan) -> Iterator[Fault]:
    """A slot is written once, but for the accumulator that a kernel reads and writes."""
    full = _given(plan)
    for step in plan.instructions:
        for slot in step.outs:
            sums = plan.kernels[step.kernel].sums if step.kernel is not None else ()
            if slot in full and slot not in step.ins[: len(sums)]:
                yield Fault(f"'{step}' writes s{slot}, which holds something else", _of(plan, step))
            full.add(slot)


def slots_are_freed_once(plan: Plan) -> Iterator[Fault]:
    """A slot is freed once, after its last use; a result or a constant never."""
    kept = {slot for what, slot in plan.outputs if what == "slot"} | {slot for _, slot in plan.constants}
    freed: set[int] = set()
    for step in plan.instructions:
        for slot in (*step.ins, *step.outs):
            if slot in freed:
                yield Fault(f"'{step}' uses s{slot} after it was freed", _of(plan, step))
        if step.kind == "FREE":
            freed.update(step.ins)
            for slot in kept.intersection(step.ins):
                yield Fault(f"'{step}' frees s{slot}, which is a result or a constant")
    used = {slot for step in plan.instructions for slot in (*step.ins, *step.outs)}
    for slot in sorted(used - freed - kept):
        yield Fault(f"s{slot} is never freed")


def results_have_slots_of_their_own(plan: Plan) -> Iterator[Fault]:
    """No two results share a slot, and none is that of an argument."""
    taken = {slot for _, slot in plan.inputs}
    for position, (what, slot) in enumerate(plan.outputs):
        if what == "slot" and slot in taken:
            yield Fault(f"result {position} is s{slot}, which is another result or an argument")
        elif what == "slot":
            taken.add(slot)


def donated_slots_are_not_read_again(plan: Plan) -> Iterator[Fault]:
    """What a kernel may overwrite is read by nothing after it, unless the kernel wrote it anew."""
    kept = {slot for what, slot in plan.outputs if what == "slot"} | {slot for _, slot in plan.constants}
    gone: dict[int, Instruction] = {}
    for step in plan.instructions:
        if step.kind == "FREE":
            continue
        for slot in step.ins:
            if slot in gone:
                yield Fault(f"'{step}' reads s{slot}, which '{gone[slot]}' may have overwritten", _of(plan, step))
        donated = plan.donations.get(step.kernel, ()) if step.kernel is not None else ()
        for slot in {step.ins[i] for i in donated} - set(step.outs):
            gone[slot] = step
            if slot in kept:
                yield Fault(f"'{step}' may overwrite s{slot}, which is a result or a constant", _of(plan, step))


def slots_are_of_the_types_of_values(plan: Plan) -> Iterator[Fault]:
    """A kernel's values have the shape and dtype of their slots."""
    for step in plan.instructions:
        if step.kernel is None:
            continue
        kernel = plan.kernels[step.kernel]
        ins, outs = _values(kernel)
        if (len(ins), len(outs)) != (len(step.ins), len(step.outs)):
            yield Fault(f"'{step}' has not as many slots as kernel {kernel.name} has values", _of(plan, step))
        for v, slot in zip((*ins, *outs), (*step.ins, *step.outs), strict=False):
            if v is None:
                continue
            stacked = v in kernel.rows
            shape, dtype = kind(v)
            held = plan.slots[slot].shape[1:] if stacked else plan.slots[slot].shape
            if (held, plan.slots[slot].dtype) != (shape, dtype):
                yield Fault(f"s{slot} of '{step}' holds {kind(plan.slots[slot])}, not {shown(v)}", _of(plan, step))


def readers_see_the_type_that_was_made(plan: Plan) -> Iterator[Fault]:
    """What a kernel reads has the weak type with which another one made it, on whichever submesh."""
    weak: dict[int, bool] = {}
    for step in plan.instructions:
        if step.kind == "SEND" and step.transfer is not None:
            ends = plan.transfers[step.transfer]
            weak.update((b, weak[a]) for a, b in zip(ends.ins, ends.outs, strict=False) if a in weak)
        elif step.kernel is not None:
            kernel = plan.kernels[step.kernel]
            ins, outs = _values(kernel)
            for v, slot in zip(ins, step.ins, strict=False):
                if v is not None and v not in (*kernel.sums, *kernel.rows) and weak.get(slot, _weak(v)) != _weak(v):
                    yield Fault(f"'{step}' reads {shown(v)}, made with another weak type", _of(plan, step))
            made = zip(outs[len(kernel.sums) :], step.outs[len(kernel.sums) :], strict=False)
            weak.update((slot, _weak(v)) for v, slot in made)


def transfers_have_equal_ends(plan: Plan) -> Iterator[Fault]:
    """Both ends of a transfer have one shape and dtype, on the submeshes that it says."""
    for transfer in plan.transfers:
        if len(transfer.ins) != len(transfer.outs):
            yield Fault(f"transfer {transfer.id} sends {len(transfer.ins)} arrays, {len(transfer.outs)} arrive")
        for a, b in zip(transfer.ins, transfer.outs, strict=False):
            if kind(plan.slots[a]) != kind(plan.slots[b]):
                yield Fault(f"transfer {transfer.id}: s{a} is {kind(plan.slots[a])}, s{b} {kind(plan.slots[b])}")
            if (plan.slots[a].submesh, plan.slots[b].submesh) != (transfer.source, transfer.target):
                yield Fault(f"transfer {transfer.id}: s{a} or s{b} is not on its submesh")


def transfers_are_sent_then_received(plan: Plan) -> Iterator[Fault]:
    """Each transfer is sent once and received once after that, as it says itself."""
    steps: dict[int, list[Instruction]] = collections.defaultdict(list)
    for step in plan.instructions:
        if step.transfer is not None:
            steps[step.transfer].append(step)
    for n, transfer in enumerate(plan.transfers):
        found = [(s.kind, s.submesh, s.peer, s.ins, s.outs) for s in steps.pop(n, [])]
        ends = transfer.source, transfer.target
        want = [("SEND", *ends, transfer.ins, ()), ("RECV", *ends[::-1], (), transfer.outs)]
        if found != want or transfer.id != n:
            yield Fault(f"transfer {transfer.id} is not sent, then received: {found}")
    yield from (Fault(f"there is no transfer {n}, which '{found[0]}' names") for n, found in steps.items())


def layouts_fit(plan: Plan) -> Iterator[Fault]:
    """Once they are planned, every slot has a layout on its submesh, by whose parts its dimensions divide."""
    if plan.layouts and len(plan.layouts) != len(plan.slots):
        yield Fault(f"{len(plan.slots)} slots have {len(plan.layouts)} layouts")
    for slot, layout in zip(range(len(plan.slots)), plan.layouts, strict=False):
        mesh, shape = plan.submeshes[plan.slots[slot].submesh], plan.slots[slot].shape
        if layout.mesh != mesh:
            yield Fault(f"the layout of s{slot} is on another submesh")
        elif any(size % ways for size, ways in zip(shape, _ways(layout.spec, mesh), strict=False)):
            yield Fault(f"the layout {layout.spec} of s{slot} does not divide {shape}")


RULES: tuple[Rule, ...] = (
    kernels_are_in_order,
    kernels_assign_once,
    slots_are_where_they_are_used,
    slots_are_written_before_they_are_read,
    slots_are_written_once,
    slots_are_freed_once,
    results_have_slots_of_their_own,
    donated_slots_are_not_read_again,
    slots_are_of_the_types_of_values,
    readers_see_the_type_that_was_made,
    transfers_have_equal_ends,
    transfers_are_sent_then_received,
    layouts_fit,
)


def _computing(plan: Plan) -> Iterator[Kernel]:
    """Kernels of operations; the others only make zeros or stack."""
    return (kernel for kernel in plan.kernels if kernel.make == "ops")


def _given(plan: Plan) -> set[int]:
    return {slot for _, slot in (*plan.inputs, *plan.constants)}


def _values(kernel: Kernel) -> tuple[list[ir.Value | None], list[ir.Value]]:
    """Values of a kernel's arguments, None for the microbatch number, and of its results.

    For a sum that is the leaf, whose shape and dtype the accumulator has.
    """
    rows = [None, *kernel.rows] if kernel.rows else []
    return [*kernel.sums, *rows, *kernel.ins], [*kernel.sums, *kernel.outs]


def _weak(value: ir.Value) -> bool:
    return bool(getattr(value.aval, "weak_type", False))


def _ways(spec: PartitionSpec, mesh: Mesh) -> Iterator[int]:
    """Number of parts of each dimension that a spec names."""
    for entry in spec:
        axes: Sequence[Any] = () if entry is None else (entry,) if isinstance(entry, str) else entry
        yield math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _source(kernel: Kernel) -> Any:
    return next((op.source for op in reversed(kernel.ops)), None)


def _of(plan: Plan, step: Instruction) -> Any:
    """Source of the last operation that an instruction runs."""
    return None if step.kernel is None else _source(plan.kernels[step.kernel])
