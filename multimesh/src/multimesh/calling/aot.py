"""Ahead of time: a traced, lowered or compiled function, as in ``jax.stages``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.calling.arguments import abstract
from multimesh.core import _compat, checks
from multimesh.core.specs import strip
from multimesh.errors import UsageError
from multimesh.marking.tracing import pause_gc
from multimesh.passes import pipeline
from multimesh.passes.pipeline import Pass, PassInputs
from multimesh.plan.plan import Plan, move_plan
from multimesh.runtime.actions import processes
from multimesh.runtime.compile import CompiledPlan, compile_plan, exists
from multimesh.runtime.runner import Runner
from multimesh.stacked.row_blocks import Blocks, gather, numbers, repeat, split_stacks

if TYPE_CHECKING:
    from multimesh.observe.hlo import Collective
    from multimesh.observe.inspection import Finding
    from multimesh.observe.kernel_text import KernelText
    from multimesh.observe.memory import KernelMemory, MemoryEstimate
    from multimesh.observe.profile import Profile


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A traced function, before it is partitioned."""

    fun_name: str
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    _lower: Callable[[], Lowered]

    @property
    def out_info(self) -> Any:
        """The result with a ``jax.ShapeDtypeStruct`` for each array."""
        return jax.tree.unflatten(self.out_tree, map(_compat.shape_of, self.jaxpr.out_avals))

    def lower(self, **options: Any) -> Lowered:
        """Partition; ``jax.export`` alone has options."""
        if options:
            raise UsageError(
                f"{self.fun_name}: jax.export writes one program, and this function runs as several kernels, which "
                "send each other arrays; export its parts under jax.jit, or let "
                "jax.config.jax_compilation_cache_dir keep what is compiled"
            )
        return self._lower()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A partitioned function, before compilation; ``names`` are those of the argument leaves in messages."""

    plan: Plan
    traced: PassInputs
    out_tree: Any
    in_tree: Any = None
    names: tuple[str, ...] = ()
    out_kinds: Mapping[int, str] = dataclasses.field(default_factory=dict)  # result leaf to a kind of memory
    name: str = ""
    moved: bool = False  # whether `on` has put other devices in the place of those that it was traced for

    @property
    def input_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Submesh and layout of each argument leaf; None if no operation reads it.

        Several submeshes may read it. The one that makes its replacement counts, or else the first.
        """
        plan, stacks = self.plan, self.plan.stacks.arguments
        outputs = {slot for kind, slot in plan.outputs if kind == "slot" and slot in plan.like}
        made_on = {plan.like[slot]: plan.slots[slot].submesh for slot in outputs}
        homes: dict[int, int] = {}
        for arg, slot in plan.inputs:
            if arg not in homes or plan.slots[slot].submesh == made_on.get((arg,)):
                homes[arg] = slot
        count = len(self.traced.specs)
        leaves = range(sum(map(len, numbers(count, stacks))))
        layouts = [plan.layouts[homes[arg]] if arg in homes else None for arg in leaves]
        return tuple(gather(layouts, count, stacks, _layout_of))

    def passes(self) -> tuple[Pass, ...]:
        """Run the passes again, and return the result of each, with its ``name``. ``str`` of it is its dump.

        The first made programs, the next parts of them, and the last ones the plan.
        """
        return tuple(pipeline.run(self.traced))

    def memory_estimate(self, platform: str | None = None) -> tuple[MemoryEstimate, ...]:
        """Forecast the bytes that a device of each submesh needs at the peak of a call. Compile and allocate nothing.

        They follow from the plan and its layouts: ``arguments``, ``sums`` and ``values`` exactly, the workspace as an
        estimate of what XLA decides. See `MemoryEstimate`; there is one per submesh, in the order of
        ``plan.submeshes``. ``platform`` is "cpu" or "gpu" if not that of its devices: virtual CPU devices may stand for
        GPUs, whose compiler adds products to sums in place.
        """
        if platform not in (None, "cpu", "gpu"):
            raise UsageError(f'memory_estimate: platform must be "cpu" or "gpu", got {platform!r}')
        with pause_gc():
            from multimesh.observe.memory import estimate_memory

            return estimate_memory(self.plan, platform)

    def on(self, devices: Sequence[jax.Device]) -> Lowered:
        """Return the plan for other devices, each in the place of one of ours in the order of their ids.

        So a function that was lowered for virtual CPU devices is compiled for GPUs of `multimesh.topology`.
        """
        lowered = self._over([device.process_index for device in devices])
        return dataclasses.replace(lowered, plan=move_plan(lowered.plan, devices), moved=True)

    def over(self, processes: int) -> Lowered:
        """Return the plan of a job of so many processes, with equal shares of the devices in the order of their ids.

        Results that another process waits for may leave earlier, from a kernel of their own. It is for its `plan` and
        forecasts: the devices still are those of this process.

        Raises ``UsageError`` where the devices have no equal shares.
        """
        count = len(self.plan.devices)
        checks.integer("over: processes", processes, 1)
        if count % processes:
            raise UsageError(f"over: {processes} processes have no equal shares of {count} devices")
        return self._over([n * processes // count for n in range(count)])

    def _over(self, processes: Sequence[int]) -> Lowered:
        """Return the plan where ``processes`` has the process of each device; itself if their bounds are as before."""
        devices = self.plan.devices
        now, then = [*map(self.traced.owner, devices)], [*processes[: len(devices)]]
        if [*map(now.index, now)] == [*map(then.index, then)] or len(then) < len(devices):
            return self
        if self.moved:
            raise UsageError("on, over: the plan was moved to other devices before; call it on what lower() gave")
        traced = dataclasses.replace(self.traced, processes=dict(zip(devices, processes, strict=False)))
        with pause_gc():
            *_, last = pipeline.run(traced)
        return dataclasses.replace(self, plan=last.result, traced=traced)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile every kernel, several at a time. The options are passed on to XLA.

        For devices of `multimesh.topology` it compiles those of all processes. The result can't be called.
        """
        names = split_stacks(self.names, self.plan.stacks.arguments, repeat)
        with _compat.without_mesh():
            if not exists(self.plan):
                return Compiled(self, compile_plan(self.plan, compiler_options), refuse_call)
            if _compat.process_count() == 1:
                compiled = compile_plan(self.plan, compiler_options)
                return Compiled(self, compiled, Runner(compiled, names))
            from multimesh.plan import fingerprint
            from multimesh.processes import agree
            from multimesh.runtime.part_runner import PartRunner

            spans = len(frozenset().union(*processes(self.plan))) > 1
            number = agree.agree_on_plan(self.name, fingerprint.Lines(self.plan)) if spans else None
            compiled = compile_plan(self.plan, compiler_options)
            return Compiled(self, compiled, PartRunner(compiled, names, self.name, number))

    def as_text(self) -> str:
        """Return the plan, then the operations of each kernel."""
        kernels = self.plan.kernels
        parts = [str(self.plan), *("\n".join([f"kernel {k.name}:", *(f"  {op}" for op in k.ops)]) for k in kernels)]
        return "\n\n".join(parts)


def _layout_of(layouts: Sequence[NamedSharding | None], stack: Blocks) -> NamedSharding:
    """Return the layout of an array, from those of its blocks."""
    first = next((layout for layout in layouts if layout is not None), None)
    return stack.sharding(PartitionSpec()) if first is None else stack.sharding(strip(first.spec), first.memory_kind)


def refuse_call(*_: Any) -> NoReturn:
    """Raise `UsageError`, in the place of a runner: the devices of the plan are only those of a topology."""
    raise UsageError(
        "compiled for devices that are not there (multimesh.topology): it can't be called; compile for devices of "
        "jax.devices()"
    )


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled function. Call it with arguments of the types that it was lowered for.

    ``compiled_plan`` has the executables and layouts.
    """

    lowered: Lowered
    compiled_plan: CompiledPlan
    runner: Runner | Callable[..., NoReturn]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.compiled_plan.plan

    @property
    def in_tree(self) -> Any:
        """Tree of ``(args, kwargs)``, without static ones. Only keyword-only arguments are in ``kwargs``."""
        return self.lowered.in_tree

    @property
    def out_tree(self) -> Any:
        """Tree of the result."""
        return self.lowered.out_tree

    @property
    def input_shardings(self) -> Any:
        """Submesh and layout of each argument, as ``(args, kwargs)``; None if no operation reads it."""
        return jax.tree.unflatten(self.in_tree, self.lowered.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """Submesh and layout of each result; None for an argument or constant that no operation made."""
        places = [self._moved.get(n, layout) for n, layout in enumerate(self._layouts)]
        results = gather(places, self.out_tree.num_leaves, self.plan.stacks.results, _layout_of)
        return jax.tree.unflatten(self.out_tree, list(results))

    @property
    def _layouts(self) -> list[NamedSharding | None]:
        """The layouts in which the plan leaves results, each block of a stack by itself."""
        return [self.plan.layouts[value] if kind == "slot" else None for kind, value in self.plan.outputs]

    @functools.cached_property
    def _moved(self) -> dict[int, NamedSharding]:
        """Results that the plan does not leave where ``out_shardings`` wants them, and the wanted layout.

        Blocks of a stack must be alike, each on its submesh.
        """
        layouts, stacks, moved = self._layouts, self.plan.stacks, dict[int, NamedSharding]()
        at = numbers(self.out_tree.num_leaves, stacks.results)
        for leaf, stack in stacks.results.items():
            block = next((layouts[n] for n in at[leaf] if layouts[n] is not None), None)
            spec = PartitionSpec() if block is None else strip(block.spec)
            for n, mesh in zip(at[leaf], stack.meshes, strict=True):
                if (layout := layouts[n]) is None or layout.mesh != mesh or strip(layout.spec) != spec:
                    moved[n] = NamedSharding(mesh, spec)
        specs = self.lowered.traced.in_blocks(stacks).out_specs
        kinds = {n: kind for leaf, kind in self.lowered.out_kinds.items() for n in at[leaf]}
        for n in {*specs, *kinds}:
            layout, spec = layouts[n], strip(specs.get(n) or PartitionSpec())
            home = NamedSharding(layout.mesh if layout else self.plan.submeshes[0], spec, memory_kind=kinds.get(n))
            if layout is None or home != NamedSharding(layout.mesh, strip(layout.spec), memory_kind=layout.memory_kind):
                moved[n] = home
        for n, spec in self.lowered.traced.types.items():
            if (layout := layouts[n]) is not None and n not in moved and getattr(spec, "reduced", None):
                shape = self.plan.slots[self.plan.outputs[n][1]].shape
                spec = _compat.carry_spec(spec, shape, layout.mesh.abstract_mesh)
                spec = spec.update(partitions=_compat.partitions(layout.spec))
                moved[n] = NamedSharding(layout.mesh, spec, memory_kind=layout.memory_kind)
        return moved

    def as_text(self) -> str:
        """Return the plan, then the optimized HLO of each kernel."""
        programs = zip(self.plan.kernels, self.compiled_plan.executables, strict=True)
        texts = (f"kernel {k.name}:\n{p.as_text() if p else 'of other processes'}" for k, p in programs)
        return "\n\n".join([str(self.plan), *texts])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, with its arguments except for static ones."""
        return self.run_flat(self._leaves(args, kwargs))

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.lowered.in_tree:
            raise UsageError(f"compiled for arguments {self.lowered.in_tree}, called with {tree}; give them so")
        for name, aval, leaf in zip(self.lowered.names, self.lowered.traced.closed.in_avals, leaves, strict=True):
            shape, dtype, _ = abstract(leaf)
            if (shape, dtype) != (aval.shape, aval.dtype):
                raise UsageError(
                    f"compiled for {name} of type {aval.dtype}{[*aval.shape]}, called with {dtype}{[*shape]}; compile "
                    "for this type too, or call the function that multimesh.jit returned"
                )
        return leaves

    def run_flat(self, leaves: Sequence[Any]) -> Any:
        """Run on the flat list of non-static argument leaves."""
        with _compat.without_mesh(concrete_only=True):
            return jax.tree.unflatten(self.lowered.out_tree, self.runner(leaves, self._moved))

    def profile(self, *args: Any, repeats: int = 3, **kwargs: Any) -> Profile:
        """Measure a call: run each kernel and each transfer alone, once to warm up, then ``repeats`` times.

        It takes the arguments of a call. They stay valid, since donated ones are copied. Peak memory is that of a call
        and one more copy of the arguments. All processes of a plan call it: each measures its kernels and what it
        receives while the others measure theirs. All get one result, on the clock of process 0.

        Returns
        -------
        Profile
            Prints as a table of measured against forecast times, in seconds. Has both as timelines, and the ``costs``.
        """
        from multimesh.observe.profile import profile

        repeats = checks.integer("profile: repeats", repeats, 1)
        leaves = self._leaves(args, kwargs)
        with _compat.without_mesh(concrete_only=True):
            return profile(self.runner, leaves, repeats) if isinstance(self.runner, Runner) else self.runner()

    def memory_analysis(self) -> tuple[dict[str, int], ...]:
        """Return bytes per submesh, of whole arrays. Arrays in the memory of the host do not count.

        Each entry has ``arguments``, ``results``, ``intermediates`` (alive at the peak), and ``scratch`` of the largest
        kernel that this process compiled.
        """
        plan = self.plan
        inputs = {slot for _, slot in plan.inputs}
        results = {value for kind, value in plan.outputs if kind == "slot"}
        scratch = [0] * len(plan.submeshes)
        for kernel, memory in zip(plan.kernels, self.kernel_memory(), strict=True):
            if memory is not None:
                size = memory.temporaries * plan.submeshes[kernel.submesh].size
                scratch[kernel.submesh] = max(scratch[kernel.submesh], size)
        return tuple(
            {
                "arguments": plan.bytes_on(i, inputs),
                "results": plan.bytes_on(i, results),
                "intermediates": peak,
                "scratch": scratch[i],
            }
            for i, peak in enumerate(plan.peak_bytes())
        )

    def kernel_memory(self) -> tuple[KernelMemory | None, ...]:
        """Return the bytes of each kernel, in the order of ``plan.kernels``; None for one of other processes."""
        from multimesh.observe.memory import KernelMemory

        fields = ("argument", "output", "alias", "temp", "generated_code")
        stats = [p.memory_analysis() if p else None for p in self.compiled_plan.executables]
        return tuple(s and KernelMemory(*(getattr(s, f"{name}_size_in_bytes") for name in fields)) for s in stats)

    def device_memory(self) -> tuple[MemoryEstimate, ...]:
        """Return the bytes on each device of each submesh at the peak of a call, with kernels as XLA compiled them.

        As `Lowered.memory_estimate`, but the workspace is not estimated: it is by XLA's buffer assignment.
        """
        from multimesh.observe.memory import take_workspace

        return take_workspace(self.plan, self.kernel_memory())

    def custom_calls(self) -> tuple[Mapping[str, int], ...]:
        """Return how often each kernel calls cuBLASLt, cuDNN, Triton and the like; nothing for other processes'."""
        return tuple(text.custom_calls for text in self._texts)

    @property
    def compile_seconds(self) -> tuple[float, ...]:
        """Seconds of the compilation of each kernel; 0 for one that shares the code of another, or is not ours."""
        return self.compiled_plan.seconds

    def collectives(self) -> tuple[tuple[Collective, ...], ...]:
        """Return the collectives of each kernel, in the order of ``plan.kernels``; those of other processes are empty.

        Each has a ``kind``, ``arrays``, ``nbytes``, ``times``, ``axes(mesh)`` and whether it is ``asynchronous``.
        """
        return tuple(text.collectives for text in self._texts)

    @functools.cached_property
    def _texts(self) -> tuple[KernelText, ...]:
        """The facts that the text of each kernel gives. One that several kernels share is read once."""
        from multimesh.observe.kernel_text import KernelText, read_kernel

        read = functools.cache(lambda program: read_kernel(program.as_text() or "") if program else KernelText())
        return tuple(map(read, self.compiled_plan.executables))

    def inspect(self, least: int = 2**20) -> tuple[Finding, ...]:
        """Return what the compiled kernels do that was surely not wanted, and warn of each at the user's line.

        * ``gathered-weights``: a parameter is gathered for each microbatch, and not along an axis of the data (FSDP).
        * ``gathered-again``: an array is gathered several times, for several operations that read it.
        * ``per-microbatch``: a collective along an axis of the data runs for each microbatch.
        * ``float32-product``: operands of 16 bits are multiplied in float32.
        * ``synchronous``: a collective of more than 10 MB beside which nothing runs (GPUs).
        * ``replicated``: a value that each microbatch makes lies whole on each device of its submesh.
        * ``all-to-all``: a layout changes, which a constraint would save.

        Parameters
        ----------
        least
            Bytes on a device in a call, below which nothing is told.
        """
        from multimesh.observe import inspection

        findings = inspection.inspect(self.plan, self.collectives(), least)
        for finding in findings:
            _compat.warn_at(finding.line, finding.text)
        return findings

    def cost_analysis(self) -> tuple[dict[str, float], ...]:
        """Return operations and bytes of a call, per submesh and device.

        ``"flops"`` and ``"bytes accessed"`` are as XLA counts them. For GPUs of `multimesh.topology` it counts nothing:
        there they are `multimesh.count_costs`, operations of matrix products without cuDNN's attention, and bytes that
        kernels read and write. ``"copies"`` is the number of kernels that only copy or transpose, ``"bytes copied"``
        their bytes; ``"all-gather"``, ``"all-reduce"``, ``"ragged-all-to-all"`` and the other kinds of collectives are
        the bytes that these make on a device.
        """
        from multimesh.observe.hlo import KINDS

        plan = self.plan
        keys = ("flops", "bytes accessed", "copies", "bytes copied", *KINDS)
        totals = [dict.fromkeys(keys, 0.0) for _ in plan.submeshes]
        costs = [
            {**text.costs, **((program and program.cost_analysis()) or {})}
            for program, text in zip(self.compiled_plan.executables, self._texts, strict=True)
        ]
        for run in plan.runs:
            for key in totals[run.submesh]:
                totals[run.submesh][key] += float(costs[run.kernel].get(key, 0.0))
        return tuple(totals)


@dataclass(frozen=True, eq=False)
class SingleProgram:
    """A compiled function without tasks, as of ``jax.jit``. Arguments on several devices move to ``gather`` first."""

    jitted: Any
    gather: jax.Device | None = None

    def run_flat(self, leaves: Sequence[Any]) -> Any:
        """Run on the flat list of non-static argument leaves."""
        if self.gather is not None and len({frozenset(x.devices()) for x in leaves if isinstance(x, jax.Array)}) > 1:
            leaves = jax.device_put(list(leaves), self.gather)
        return self.jitted(*leaves)
