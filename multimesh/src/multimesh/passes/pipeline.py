"""The passes in order. Each is a pure function from one frozen value to the next: a `Program`, its `Parts`, the `Plan`.

`multimesh.jit` runs this list; dumps, documentation and tests show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.row_blocks import Stacks, numbers, repeat, split_stacks
from multimesh.core.submesh import same_or_apart
from multimesh.marking.contexts import Options
from multimesh.passes import verifying
from multimesh.passes.cutting.fragment import cut
from multimesh.passes.cutting.keep_less import keep_less
from multimesh.passes.cutting.order import with_order
from multimesh.passes.cutting.parts import Parts, Pipeline
from multimesh.passes.cutting.schedules import replace_schedules
from multimesh.passes.cutting.stages import number_stages
from multimesh.passes.cutting.states import check_states
from multimesh.passes.cutting.tables import with_table
from multimesh.passes.cutting.turns import join_turns
from multimesh.passes.cutting.unfuse import unfuse
from multimesh.passes.cutting.weights import with_weights_apart
from multimesh.passes.placing.autoshard import autoshard
from multimesh.passes.placing.place import place, task_meshes
from multimesh.passes.placing.route import note_routes
from multimesh.passes.placing.stacks import spread_numbers, stack_leaves
from multimesh.passes.planning.build_plan import build
from multimesh.passes.planning.layouts import fix_layouts
from multimesh.passes.planning.transposes import fold_plan
from multimesh.passes.reading.accumulate import widen_sums
from multimesh.passes.reading.fuse import fuse
from multimesh.passes.reading.inline import inline
from multimesh.passes.reading.separate import separate
from multimesh.passes.reading.slices import hoist_slices
from multimesh.passes.trimming.reductions import delay_reductions
from multimesh.passes.trimming.repeats import cut_repeats
from multimesh.passes.trimming.send_less import send_less
from multimesh.plan.plan import Plan
from multimesh.schedules import Schedule


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function with everything that its partition depends on."""

    closed: Any  # jaxpr
    devices: tuple[jax.Device, ...]  # callbacks of `register_task` choose from these
    options: Options  # of the compiler contexts
    home: Mesh | None  # submesh of a function without tasks
    specs: tuple[PartitionSpec | None, ...]  # of each argument leaf; None for one that may be derived
    donated: frozenset[int]  # argument leaves whose buffers may be reused
    alike: Mapping[int, int]  # result leaf to the argument leaf that it replaces
    out_specs: Mapping[int, PartitionSpec]  # result leaf to the spec that it must have
    homes: tuple[Mesh | None, ...] = ()  # submesh of each argument leaf, if they lie on several
    types: Mapping[int, PartitionSpec] = field(default_factory=dict)  # result leaf to the spec that its type says
    schedules: Mapping[int, Schedule] = field(default_factory=dict)  # number of a loop to another schedule
    processes: Mapping[jax.Device, int] = field(default_factory=dict)  # of devices that stand for those of a job

    def owner(self, device: jax.Device) -> int:
        """Return the process of a device, or of the one that it stands for."""
        return int(self.processes.get(device, device.process_index))

    def in_blocks(self, stacks: Stacks) -> Traced:
        """Return the same for a program with blocks instead of stacks."""
        if not stacks:
            return self
        count = len(self.closed.out_avals)
        arguments, results = numbers(len(self.specs), stacks.arguments), numbers(count, stacks.results)
        return replace(
            self,
            specs=tuple(split_stacks(self.specs, stacks.arguments, repeat)),
            donated=frozenset(n for leaf in self.donated for n in arguments[leaf]),
            alike=spread_numbers(self.alike, (count, len(self.specs)), stacks),
            out_specs={n: spec for leaf, spec in self.out_specs.items() for n in results[leaf]},
            types={n: spec for leaf, spec in self.types.items() for n in results[leaf]},
            homes=tuple(split_stacks(self.homes, stacks.arguments, lambda _, stack: (None,) * len(stack.meshes))),
        )


def _inline(_: None, traced: Traced) -> ir.Program:
    with _compat.check_version():
        program = inline(traced.closed, traced.devices, traced.specs)
    known = dict.fromkeys(task_meshes(program))
    given: dict[ir.Value, Mesh] = {}
    for v, mesh in zip(program.inputs, traced.homes, strict=False):
        found = None if mesh is None else same_or_apart(mesh, known)
        if found is not None:
            known[found], given[v] = None, found
    return replace(program, home=next(iter(known), traced.home), given=given)


def _layouts(plan: Plan, traced: Traced) -> Plan:
    layouts = fix_layouts(plan, traced.specs, traced.out_specs, traced.types)
    settings = {"options": traced.options, "arguments": traced.specs, "results": traced.out_specs}
    return replace(plan, layouts=layouts, settings=settings, derived={})


def _each(change: Callable[[Pipeline], Pipeline]) -> Callable[[Parts, Traced], Parts]:
    return lambda parts, _: parts.each_pipeline(change)


PASSES: Mapping[str, Callable[[Any, Traced], Any]] = {
    # reading
    "inline": _inline,
    "fuse": lambda program, _: fuse(program),
    "separate": lambda program, _: separate(program),
    "slices": lambda program, _: hoist_slices(program),
    "accumulate": lambda program, _: widen_sums(program),
    # placing
    "stacks": lambda program, traced: stack_leaves(program, traced.alike),
    "place": lambda program, traced: place(program, traced.alike),
    "route": lambda program, _: note_routes(program),
    "autoshard": lambda program, traced: autoshard(program, traced.specs),
    # trimming
    "reductions": lambda program, traced: delay_reductions(program, traced.specs),
    "repeats": lambda program, _: cut_repeats(program),
    "send_less": lambda program, traced: send_less(program) if traced.options.enable_recomputation else program,
    # cutting
    "schedules": lambda program, traced: replace_schedules(program, traced.schedules),
    "fragment": lambda program, _: cut(program),
    "stages": _each(number_stages),
    "tables": _each(with_table),
    "weights": lambda parts, traced: parts.each_pipeline(lambda part: with_weights_apart(part, traced.owner)),
    "keep_less": lambda parts, traced: parts.each_pipeline(keep_less) if traced.options.enable_recomputation else parts,
    "turns": _each(join_turns),
    "order": _each(with_order),
    "unfuse": lambda parts, traced: unfuse(
        parts,
        segments=not traced.options.enable_task_fusion or traced.options.only_fuse_loop_tasks,
        loops=not traced.options.enable_task_fusion,
    ),
    "states": _each(check_states),
    # planning
    "build_plan": lambda parts, traced: build(parts, traced.donated, traced.alike),
    "layouts": _layouts,
    "transposes": lambda plan, _: fold_plan(plan),
}
"""Every pass by name, in order. Each takes the value that the one before it made, and has a file of its name."""

LAST = [*PASSES][-1]
"""The pass that makes the plan that is compiled."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The result of a pass: an `ir.Program`, its `Parts`, or the `Plan`. ``str`` of it is a dump."""

    name: str
    made: Any

    def __str__(self) -> str:
        return str(self.made)


def _stacks_of(made: Any) -> Stacks:
    program = made.program if isinstance(made, Parts) else made
    return program.stacks if program is not None else Stacks()


def run(traced: Traced, after: Pass | None = None) -> Iterator[Pass]:
    """Run the passes, one at each step of the iterator: all, or those after a pass that has been run.

    Under ``MULTIMESH_VERIFY=1`` check what each made.
    """
    names = [*PASSES]
    made = None if after is None else after.made
    seen = traced.in_blocks(_stacks_of(made))
    for name in names if after is None else names[names.index(after.name) + 1 :]:
        made = PASSES[name](made, seen)
        if name == "stacks":
            seen = traced.in_blocks(made.stacks)
        if verifying.is_enabled():
            verifying.verify(name, made)
        yield Pass(name, made)
