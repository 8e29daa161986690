"""The passes in order: what `multimesh.jit` runs, and what dumps, documentation and tests show.

Each is a pure function from one frozen value that prints to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.ir.program import LoopMark
from multimesh.marking.contexts import Options
from multimesh.passes import verifying
from multimesh.passes.cutting.arrange import arrange, cut
from multimesh.passes.laying_out.autoshard import derive
from multimesh.passes.laying_out.planning import build
from multimesh.passes.laying_out.propagate import fix_layouts
from multimesh.passes.laying_out.reductions import delay_reductions
from multimesh.passes.placing.follow import Homes
from multimesh.passes.placing.place import has_tasks, place, task_meshes
from multimesh.passes.reading.inline import inline
from multimesh.passes.reading.loops import fuse, separate
from multimesh.passes.reading.slices import slices_outside
from multimesh.schedules import Schedule


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function and all that its partition depends on.

    Attributes
    ----------
    closed
        Its jaxpr.
    devices
        Those that callbacks of `register_task` choose from.
    options
        Of the compiler contexts.
    home
        Submesh of a function without tasks.
    specs
        Partition spec of each argument leaf; None for one that may be derived.
    donated
        Argument leaves whose buffers may be reused.
    alike
        Result leaf to the argument leaf that it replaces.
    out_specs
        Result leaf to the partition spec that it must have.
    schedules
        Number of a loop to the schedule that it has in place of its own.
    """

    closed: Any
    devices: tuple[jax.Device, ...]
    options: Options
    home: Mesh | None
    specs: tuple[PartitionSpec | None, ...]
    donated: frozenset[int]
    alike: Mapping[int, int]
    out_specs: Mapping[int, PartitionSpec]
    schedules: Mapping[int, Schedule] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass made: an `ir.Program`, parts of it, or the `Plan`. ``str`` of it is a dump.

    A placed program comes with ``homes``: the submesh of every value that it makes.
    """

    name: str
    made: Any
    homes: Homes | None = None

    def __str__(self) -> str:
        return "\n\n".join(filter(None, map(str, self.made))) if isinstance(self.made, Sequence) else str(self.made)


def run(traced: Traced) -> Iterator[Pass]:
    """Run every pass, one at each step of the iterator; under ``MULTIMESH_VERIFY=1`` check what it made."""
    yield from _verified(_run(traced))


def ordered(traced: Traced, program: ir.Program, homes: Homes | None) -> Iterator[Pass]:
    """Run the passes from that on which orders the loops, on what the pass ``reductions`` made."""
    yield from _verified(_order(traced, program, homes or {}))


def loops(program: ir.Program) -> list[ir.Loop]:
    """Loops of a program, in the order of their numbers."""
    return [item for item in program.items if isinstance(item, ir.Loop)]


def _verified(passes: Iterator[Pass]) -> Iterator[Pass]:
    for done in passes:
        if verifying.enabled():
            verifying.verify(done.name, done.made, done.homes)
        yield done


def _run(traced: Traced) -> Iterator[Pass]:
    with _compat.tried_version():
        program = inline(traced.closed, traced.devices, traced.specs)
    yield Pass("inline", program)
    home = next(iter(task_meshes(program)), traced.home)  # where the results of all tasks are unused
    program = fuse(program)
    yield Pass("fuse", program)
    program = separate(program)
    yield Pass("separate", program)
    program = slices_outside(program)
    yield Pass("slices", program)
    program, homes = place(program, None if has_tasks(program) else home, traced.alike)
    yield Pass("place", program, homes)
    given = {v: spec for v, spec in zip(program.inputs, traced.specs, strict=True) if spec is not None}
    program = delay_reductions(program, homes, given)
    yield Pass("reductions", program, homes)
    yield from _order(traced, program, homes)


def _order(traced: Traced, program: ir.Program, homes: Homes) -> Iterator[Pass]:
    if traced.schedules:
        number = {loop: n for n, loop in enumerate(loops(program))}

        def mark(loop: ir.Loop) -> LoopMark:
            return replace(loop.mark, schedule=traced.schedules.get(number[loop], loop.mark.schedule))

        items = (replace(i, mark=mark(i)) if isinstance(i, ir.Loop) else i for i in program.items)
        program = replace(program, items=tuple(items))
    fragments = cut(program, traced.options)
    yield Pass("fragment", fragments)
    parts = arrange(fragments, traced.options)
    yield Pass("order", parts)
    plan = build(program, homes, parts, traced.donated, traced.alike)
    yield Pass("planning", plan)
    derived = derive(plan, program, traced.specs)
    layouts = fix_layouts(plan, traced.specs, traced.out_specs, derived)
    settings = {"options": traced.options, "arguments": traced.specs, "results": traced.out_specs}
    yield Pass("layouts", replace(plan, layouts=layouts, settings=settings))
