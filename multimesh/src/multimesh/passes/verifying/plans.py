"""Rules of a `Plan`: the use of slots by instructions, and the operations of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from multimesh import ir
from multimesh.core import specs
from multimesh.core.grouping import group
from multimesh.passes.verifying.faults import Fault, in_order, kind, show
from multimesh.plan.instructions import Free, Instruction, Kernel, Recv, Run, Send
from multimesh.plan.plan import Plan

Rule = Callable[[Plan], Iterator[Fault]]


def kernels_are_in_order(plan: Plan) -> Iterator[Fault]:
    """Check that a kernel makes each of its values and results once, on its submesh, and then reads it."""
    for kernel in plan.kernels:
        if kernel.make != "ops":  # it only makes zeros or stacks
            continue
        values = {*kernel.rows, *kernel.ins}
        yield from in_order(kernel.ops, values, f"in kernel {kernel.name}")
        for op in kernel.ops:
            if op.mesh != plan.submeshes[kernel.submesh]:
                yield Fault(f"{op} is in kernel {kernel.name} of another submesh", op.source)
        for v in (*kernel.sums, *kernel.outs):
            if v not in values:
                yield Fault(f"kernel {kernel.name} gives {show(v)}, which it does not make", _source(kernel))


def slots_are_where_they_are_used(plan: Plan) -> Iterator[Fault]:
    """Check that a kernel runs on its submesh, with slots of that submesh, and so do the ends of a transfer."""
    for run in plan.runs:
        if plan.kernels[run.kernel].submesh != run.submesh:
            yield _fault(plan, run, "is of another submesh than its kernel")
    for instruction in plan.instructions:
        for slot in (*instruction.ins, *instruction.outs):
            if plan.slots[slot].submesh != instruction.submesh:
                yield _fault(plan, instruction, f"uses s{slot} of submesh {plan.slots[slot].submesh}")


def slots_are_used_in_order(plan: Plan) -> Iterator[Fault]:
    """Check that a slot is written once, but for accumulators, then read, then freed once.

    No result or constant is freed or overwritten, nothing is read that a kernel got as a donation, and each result has
    a slot of its own.
    """
    full, freed, gone = set(plan.initial_slots), set[int](), dict[int, Instruction]()
    never_freed = {slot for place, slot in plan.outputs if place == "slot"} | {slot for _, slot in plan.constants}
    for instruction in plan.instructions:
        is_free, outs = isinstance(instruction, Free), instruction.outs
        kernel = plan.kernels[instruction.kernel] if isinstance(instruction, Run) else None
        grown = instruction.ins[: len(kernel.sums)] if kernel else ()
        for slot in instruction.ins:
            if slot in freed:
                yield _fault(plan, instruction, f"uses s{slot} after it was freed")
            elif not is_free and slot not in full:
                yield _fault(plan, instruction, f"reads s{slot}, which is empty")
            elif not is_free and slot in gone:
                yield _fault(plan, instruction, f"reads s{slot}, which '{gone[slot]}' may have overwritten")
        for slot in outs:
            if slot in full and slot not in grown:
                yield _fault(plan, instruction, f"writes s{slot}, which holds, or held, something else")
        donated = set(plan.donated_by(instruction)) - set(outs) if isinstance(instruction, Run) else set[int]()
        gone.update(dict.fromkeys(donated, instruction))
        freed.update(instruction.ins if is_free else ())
        full.update(outs)
        for slot in never_freed & (set(instruction.ins) if is_free else donated):
            yield _fault(plan, instruction, f"frees or overwrites s{slot}, which is a result or a constant")
    taken = {slot for _, slot in plan.inputs}
    for position, (place, slot) in enumerate(plan.outputs):
        if place == "slot" and slot not in full:
            yield Fault(f"result {position} is s{slot}, which is empty")
        elif place == "slot" and slot in taken:
            yield Fault(f"result {position} is s{slot}, which is another result or an argument")
        elif place == "slot":
            taken.add(slot)
    used = {slot for instruction in plan.instructions for slot in (*instruction.ins, *instruction.outs)}
    yield from (Fault(f"s{slot} is never freed") for slot in sorted(used - freed - never_freed))


def slots_are_of_the_types_of_values(plan: Plan) -> Iterator[Fault]:
    """Check that a kernel's values have the shape and dtype of their slots."""
    for run in plan.runs:
        kernel = plan.kernels[run.kernel]
        ins, outs = _values(kernel)
        if (len(ins), len(outs)) != (len(run.ins), len(run.outs)):
            yield _fault(plan, run, f"has not as many slots as kernel {kernel.name} has values")
        for v, slot in zip((*ins, *outs), (*run.ins, *run.outs), strict=False):
            if v is None:
                continue
            stacked = v in kernel.rows
            shape, dtype = kind(v)
            slot_shape = plan.slots[slot].shape[1:] if stacked else plan.slots[slot].shape
            if (slot_shape, plan.slots[slot].dtype) != (shape, dtype):
                yield _fault(plan, run, f"has {kind(plan.slots[slot])} in s{slot}, not {show(v)}")


def transfers_are_sent_then_received(plan: Plan) -> Iterator[Fault]:
    """Check that each transfer is sent once, and received once after that, as it says itself, as the same types."""
    ends = group((i.transfer, i) for i in plan.instructions if isinstance(i, (Send, Recv)))
    for n, transfer in enumerate(plan.transfers):
        instructions, source, target = ends.pop(n, []), transfer.source, transfer.target
        about = (instructions[0].task, instructions[0].microbatch) if instructions else ("", None)
        want = [Send(source, target, n, transfer.ins, *about), Recv(target, source, n, transfer.outs, *about)]
        if instructions != want or transfer.id != n:
            yield Fault(f"transfer {transfer.id} is not sent, then received: {', '.join(map(str, instructions))}")
        kinds = [[kind(plan.slots[slot]) for slot in slots] for slots in (transfer.ins, transfer.outs)]
        if kinds[0] != kinds[1]:
            yield Fault(f"transfer {transfer.id} of {kinds[0]} arrives as {kinds[1]}")
    yield from (Fault(f"there is no transfer {n}, which '{instructions[0]}' names") for n, instructions in ends.items())


def layouts_fit(plan: Plan) -> Iterator[Fault]:
    """Check that every slot of a plan with layouts has one, on its submesh, whose shards divide its dimensions."""
    if plan.layouts and len(plan.layouts) != len(plan.slots):
        yield Fault(f"{len(plan.slots)} slots have {len(plan.layouts)} layouts")
    for slot, layout in zip(range(len(plan.slots)), plan.layouts, strict=False):
        mesh, shape = plan.submeshes[plan.slots[slot].submesh], plan.slots[slot].shape
        if layout.mesh != mesh:
            yield Fault(f"the layout of s{slot} is on another submesh")
        elif any(shape[d] % specs.size(mesh, axes) for d, axes in specs.decisions(layout.spec, len(shape))):
            yield Fault(f"the layout {layout.spec} of s{slot} does not divide {shape}")


RULES: tuple[Rule, ...] = (
    kernels_are_in_order,
    slots_are_where_they_are_used,
    slots_are_used_in_order,
    slots_are_of_the_types_of_values,
    transfers_are_sent_then_received,
    layouts_fit,
)


def _values(kernel: Kernel) -> tuple[list[ir.Value | None], list[ir.Value]]:
    """Return the values of a kernel's arguments, None for the microbatch number, and of its results.

    For a sum that is the leaf, whose shape and dtype the accumulator has.
    """
    rows = [None, *kernel.rows] if kernel.rows else []
    return [*kernel.sums, *rows, *kernel.ins], [*kernel.sums, *kernel.outs]


def _source(kernel: Kernel) -> Any:
    return next((op.source for op in reversed(kernel.ops)), None)


def _fault(plan: Plan, instruction: Instruction, problem: str) -> Fault:
    """Return a fault of an instruction. Its source is that of the last operation that it runs."""
    source = _source(plan.kernels[instruction.kernel]) if isinstance(instruction, Run) else None
    return Fault(f"'{instruction}' {problem}", source)
