"""Compilation of the kernels of a plan, each once, several at a time, and the options for XLA that MultiMesh adds."""

from __future__ import annotations

import concurrent.futures
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from multimesh.ir.flops import product_sizes
from multimesh.marking.tracing import compiling
from multimesh.plan.instructions import Kernel, Run
from multimesh.plan.plan import Plan
from multimesh.processes.arrays import is_here
from multimesh.processes.launchers import LAUNCHERS

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
"""Option: kinds of operations that YNNPACK gets, by name; none where it is empty.

On a CPU of two cores, float32, each product alone in both forms: from 8 million operations
a matrix YNNPACK saves about 10 microseconds a million, as Eigen's threads wait for each other there; a product over
many small matrices, those of attention, costs it about 5 microseconds more for each matrix. Other products are equal.
"""

_LARGE = 8e6
_SAVED, _LOST = 10e-12, 5e-6  # seconds: for an operation of a large product; for a small matrix of a batch


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
        if is_here(plan.submeshes[run.submesh].devices.flat) or absent
    }
    with progress("compiling kernels", len(runs)) as advance, concurrent.futures.ThreadPoolExecutor(cores()) as pool:
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
                    running[number].add_done_callback(lambda _: advance())
            for first, *others in groups.values():
                for kernel in others:
                    running[kernel.number] = pool.submit(kernel.move, running[first.number].result()[0])
                    running[kernel.number].add_done_callback(lambda _: advance())
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
        seconds = time.perf_counter() - begin
        return executables.finish(compiled, self.lowered, self.mesh, self.jitted), seconds

    def move(self, compiled: Any) -> tuple[Any, float]:
        """Return the executable, from an equal kernel that was compiled for another submesh, or else compiled."""
        executable = executables.on_other_devices(compiled, self.lowered, self.mesh, self.options)
        return (executable, 0.0) if executable else self.compile()


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
    if any(x.is_deleted() for x in args[len(kernel.sums) :]):
        return None
    env = _values(kernel, args)
    for op in kernel.ops:
        single = replace(kernel, ops=(op,), sums=(), rows=(), ins=tuple(op.reads), outs=tuple(op.outs))
        inputs = (jax.device_put(env[v], _auto(env[v].sharding)) for v in single.ins)
        results = jax.jit(kernel_function(single, plan))(*inputs)
        env.update(zip(op.outs, results, strict=True))
        if any(jnp.issubdtype(x.dtype, jnp.inexact) and bool(invalid(x).any()) for x in results):
            return op
    return None


def _values(kernel: Kernel, args: Sequence[Any]) -> dict[ir.Value, Any]:
    """Map the values that a kernel reads to its arguments, of stacks to the row of the microbatch."""
    inputs, rows = list(args[len(kernel.sums) :]), dict[ir.Value, Any]()
    if kernel.rows:
        number = inputs.pop(0)
        rows = {v: lax.dynamic_index_in_dim(inputs.pop(0), number, 0, keepdims=False) for v in kernel.rows}
    return rows | dict(zip(kernel.ins, inputs, strict=True))


def kernel_function(kernel: Kernel, plan: Plan) -> Callable[..., list[Any]]:
    """Return the function of a kernel; `Kernel` explains its arguments and results."""
    mesh = plan.submeshes[kernel.submesh]

    def run(*args: Any) -> list[Any]:
        if kernel.make == "zeros":
            return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in kernel.outs]
        if kernel.make == "stack":
            return [_compat.cast_weak_type(jnp.stack(args), kernel.outs[0].aval)]
        env = _values(kernel, args)
        evaluate(kernel.ops, env, mesh)
        return [
            *(lax.add(total, env[leaf]) for total, leaf in zip(args, kernel.sums, strict=False)),
            *(_compat.cast_weak_type(env[v], v.aval) for v in kernel.outs),
        ]

    def in_mesh(*args: Any) -> list[Any]:
        with _compat.abstract_mesh_context(mesh):
            return run(*args)

    return _compat.set_name(in_mesh, "".join(c if c.isalnum() else "_" for c in kernel.name))


def cores() -> int:
    """Return the number of cores that this process may use: its share of the node if the launcher binds none."""
    every = os.cpu_count() or 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if available < every:
        return available
    counts = (os.environ.get(name, "") for launcher in LAUNCHERS for name in launcher.here)
    return max(1, available // next((int(n) for n in counts if n.isdecimal() and int(n)), 1))


def with_defaults(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler options, with ours where neither they nor ``XLA_FLAGS`` say otherwise.

    * On CPUs LLVM's level 2: level 3 takes a quarter of the compile time of a plan more, for code that is no faster.
    * On GPUs of several processes each process tunes its kernels alone: XLA would wait for processes that do not
      compile the kernel.
    """
    chosen = dict(options)
    platforms = {d.platform for mesh in plan.submeshes for d in mesh.devices.flat}
    if platforms != {"cpu"}:
        if "gpu" not in platforms or jax.process_count() == 1:
            return chosen
        from multimesh.core.known_faults import AUTOTUNING

        return {AUTOTUNING.name: False} | chosen
    level = "xla_backend_optimization_level"
    return ({} if _in_environment(level) else {level: 2}) | chosen


def for_kernel(plan: Plan, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a kernel: those of the plan, and on CPUs no YNNPACK where its products lose by it."""
    kernel = plan.kernels[number]
    mesh = plan.submeshes[kernel.submesh]
    if any(device.platform != "cpu" for device in mesh.devices.flat):
        return dict(options)
    chosen: dict[str, Any] = {}
    if (
        YNNPACK not in options
        and not _in_environment(YNNPACK)
        and sum(_seconds(op.prim.name, op.params, op.ins, mesh.size) for op in kernel.ops) < 0
    ):
        chosen |= {YNNPACK: ""} if executables.takes_option(YNNPACK, "") else {}
    return chosen | dict(options)


def _in_environment(name: str) -> bool:
    return name in os.environ.get("XLA_FLAGS", "")


def _seconds(name: str, params: dict[str, Any], ins: Sequence[Any], devices: int) -> float:
    """Return the seconds that YNNPACK saves in an operation; devices share the batch, or else the matrix."""
    if name == "dot_general" and ins[0].aval.dtype == ins[1].aval.dtype == jnp.float32:
        batch, m, k, n = product_sizes(params, ins)
        work = 2.0 * m * k * n
        matrices, work = (batch / devices, work) if batch >= devices else (batch, work / devices)
        if work >= _LARGE:
            return matrices * work * _SAVED
        return -matrices * _LOST if batch > 1 else 0.0
    inner = [
        sum(_seconds(e.primitive.name, e.params, e.invars, devices) for e in jaxpr.eqns)
        for jaxpr in _compat.subjaxprs(params)
    ]
    return sum(inner) * (params["length"] if name == "scan" else 1)
