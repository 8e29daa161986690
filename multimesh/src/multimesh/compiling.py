"""Kernels to XLA programs: layouts are fixed slot by slot, programs are compiled once and in parallel."""

from __future__ import annotations

import concurrent.futures
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import _compat, checks, ir
from multimesh.errors import MultiMeshError, internal_error
from multimesh.passes.transposes import fold_transposes
from multimesh.plan import Instruction, Kernel, Plan
from multimesh.submesh import carry_over, describe, translate


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan with its programs and the layout of every slot."""

    plan: Plan
    programs: tuple[Any, ...]  # jax.stages.Compiled, one per kernel
    layouts: tuple[NamedSharding, ...]  # one per slot


def compile_plan(
    plan: Plan,
    specs: Sequence[PartitionSpec],
    out_specs: Mapping[int, PartitionSpec] | None = None,
    options: Mapping[str, Any] | None = None,
    derived: Mapping[tuple[int, int], PartitionSpec] | None = None,
) -> CompiledPlan:
    """Compile every kernel of a plan.

    Parameters
    ----------
    plan
        The plan.
    specs
        Partition spec of each argument leaf, carried over to each submesh that reads it.
    out_specs
        Result leaf to the spec that it must have.
    options
        Compiler options for XLA; `with_defaults` says what they are where they are not given.
    derived
        (argument leaf, submesh) to the spec that it has there instead.
    """
    return _Compiler(plan, specs, out_specs or {}, with_defaults(plan, options), derived or {}).run()


def cores() -> int:
    """Cores that this process may use: its share, where launchers bind no cores to the processes of a node."""
    every = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if mine < every:
        return mine
    given = (os.environ.get(name, "") for name in _ON_THIS_NODE)
    return max(1, mine // next((int(n) for n in given if n.isdecimal() and int(n)), 1))


# Processes of this job on this node, as Open MPI, MPICH and Slurm (for one node, or with --ntasks-per-node) say it.
_ON_THIS_NODE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")


def with_defaults(plan: Plan, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Compiler options with what a plan on CPUs gets unless they or ``XLA_FLAGS`` say otherwise.

    LLVM's level 2: level 3 unrolls loops of up to 32 iterations whole, before it looks for dependences between all
    pairs of their accesses. That is a quarter of the compile time of a plan, and the code is no faster.

    No threads within a device's program where each submesh alone has a device for every core: there is no core left
    that they could use, and handing them work costs more than it takes.
    """
    chosen = {} if options is None else dict(checks.pairs("compile: compiler_options", options))
    if any(d.platform != "cpu" for mesh in plan.submeshes for d in mesh.devices.flat):
        return chosen
    defaults: dict[str, Any] = {"xla_backend_optimization_level": 2}
    if all(mesh.size >= cores() for mesh in plan.submeshes):
        defaults["xla_cpu_multi_thread_eigen"] = False
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in defaults.items() if name not in flags} | chosen


def argument_spec(
    plan: Plan,
    specs: Sequence[PartitionSpec],
    derived: Mapping[tuple[int, int], PartitionSpec],
    arg: int,
    slot: int,
) -> PartitionSpec:
    """Spec of an argument leaf on the submesh of a slot."""
    return derived.get((arg, plan.slots[slot].submesh), specs[arg])


class _Compiler:
    def __init__(
        self,
        plan: Plan,
        specs: Sequence[PartitionSpec],
        out_specs: Mapping[int, PartitionSpec],
        options: dict[str, Any],
        derived: Mapping[tuple[int, int], PartitionSpec],
    ):
        self._plan = plan
        self._options = options
        self._layouts: dict[int, NamedSharding] = {}
        self._pinned: dict[int, NamedSharding] = {}
        self._jitted: dict[int, Any] = {}
        for arg, slot in plan.inputs:
            self._layouts[slot] = plan.layout(slot, argument_spec(plan, specs, derived, arg, slot))
        for _, slot in plan.constants:
            self._layouts[slot] = plan.layout(slot, PartitionSpec())
        for slot, args in plan.like.items():
            given = [argument_spec(plan, specs, derived, a, slot) for a in args]
            agreed = {plan.layout(slot, spec) for spec in given or [PartitionSpec()]}
            if len(agreed) == 1:
                self._pinned[slot] = agreed.pop()
        zeros = {k for k, kernel in enumerate(plan.kernels) if kernel.make == "zeros"}
        accumulators = {s for step in plan.instructions if step.kernel in zeros for s in step.outs}
        runs = [step for step in plan.instructions if step.kind == "RUN" and step.microbatch is not None]
        states = {s for step in runs for s in step.outs} - accumulators  # these keep one layout in all microbatches
        for position, spec in out_specs.items():
            kind, slot = plan.outputs[position]
            if kind == "slot" and slot not in self._layouts and slot not in states:
                self._pinned[slot] = plan.layout(slot, spec)
        for slot in {s for step in plan.instructions if step.kind == "RUN" for s in step.outs} - set(self._pinned):
            if plan.submeshes[plan.slots[slot].submesh].size == 1 or slot in accumulators:
                self._pinned[slot] = plan.layout(slot, PartitionSpec())
        self._received = {to: of for t in plan.transfers for of, to in zip(t.ins, t.outs, strict=True)}

    def _layout(self, slot: int) -> NamedSharding | None:
        """Layout of a slot, as far as it is known yet."""
        if slot not in self._layouts and slot in self._pinned:
            return self._pinned[slot]
        if slot not in self._layouts and slot in self._received:
            sent = self._layout(self._received[slot])
            if sent is not None:
                self._layouts[slot] = self._plan.layout(slot, sent.spec)
        return self._layouts.get(slot)

    def run(self) -> CompiledPlan:
        """Lower in this thread as soon as the layouts of the inputs are known; compile in a pool."""
        uses: dict[int, list[Instruction]] = {}
        for step in self._plan.instructions:
            if step.kind == "RUN" and step.kernel is not None:
                uses.setdefault(step.kernel, []).append(step)
        waiting = list(uses)
        programs: dict[int, Any] = {}
        first_of: dict[Any, int] = {}  # what determines a program's code to the kernel that is compiled for it
        followers: dict[int, list[tuple[int, Any]]] = {}
        with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
            running: dict[concurrent.futures.Future[Any], int] = {}
            try:
                while waiting or running:
                    for kernel in list(waiting):
                        layouts = [self._layout(s) for s in uses[kernel][0].ins]
                        if None in layouts:
                            continue
                        waiting.remove(kernel)
                        lowered = self._lower(kernel, uses[kernel][0], layouts)
                        first = first_of.setdefault(self._identity(kernel, lowered), kernel)
                        if first == kernel:
                            running[pool.submit(self._compile, kernel, lowered)] = kernel
                        elif first in programs:
                            running[pool.submit(self._alike, programs[first], kernel, lowered)] = kernel
                        else:
                            followers.setdefault(first, []).append((kernel, lowered))
                    if not running:
                        stuck = ", ".join(self._plan.kernels[k].name for k in waiting)
                        raise internal_error(f"no layout for the inputs of {stuck}")
                    done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in done:
                        kernel = running.pop(future)
                        programs[kernel] = future.result()
                        self._note_results(programs[kernel], uses[kernel])
                        for other, lowered in followers.pop(kernel, ()):
                            running[pool.submit(self._alike, programs[kernel], other, lowered)] = other
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        layouts = [self._layout(slot) for slot in range(len(self._plan.slots))]
        return CompiledPlan(self._plan, tuple(programs[k] for k in range(len(programs))), tuple(layouts))

    def _compile(self, kernel: int, lowered: Any) -> Any:
        return _compat.finished(lowered.compile(self._options), lowered, self._mesh(kernel), self._jitted[kernel])

    def _mesh(self, kernel: int) -> Mesh:
        return self._plan.submeshes[self._plan.kernels[kernel].submesh]

    def _identity(self, kernel: int, lowered: Any) -> Any:
        """Equal for kernels of different submeshes that may share one compilation."""
        return _compat.program_text(lowered, self._mesh(kernel)) or kernel

    def _alike(self, compiled: Any, kernel: int, lowered: Any) -> Any:
        """The program of a kernel of which an equal one was compiled for another submesh."""
        shared = _compat.on_other_devices(compiled, lowered, self._mesh(kernel), self._options)
        return shared or self._compile(kernel, lowered)

    def _lower(self, number: int, step: Instruction, layouts: Sequence[NamedSharding | None]) -> Any:
        kernel = self._plan.kernels[number]
        given = [
            jax.ShapeDtypeStruct(self._plan.slots[slot].shape, self._plan.slots[slot].dtype, sharding=_auto(layout))
            for slot, layout in zip(step.ins, layouts, strict=True)
        ]
        pinned = [self._pinned.get(slot) for slot in step.outs]
        if not given:
            pinned = [p or self._plan.layout(s, PartitionSpec()) for p, s in zip(pinned, step.outs, strict=True)]
        jitted = jax.jit(
            kernel_function(kernel, self._plan),
            out_shardings=[_auto(layout) for layout in pinned],
            donate_argnums=self._plan.donations.get(number, ()),
            keep_unused=True,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            try:
                self._jitted[number] = jitted
                return jitted.lower(*given)
            except MultiMeshError:
                raise
            except Exception as error:
                where = (kernel.ops and _compat.user_line(kernel.ops[-1].source)) or kernel.name
                raise MultiMeshError(f"{where}: {kernel.name!r} can't be lowered for its submesh: {error}") from error

    def _note_results(self, program: Any, steps: Sequence[Instruction]) -> None:
        mesh = self._plan.submeshes[steps[0].submesh]
        for position, sharding in enumerate(program.output_shardings):
            spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            # What jax.checkpoint offloads to the host stays there until its backward reads it.
            layout = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
            for step in steps:
                self._layouts.setdefault(step.outs[position], layout)


def _auto(layout: NamedSharding | None) -> NamedSharding | None:
    """The same layout on the Auto twin of its mesh, which programs are lowered for."""
    if layout is None or layout.mesh == _compat.auto(layout.mesh):
        return layout
    return NamedSharding(_compat.auto(layout.mesh), layout.spec, memory_kind=layout.memory_kind)


def first_invalid(kernel: Kernel, plan: Plan, args: Sequence[Any], invalid: Callable[[Any], Any]) -> ir.Op | None:
    """The first operation of a kernel, run on its own, with an invalid result; None where the arguments are gone."""
    mesh = plan.submeshes[kernel.submesh]
    counts = len(kernel.sums), len(kernel.rows)
    given = args[counts[0] :]
    if any(x.is_deleted() for x in given):
        return None
    env: dict[ir.Value, Any] = {}
    if kernel.rows:
        number, *rows = given[: 1 + counts[1]]
        given = given[1 + counts[1] :]
        env.update(zip(kernel.rows, (row[int(number)] for row in rows), strict=True))
    env.update(zip(kernel.ins, given, strict=True))
    for op in kernel.ops:
        reads = list(op.reads)

        def alone(*values: Any, op: ir.Op = op, reads: Sequence[ir.Value] = reads) -> list[Any]:
            inner = dict(zip(reads, values, strict=True))
            with _compat.abstract_mesh_context(mesh):
                evaluate((op,), inner, mesh)
            return [inner[o] for o in op.outs]

        results = jax.jit(alone)(*(env[v] for v in reads))
        env.update(zip(op.outs, results, strict=True))
        if any(jnp.issubdtype(x.dtype, jnp.inexact) and bool(invalid(x).any()) for x in results):
            return op
    return None


def kernel_function(kernel: Kernel, plan: Plan) -> Callable[..., list[Any]]:
    """Function of flat arrays that a kernel stands for: see `Kernel` for its arguments and results."""
    mesh = plan.submeshes[kernel.submesh]

    def zeros() -> list[Any]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in kernel.outs]

    def stack(*rows: Any) -> list[Any]:
        return [jnp.stack(rows)]

    def ops(*args: Any) -> list[Any]:
        left = list(args)
        sums = [left.pop(0) for _ in kernel.sums]
        env: dict[ir.Value, Any] = {}
        if kernel.rows:
            number = left.pop(0)
            for v in kernel.rows:
                env[v] = lax.dynamic_index_in_dim(left.pop(0), number, 0, keepdims=False)
        env.update(zip(kernel.ins, left, strict=True))
        evaluate(fold_transposes(kernel.ops, (*kernel.sums, *kernel.outs)), env, mesh)
        return [
            *(lax.add(total, env[leaf]) for total, leaf in zip(sums, kernel.sums, strict=True)),
            *(_compat.typed_as(env[v], v.aval) for v in kernel.outs),
        ]

    def in_mesh(*args: Any) -> list[Any]:
        with _compat.abstract_mesh_context(mesh):
            return {"ops": ops, "zeros": zeros, "stack": stack}[kernel.make](*args)

    return _compat.named(in_mesh, "".join(c if c.isalnum() else "_" for c in kernel.name))


def evaluate(ops: Sequence[ir.Op], env: dict[ir.Value, Any], mesh: Mesh) -> None:
    """Evaluate operations in order on ``mesh``; ``env`` holds the values and receives the results."""
    for op in ops:
        args = [env[i] if isinstance(i, ir.Value) else i.val for i in op.ins]
        results = _constrained(op, args) if op.prim is _compat.sharding_constraint_p else None
        if results is None:
            results = _compat.bind(op.prim, op.params, op.ctx, args, mesh)
        env.update(zip(op.outs, results, strict=True))


def _axes(spec: PartitionSpec) -> list[str]:
    entries = [(e,) if isinstance(e, str) else e for e in spec if e is not PartitionSpec.UNCONSTRAINED]
    return [axis for entry in entries if entry is not None for axis in entry]


def _constrained(op: ir.Op, args: Sequence[Any]) -> Sequence[Any] | None:
    """A sharding constraint on the submesh where the operation landed; None for what has no axes to translate."""
    if op.params.get("identity"):
        return args
    (x,) = args
    if op.mesh is None:
        return args
    mesh = _compat.auto(op.mesh)
    if "logical" in op.params:
        spec = op.params["logical"]
        if op.task is None or len(spec) > x.ndim or op.params["rank"] != x.ndim:
            return args  # batched by vmap: the layout of the new dimension is the compiler's choice
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, translate(spec, op.task)))]
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    lost = [axis for axis in _axes(sharding.spec) if axis not in mesh.axis_names]
    if lost:
        warnings.warn(
            f"{_compat.user_line(op.source)}: a sharding constraint names axis {lost[0]!r}, which submesh "
            f"{describe(mesh)} does not have, so that its dimension is replicated there; name an axis of the submesh, "
            "or a logical axis with multimesh.with_sharding_constraint",
            stacklevel=2,
        )
    return [lax.with_sharding_constraint(x, carry_over(sharding.spec, x.shape, mesh))]
