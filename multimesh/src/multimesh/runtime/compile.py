"""Compilation of the kernels of a plan, each once, several at a time."""

from __future__ import annotations

import concurrent.futures
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat, checks
from multimesh.core._compat import executables
from multimesh.core.progress import progress
from multimesh.core.submesh import describe
from multimesh.errors import MultiMeshError, UsageError
from multimesh.ir.evaluate import evaluate
from multimesh.marking.tracing import compiling
from multimesh.plan.instructions import Kernel, Run
from multimesh.plan.plan import Plan
from multimesh.processes.arrays import here
from multimesh.runtime.compile_options import cores, for_kernel, with_defaults


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan with its compiled kernels."""

    plan: Plan
    executables: tuple[Any, ...]  # jax.stages.Compiled, one per kernel; None for those of other processes
    seconds: tuple[float, ...] = ()  # of the compilation of each kernel; 0 if an equal one was compiled before it


def compile_plan(plan: Plan, options: Mapping[str, Any] | None = None) -> CompiledPlan:
    """Compile the kernels that run on devices of this process.

    `with_defaults` and `for_kernel` add to the options for XLA.

    The plan fixes the layouts of inputs and outputs, so that no kernel waits for another. Equal kernels of different
    submeshes share one compilation where `executables.code_key` allows it.
    """
    extra = dict(checks.pairs("compile: compiler_options", options or {}))
    shared = with_defaults(plan, extra)
    absent = not exists(plan)
    cached = executables.has_cache() and not absent
    groups: dict[Any, list[_LoweredKernel]] = {}  # key of the code to the kernels with that code
    runs = {
        number: run
        for number, run in plan.first_runs.items()
        if here(plan.submeshes[run.submesh].devices.flat) or absent
    }
    with progress("compiling kernels", len(runs)) as done, concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        try:
            running: dict[int, concurrent.futures.Future[tuple[Any, float]]] = {}
            for number, run in runs.items():
                kernel = _lower(plan, run, for_kernel(plan, run.kernel, shared))
                # Kernels of the cache are not shared, so nobody asks for their programs.
                program = None if cached else executables.program_of(kernel.lowered, kernel.mesh)
                group = groups.setdefault(executables.code_key(program, kernel.mesh) or number, [])
                group.append(kernel)
                if len(group) == 1:
                    running[number] = pool.submit(kernel.compile)
                    running[number].add_done_callback(lambda _: done())
            for first, *others in groups.values():
                for kernel in others:
                    running[kernel.number] = pool.submit(kernel.moved, running[first.number].result()[0])
                    running[kernel.number].add_done_callback(lambda _: done())
            compiled = {number: future.result() for number, future in running.items()}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    _compat.forget_pruned()
    numbers = range(len(plan.kernels))
    results = [compiled.get(number, (None, 0.0)) for number in numbers]
    made_here, seconds = (tuple(result[n] for result in results) for n in range(2))
    return CompiledPlan(plan, made_here, seconds)


@dataclass(frozen=True, eq=False)
class _LoweredKernel:
    """A kernel that was lowered for its submesh, and its options for XLA."""

    number: int
    mesh: Mesh
    options: dict[str, Any]
    jitted: Any
    lowered: Any

    def compile(self) -> tuple[Any, float]:
        """Return the executable, and the seconds of its compilation."""
        begin = time.perf_counter()
        compiled = self.lowered.compile(self.options)
        took = time.perf_counter() - begin
        return executables.finish(compiled, self.lowered, self.mesh, self.jitted), took

    def moved(self, compiled: Any) -> tuple[Any, float]:
        """Return the executable, from an equal kernel that was compiled for another submesh, or else compiled."""
        moved = executables.on_other_devices(compiled, self.lowered, self.mesh, self.options)
        return (moved, 0.0) if moved else self.compile()


def _lower(plan: Plan, run: Run, options: dict[str, Any]) -> _LoweredKernel:
    number, kernel = run.kernel, plan.kernels[run.kernel]
    structs = [
        jax.ShapeDtypeStruct(plan.slots[slot].shape, plan.slots[slot].dtype, sharding=_auto(plan.layouts[slot]))
        for slot in run.ins
    ]
    jitted = jax.jit(
        kernel_function(kernel, plan),
        out_shardings=[_auto(plan.layouts[slot]) for slot in run.outs],
        donate_argnums=plan.donations.get(number, ()),
        keep_unused=True,
    )
    with warnings.catch_warnings(), compiling():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        try:
            return _LoweredKernel(number, plan.submeshes[kernel.submesh], options, jitted, jitted.lower(*structs))
        except MultiMeshError:
            raise
        except Exception as error:
            where = (kernel.ops and _compat.user_line(kernel.ops[-1].source)) or kernel.name
            if remedy := _compat.remedy_of_sizes(error):
                raise UsageError(f"{where}: in {kernel.name!r} {remedy}. JAX says: {error}") from None
            if "incompatible devices" in str(error):
                line = re.search(r" at (\S+:\d+):\d+ \(", str(error))
                raise UsageError(
                    f"{line[1] if line else where}: in {kernel.name!r} an operation names devices of another submesh "
                    f"than {describe(plan.submeshes[kernel.submesh])}; leave mesh= out of jax.shard_map, which takes "
                    "the submesh from its context, and give a PartitionSpec in place of a NamedSharding. JAX says: "
                    f"{error}"
                ) from None
            raise MultiMeshError(f"{where}: {kernel.name!r} can't be lowered for its submesh: {error}") from error


def exists(plan: Plan) -> bool:
    """Return whether the devices of a plan are there, and not only those of a topology to compile for."""
    return not any(_compat.is_compile_only(device) for mesh in plan.submeshes for device in mesh.devices.flat)


def _auto(layout: Any) -> Any:
    """Return a layout with Auto axes in place of Explicit ones. Kernels are lowered for that."""
    if not isinstance(layout, NamedSharding) or layout.mesh == _compat.auto(layout.mesh):
        return layout
    return NamedSharding(_compat.auto(layout.mesh), layout.spec, memory_kind=layout.memory_kind)


def first_invalid(kernel: Kernel, plan: Plan, args: Sequence[Any], invalid: Callable[[Any], Any]) -> ir.Op | None:
    """Run the operations of a kernel one by one, up to the first invalid result; None where the arguments are gone."""
    mesh = plan.submeshes[kernel.submesh]
    if any(x.is_deleted() for x in args[len(kernel.sums) :]):
        return None
    env = _values(kernel, args, lambda stacked, number: stacked[int(number)])
    for op in kernel.ops:
        reads = list(op.reads)

        def run(*values: Any, op: ir.Op = op, reads: Sequence[ir.Value] = reads) -> list[Any]:
            inner = dict(zip(reads, values, strict=True))
            with _compat.abstract_mesh_context(mesh):
                evaluate((op,), inner, mesh)
            return [inner[o] for o in op.outs]

        results = jax.jit(run)(*(jax.device_put(env[v], _auto(env[v].sharding)) for v in reads))
        env.update(zip(op.outs, results, strict=True))
        if any(jnp.issubdtype(x.dtype, jnp.inexact) and bool(invalid(x).any()) for x in results):
            return op
    return None


def _values(kernel: Kernel, args: Sequence[Any], row: Callable[[Any, Any], Any]) -> dict[ir.Value, Any]:
    """Map the values that a kernel reads to its arguments. ``row`` takes the row of a microbatch."""
    inputs, rows = list(args[len(kernel.sums) :]), dict[ir.Value, Any]()
    if kernel.rows:
        number = inputs.pop(0)
        rows = {v: row(inputs.pop(0), number) for v in kernel.rows}
    return rows | dict(zip(kernel.ins, inputs, strict=True))


def kernel_function(kernel: Kernel, plan: Plan) -> Callable[..., list[Any]]:
    """Return the function of a kernel; `Kernel` explains its arguments and results."""
    mesh = plan.submeshes[kernel.submesh]

    def zeros() -> list[Any]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in kernel.outs]

    def stack(*rows: Any) -> list[Any]:
        return [_compat.cast_weak_type(jnp.stack(rows), kernel.outs[0].aval)]

    def ops(*args: Any) -> list[Any]:
        env = _values(
            kernel, args, lambda stacked, number: lax.dynamic_index_in_dim(stacked, number, 0, keepdims=False)
        )
        evaluate(kernel.ops, env, mesh)
        return [
            *(lax.add(total, env[leaf]) for total, leaf in zip(args, kernel.sums, strict=False)),
            *(_compat.cast_weak_type(env[v], v.aval) for v in kernel.outs),
        ]

    def in_mesh(*args: Any) -> list[Any]:
        with _compat.abstract_mesh_context(mesh):
            return {"ops": ops, "zeros": zeros, "stack": stack}[kernel.make](*args)

    return _compat.set_name(in_mesh, "".join(c if c.isalnum() else "_" for c in kernel.name))
