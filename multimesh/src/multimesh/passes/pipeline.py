"""The passes in order. Each is a pure function from one frozen value to the next: a `Program`, its `Parts`, the `Plan`.

`multimesh.jit` runs this list; dumps, documentation and tests show it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.submesh import match_mesh
from multimesh.ir.program import task_meshes
from multimesh.marking.contexts import Options
from multimesh.passes.cutting.cut_fragments import cut_fragments
from multimesh.passes.cutting.number_stages import number_stages
from multimesh.passes.cutting.order_cells import check_states, join_forward_backward, order_cells
from multimesh.passes.cutting.parts import Parts, Pipeline
from multimesh.passes.cutting.recompute_residuals import recompute_residuals
from multimesh.passes.cutting.schedule_cells import replace_schedules, schedule_cells
from multimesh.passes.cutting.split_tasks import split_tasks
from multimesh.passes.cutting.split_weight_gradients import split_weight_gradients
from multimesh.passes.placing.derive_layouts import derive_layouts
from multimesh.passes.placing.note_routes import note_routes
from multimesh.passes.placing.place_operations import place_operations
from multimesh.passes.planning.build_plan import build_plan
from multimesh.passes.planning.fix_layouts import fix_layouts
from multimesh.passes.planning.fold_transposes import fold_transposes
from multimesh.passes.planning.share_gathers import share_gathers
from multimesh.passes.reading.fuse_loops import fuse_loops
from multimesh.passes.reading.inline_calls import inline_calls
from multimesh.passes.reading.separate_sums import separate_sums, widen_sums
from multimesh.passes.trimming.cut_repeats import cut_repeats
from multimesh.passes.trimming.delay_reductions import delay_reductions
from multimesh.passes.trimming.recompute_values import recompute_transfers
from multimesh.plan.plan import Plan
from multimesh.schedules import Schedule
from multimesh.stacked.cut_stacks import cut_stacks
from multimesh.stacked.hoist_slices import hoist_slices
from multimesh.stacked.row_blocks import Stacks, numbers, repeat, split_stacks, spread_numbers


@dataclass(frozen=True, eq=False)
class PassInputs:
    """The inputs of all passes: a traced function with everything that its partition depends on."""

    closed: Any  # jaxpr
    devices: tuple[jax.Device, ...]  # callbacks of `register_task` choose from these
    options: Options  # of the compiler contexts
    home: Mesh | None  # submesh of a function without tasks
    specs: tuple[PartitionSpec | None, ...]  # of each argument leaf; None for one that may be derived
    donated: frozenset[int]  # argument leaves whose buffers may be reused
    replaced: Mapping[int, int]  # result leaf to the argument leaf that it replaces
    out_specs: Mapping[int, PartitionSpec]  # result leaf to the spec that it must have
    homes: tuple[Mesh | None, ...] = ()  # submesh of each argument leaf, if they lie on several
    types: Mapping[int, PartitionSpec] = field(default_factory=dict)  # result leaf to the spec that its type says
    schedules: Mapping[int, Schedule] = field(default_factory=dict)  # number of a loop to another schedule
    processes: Mapping[jax.Device, int] = field(default_factory=dict)  # of devices that stand for those of a job

    def owner(self, device: jax.Device) -> int:
        """Return the process of a device, or of the one that it stands for."""
        return int(self.processes.get(device, device.process_index))

    def in_blocks(self, stacks: Stacks) -> PassInputs:
        """Return these inputs for a program whose stacked arrays are cut into blocks."""
        if not stacks:
            return self
        count = len(self.closed.out_avals)
        arguments, results = numbers(len(self.specs), stacks.arguments), numbers(count, stacks.results)
        return replace(
            self,
            specs=tuple(split_stacks(self.specs, stacks.arguments, repeat)),
            donated=frozenset(n for leaf in self.donated for n in arguments[leaf]),
            replaced=spread_numbers(self.replaced, (count, len(self.specs)), stacks),
            out_specs={n: spec for leaf, spec in self.out_specs.items() for n in results[leaf]},
            types={n: spec for leaf, spec in self.types.items() for n in results[leaf]},
            homes=tuple(split_stacks(self.homes, stacks.arguments, lambda _, stack: (None,) * len(stack.meshes))),
        )


def _inline(_: None, traced: PassInputs) -> ir.Program:
    with _compat.check_version():
        program = inline_calls(traced.closed, traced.devices, traced.specs)
    meshes = dict.fromkeys(task_meshes(program))
    input_homes: dict[ir.Value, Mesh] = {}
    for v, mesh in zip(program.inputs, traced.homes, strict=False):
        home = None if mesh is None else match_mesh(mesh, meshes)
        if home is not None:
            meshes[home], input_homes[v] = None, home
    return replace(program, home=next(iter(meshes), traced.home), input_homes=input_homes)


def _layouts(plan: Plan, traced: PassInputs) -> Plan:
    layouts = fix_layouts(plan, traced.specs, traced.out_specs, traced.types)
    settings = {"options": traced.options, "arguments": traced.specs, "results": traced.out_specs}
    return replace(plan, layouts=layouts, settings=settings, derived={})


def _change_pipelines(change: Callable[[Pipeline], Pipeline]) -> Callable[[Parts, PassInputs], Parts]:
    return lambda parts, _: parts.each_pipeline(change)


PASSES: Mapping[str, Callable[[Any, PassInputs], Any]] = {
    # reading
    "inline_calls": _inline,
    "fuse_loops": lambda program, _: fuse_loops(program),
    "separate_sums": lambda program, _: separate_sums(program),
    "hoist_slices": lambda program, _: hoist_slices(program),
    "widen_sums": lambda program, _: widen_sums(program),
    # placing
    "cut_stacks": lambda program, traced: cut_stacks(program, traced.replaced),
    "place_operations": lambda program, traced: place_operations(program, traced.replaced),
    "note_routes": lambda program, _: note_routes(program),
    "derive_layouts": lambda program, traced: derive_layouts(program, traced.specs),
    # trimming
    "delay_reductions": lambda program, traced: delay_reductions(program, traced.specs),
    "cut_repeats": lambda program, _: cut_repeats(program),
    "recompute_transfers": lambda program, traced: (
        recompute_transfers(program) if traced.options.enable_recomputation else program
    ),
    # cutting
    "replace_schedules": lambda program, traced: replace_schedules(program, traced.schedules),
    "cut_fragments": lambda program, _: cut_fragments(program),
    "number_stages": _change_pipelines(number_stages),
    "schedule_cells": _change_pipelines(schedule_cells),
    "split_weight_gradients": lambda parts, traced: parts.each_pipeline(
        lambda part: split_weight_gradients(part, traced.owner)
    ),
    "split_tasks": lambda parts, traced: split_tasks(
        parts,
        segments=not traced.options.enable_task_fusion or traced.options.only_fuse_loop_tasks,
        loops=not traced.options.enable_task_fusion,
    ),
    "join_forward_backward": lambda parts, traced: (
        parts.each_pipeline(join_forward_backward) if traced.options.enable_task_fusion else parts
    ),
    "recompute_residuals": lambda parts, traced: (
        parts.each_pipeline(recompute_residuals) if traced.options.enable_recomputation else parts
    ),
    "order_cells": _change_pipelines(order_cells),
    "check_states": _change_pipelines(check_states),
    # planning
    "build_plan": lambda parts, traced: build_plan(parts, traced.donated, traced.replaced),
    "fix_layouts": _layouts,
    "fold_transposes": lambda plan, _: fold_transposes(plan),
    "share_gathers": lambda plan, _: share_gathers(plan),
}
"""Every pass by name, in order. Each takes the result of the one before it."""

VERIFY = "MULTIMESH_VERIFY"
"""Environment variable that has the result of each pass checked by `passes.verifying`."""

LAST = [*PASSES][-1]
"""The pass that makes the plan that is compiled."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The result of a pass: an `ir.Program`, its `Parts`, or the `Plan`. ``str`` of it is a dump."""

    name: str
    result: Any

    def __str__(self) -> str:
        return str(self.result)


def run(traced: PassInputs, after: Pass | None = None) -> Iterator[Pass]:
    """Run the passes one at each step of the iterator: all, or those after a pass that has been run."""
    names = [*PASSES]
    result = None if after is None else after.result
    program = result.program if isinstance(result, Parts) else result
    view = traced.in_blocks(Stacks() if program is None else program.stacks)
    for name in names if after is None else names[names.index(after.name) + 1 :]:
        result = PASSES[name](result, view)
        if name == "cut_stacks":
            view = traced.in_blocks(result.stacks)
        if os.environ.get(VERIFY, "0") not in ("", "0"):
            from multimesh.passes import verifying

            verifying.verify(name, result)
        yield Pass(name, result)
