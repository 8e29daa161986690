"""What `multimesh.jit` makes of a function: lowered, then compiled, as ``jax.stages`` has it; or one plain program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh import _compat
from multimesh.compiling import CompiledPlan, compile_plan
from multimesh.errors import UsageError
from multimesh.layouts import input_shardings
from multimesh.memory import MemoryForecast, forecast
from multimesh.passes.pipeline import Pass, Traced, passes
from multimesh.plan import Plan
from multimesh.runtime import Runner

if TYPE_CHECKING:
    from multimesh.profiling import Profile


@dataclass(frozen=True, eq=False)
class Lowered:
    """A partitioned function, before compilation; ``names`` are those of the argument leaves in messages."""

    plan: Plan
    traced: Traced
    specs: tuple[PartitionSpec, ...]
    out_tree: Any
    out_specs: dict[int, PartitionSpec]
    in_tree: Any = None
    derived: Mapping[tuple[int, int], PartitionSpec] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def input_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Submesh and layout of each argument leaf; None for one that no operation reads."""
        return input_shardings(self.plan, self.specs, self.derived)

    def passes(self) -> tuple[Pass, ...]:
        """Run the passes again: what each made, with its ``name``, in order; ``str`` of one is its dump.

        Returns
        -------
        tuple[Pass, ...]
            Programs, then parts of them, at last the plan.
        """
        return tuple(passes(self.traced))

    def memory_forecast(self) -> tuple[MemoryForecast, ...]:
        """Bytes that a device of each submesh will need at the peak of a call; nothing is compiled or allocated.

        They are read off the plan, the layouts of the arguments and the sharding constraints: ``arguments`` exactly,
        the rest as far as XLA decides as expected. See `MemoryForecast`.

        Returns
        -------
        tuple[MemoryForecast, ...]
            One a submesh, in the order of ``plan.submeshes``, with ``arguments``, ``sums``, ``values``, ``workspace``
            and their ``total``.
        """
        given = {slot: (arg, self.plan.slots[slot].submesh) for arg, slot in self.plan.inputs}
        specs = {slot: self.derived.get(at, self.specs[at[0]]) or PartitionSpec() for slot, at in given.items()}
        return forecast(self.plan, specs)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile every program; in parallel where their layouts allow. Options go to XLA as they are."""
        with _compat.without_mesh():
            compiled = compile_plan(self.plan, self.specs, self.out_specs, compiler_options, self.derived)
            return Compiled(self, Runner(compiled, self.names))

    def as_text(self) -> str:
        """The plan, then the operations of each program."""
        kernels = self.plan.kernels
        parts = [str(self.plan), *("\n".join([f"kernel {k.name}:", *(f"  {op}" for op in k.ops)]) for k in kernels)]
        return "\n\n".join(parts)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled function: call it with arguments of the types that it was lowered for."""

    lowered: Lowered
    runner: Runner

    @property
    def compiled_plan(self) -> CompiledPlan:
        """Programs and layouts."""
        return self.runner.compiled

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.runner.compiled.plan

    def __call__(self, *args: Any) -> Any:
        """Run; the arguments without the static ones."""
        return self.run_flat(self._leaves(args))

    def _leaves(self, args: tuple[Any, ...]) -> Sequence[Any]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.lowered.in_tree:
            raise UsageError(f"compiled for arguments {self.lowered.in_tree}, called with {tree}")
        return leaves

    def run_flat(self, leaves: Sequence[Any]) -> Any:
        """Run on the flat list of (non-static) argument leaves."""
        with _compat.without_mesh(concrete_only=True):
            return jax.tree.unflatten(self.lowered.out_tree, self.runner(leaves))

    def profile(self, *args: Any, repeats: int = 3) -> Profile:
        """Measure a call: run every program and transfer by itself, ``repeats`` times after a first time.

        Takes the arguments of a call, which stay valid: donated ones are copied. Peak memory is that of a call and one
        more copy of the arguments.

        Returns
        -------
        Profile
            Prints as a table of measured against forecast; has both as timelines, and the ``costs``.
        """
        from multimesh.profiling import profile

        if repeats < 1:
            raise UsageError(f"profile: repeats must be at least 1, got {repeats}")
        leaves = self._leaves(args)
        with _compat.without_mesh(concrete_only=True):
            return profile(self.compiled_plan, self.runner, leaves, repeats)

    def memory_analysis(self) -> tuple[dict[str, int], ...]:
        """Bytes per submesh, of whole arrays.

        ``arguments``, ``results``, ``intermediates`` alive at the peak, ``scratch`` of the largest program.
        """
        plan = self.plan
        peaks = plan.peak_bytes()
        given = {slot for _, slot in plan.inputs}
        results = {value for kind, value in plan.outputs if kind == "slot"}
        scratch = [0] * len(plan.submeshes)
        for kernel, program in zip(plan.kernels, self.compiled_plan.programs, strict=True):
            stats = program.memory_analysis()
            if stats is not None:
                size = stats.temp_size_in_bytes * plan.submeshes[kernel.submesh].size
                scratch[kernel.submesh] = max(scratch[kernel.submesh], size)
        return tuple(
            {
                "arguments": sum(plan.slots[s].nbytes for s in given if plan.slots[s].submesh == i),
                "results": sum(plan.slots[s].nbytes for s in results if plan.slots[s].submesh == i),
                "intermediates": peaks[i],
                "scratch": scratch[i],
            }
            for i in range(len(plan.submeshes))
        )

    def cost_analysis(self) -> tuple[dict[str, float], ...]:
        """Floating-point operations and bytes accessed per submesh and device in one call, as XLA counts them."""
        plan = self.plan
        totals = [{"flops": 0.0, "bytes accessed": 0.0} for _ in plan.submeshes]
        costs = [program.cost_analysis() or {} for program in self.compiled_plan.programs]
        for step in plan.instructions:
            if step.kind == "RUN" and step.kernel is not None:
                for key in totals[step.submesh]:
                    totals[step.submesh][key] += float(costs[step.kernel].get(key, 0.0))
        return tuple(totals)


@dataclass(frozen=True, eq=False)
class Plain:
    """A function without tasks: one program, as under ``jax.jit``; where tasks are ignored, on ``gather``."""

    jitted: Any
    gather: jax.Device | None = None

    def run_flat(self, leaves: Sequence[Any]) -> Any:
        """Run on the flat list of (non-static) argument leaves."""
        if self.gather is not None and len({frozenset(x.devices()) for x in leaves if isinstance(x, jax.Array)}) > 1:
            leaves = jax.device_put(list(leaves), self.gather)
        return self.jitted(*leaves)
