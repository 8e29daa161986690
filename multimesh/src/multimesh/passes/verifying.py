"""Invariants of a program, its parts and its plan after every pass: one function a rule.

A rule takes what a pass made and yields a `Fault` for each place where that is broken. Nothing here changes anything.
Set ``MULTIMESH_VERIFY=1`` to run the rules after every pass; otherwise none of them costs anything. A fault is a bug of
MultiMesh, never of the user: the error names the pass, the value and the user's line, and asks for a report.

A rule of the plan refuses a fragment that reads a value which nothing gives in any case: no rule before it does.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from multimesh import ir
from multimesh.core import _compat, specs
from multimesh.core.grouping import group
from multimesh.core.submesh import describe
from multimesh.errors import internal_error
from multimesh.ir.program import all_ops
from multimesh.passes.cutting.parts import Parts, Pipeline
from multimesh.passes.placing.derive_layouts import edges_of
from multimesh.plan.instructions import Free, Instruction, Kernel, Recv, Run, Send
from multimesh.plan.plan import Plan


@dataclass(frozen=True)
class Fault:
    """A broken rule: ``message`` names the value, ``source`` is that of the operation, or the line of a loop."""

    message: str
    source: Any = None


def kind(of: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of a value, literal or slot."""
    aval = getattr(of, "aval", of)
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def show(of: Any) -> str:
    """Format a value or literal with its type."""
    text = of.aval.str_short(short_dtypes=True) if hasattr(of.aval, "str_short") else str(of.aval)
    return f"{of}:{text}"


def in_order(ops: Iterable[ir.Op], values: set[ir.Value], where: str) -> Iterator[Fault]:
    """Yield faults of operations that read a value not among ``values``, or make one of these; add their results."""
    for op in ops:
        for v in op.needs:
            if v not in values:
                yield Fault(f"{op.prim.name} reads {show(v)} {where}, before anything makes it", op.source)
        for v in op.outs:
            if v in values:
                yield Fault(f"{show(v)} is made twice", op.source)
            values.add(v)


def values_are_made_once_then_read(program: ir.Program) -> Iterator[Fault]:
    """Check that each value has one producer, and that operations, loops and results read only earlier values."""
    values = {*program.inputs, *program.consts}
    for item in program.items:
        if isinstance(item, ir.Op):
            yield from in_order([item], values, "outside of loops")
            continue
        for v in item.reads:
            if v not in values:
                yield Fault(f"a loop reads {show(v)} before anything makes it", item.mark.where)
        inner = {*item.consts, *item.slices, *item.linked, *item.carries, *program.consts}
        yield from in_order(item.ops, inner, "in a loop")
        values.update(item.outs)
    for v in ir.values(program.outputs):
        if v not in values:
            yield Fault(f"result {show(v)} is made by nothing")


def edges_are_of_one_type(program: ir.Program) -> Iterator[Fault]:
    """Check that both sides of a loop's edge have one type; stacks have one dimension more."""
    for loop in program.loops:
        edges = [*edges_of(loop), *((s.init, s.out, 0) for s in loop.sums if s.init is not None and not s.over)]
        for inner, outer, rows in edges:
            shape, dtype = kind(inner)
            if outer is not None and kind(outer) != ((*(loop.mark.count,) * rows, *shape), dtype):
                yield Fault(f"{show(inner)} inside a loop is {show(outer)} outside", loop.mark.where)


def tasks_are_at_home(program: ir.Program) -> Iterator[Fault]:
    """Check that an operation of a task is on the task's submesh. ``recompute_transfers`` repeats some elsewhere."""
    for op in all_ops(program):
        if op.mesh is not None and op.task is not None and op.task.mesh != op.mesh:
            yield Fault(f"{op} of task {op.task.name!r} is on {describe(op.mesh)}", op.source)


def leaves_are_given(parts: Parts) -> Iterator[Fault]:
    """Check that every sum, stack and carry of an iteration is given by one of its fragments."""
    for part in parts.parts:
        if isinstance(part, Pipeline):
            outs = {v for fragment in part.fragments for v in fragment.outs}
            for leaf in part.loop.leaves:
                if leaf not in outs:
                    yield Fault(f"no fragment gives {leaf}, a result of an iteration", part.loop.mark.where)


def cells_run_once(parts: Parts) -> Iterator[Fault]:
    """Check that an ordered loop runs each of its fragments once for each microbatch."""
    for part in parts.parts:
        if isinstance(part, Pipeline) and part.cells:
            times = collections.Counter(part.cells)
            for n, f in enumerate(part.fragments):
                for k in range(part.loop.mark.count):
                    if times.pop((n, k), 0) != 1:
                        yield Fault(f"{f.phase}{f.stage} does not run once for microbatch {k}")
            yield from (Fault(f"a cell {cell} of no fragment or microbatch") for cell in times)


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
    """Check that a slot is written once, then read, then freed, no result is overwritten, and each has its own slot."""
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
        rows = [None, *kernel.rows] if kernel.rows else []  # the number of the microbatch has no value
        ins, outs = [*kernel.sums, *rows, *kernel.ins], [*kernel.sums, *kernel.outs]
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


def _source(kernel: Kernel) -> Any:
    return next((op.source for op in reversed(kernel.ops)), None)


def _fault(plan: Plan, instruction: Instruction, problem: str) -> Fault:
    """Return a fault of an instruction. Its source is that of the last operation that it runs."""
    source = _source(plan.kernels[instruction.kernel]) if isinstance(instruction, Run) else None
    return Fault(f"'{instruction}' {problem}", source)


RULES: Mapping[type, tuple[Callable[[Any], Iterator[Fault]], ...]] = {
    ir.Program: (values_are_made_once_then_read, edges_are_of_one_type, tasks_are_at_home),
    Parts: (leaves_are_given, cells_run_once),
    Plan: (
        kernels_are_in_order,
        slots_are_where_they_are_used,
        slots_are_used_in_order,
        slots_are_of_the_types_of_values,
        transfers_are_sent_then_received,
        layouts_fit,
    ),
}


def verify(name: str, result: Any) -> None:
    """Raise an error for the first rule that an `ir.Program`, its `Parts` or a `Plan` breaks after a pass."""
    for rule, fault in faults(name, result):
        line = (
            fault.source if isinstance(fault.source, str) else _compat.user_line(fault.source) if fault.source else ""
        )
        raise internal_error(
            f"pass {name!r} broke the rule {rule!r}: {fault.message}{f'; it comes from {line}' if line else ''}"
        )


def faults(name: str, result: Any) -> Iterator[tuple[str, Fault]]:
    """Yield each fault of a pass's result, with the name of the rule."""
    copied = name in ("recompute_transfers", "replace_schedules")  # operations of tasks, to where they are read
    for rule in RULES[type(result)]:
        if not copied or rule is not tasks_are_at_home:
            yield from ((rule.__name__, fault) for fault in rule(result))
