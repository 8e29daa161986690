"""``multimesh.jit``: trace once, partition, compile, run."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multimesh.calling import arguments
from multimesh.calling.aot import Compiled, Lowered, SingleProgram, TracedFunction
from multimesh.calling.arguments import OF_ARGUMENTS, Arguments, Parameters, Signature, spec_in, spread_prefix
from multimesh.calling.cache import Cache, Recent, Trace, matching, traits
from multimesh.calling.remarks import check_layouts, refuse_other_devices, warn_of_costs
from multimesh.calling.transforms import Call
from multimesh.core import _compat, checks
from multimesh.core.specs import strip
from multimesh.core.weak_cache import keep_with, weak
from multimesh.errors import MultiMeshError, UsageError
from multimesh.ir.program import has_tasks
from multimesh.marking import contexts, registrations
from multimesh.marking.contexts import Options
from multimesh.marking.flax_modules import refuse_changes
from multimesh.marking.tracing import is_recording, note_meshes, partitioning, pause_gc
from multimesh.passes import pipeline
from multimesh.passes.pipeline import LAST, Pass, PassInputs
from multimesh.plan.plan import Plan
from multimesh.stacked.row_blocks import layout_of_block, numbers

if TYPE_CHECKING:
    from multimesh.observe.profile import Profile


class _Context(NamedTuple):
    """The part of a trace's key that is no argument: options, registrations, JAX's own context."""

    options: Options
    registrations: tuple[registrations.Registration, ...]
    jax: Any


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")


class Jitted(Generic[P, R]):
    """A function that `jit` returned; call it like the function itself."""

    def __init__(
        self,
        fn: Callable[P, R],
        parameters: Parameters | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        devices: Any = None,
        *,
        autoshard: bool = False,
        layouts: Sequence[PartitionSpec | None] = (),
        types: AbstractMesh | str | None = OF_ARGUMENTS,
    ):
        """``layouts`` are those of results, as far as their submeshes have the axes.

        ``types`` is the mesh in the types of values outside of tasks; None: they have none.
        """
        self._fn = fn
        self._autoshard = autoshard
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._parameters = parameters or Parameters(fn)
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._layouts, self._types = layouts, types
        self._devices = None if devices is None else arguments.flat_devices(devices)
        leaves, tree = jax.tree.flatten((in_shardings, out_shardings, layouts), is_leaf=arguments.is_sharding)
        key = (self._parameters.key, tuple(leaves), tree, self._devices, autoshard, types)
        self._cache = keep_with(fn, key, Cache)
        functools.update_wrapper(self, fn, updated=())

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Jitted[P, R]: ...
    @overload
    def __get__(self: Jitted[Concatenate[T, Q], R], instance: T, owner: Any = None) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The bound method, if the function is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function. New types, layouts or static arguments trace and compile it first."""
        if jax.config.jax_disable_jit:
            device = (self._devices or jax.devices())[0]  # there each operation runs by itself
            moves = lambda x: isinstance(x, jax.Array) and not _compat.is_tracer(x)  # noqa: E731
            args, kwargs = jax.tree.map(lambda x: jax.device_put(x, device) if moves(x) else x, (args, kwargs))
            return self._fn(*args, **kwargs)
        bound = self._parameters.bind(args, kwargs)
        leaves, tree = jax.tree.flatten(bound.dynamic)
        if not _compat.eager() or any(map(_compat.is_tracer, leaves)):
            if is_recording():
                return self._fn(*args, **kwargs)
            return self._trace(bound, self._signature(leaves, tree, bound)).bind(leaves)
        recent, key, context = self._cache.recent, bound.key, self._context()
        if recent is not None and recent.fits(leaves, tree, key, context):
            return recent.compiled.run_flat(leaves)
        signature = self._signature(leaves, tree, bound)
        if signature not in self._cache.compiled and not signature.context.options.ignore_transforms:
            trace = self._trace(bound, signature)
            if trace.captured:  # of a jax.grad or jax.vmap around the function
                return trace.bind(leaves)
        compiled = self._compiled(bound, signature)
        self._cache.recent = Recent(tree, key, context, tuple(map(traits, leaves)), compiled)
        return compiled.run_flat(leaves)

    def _trace(self, bound: Arguments, signature: Signature) -> Trace:
        """Trace the function, once for all layouts of these types. A trace that captures values is not kept."""
        key = replace(signature, specs=(), home=None, homes=())
        trace = self._cache.traces.get(key)
        if trace is None:
            closed, shapes, types = self._traced(bound, signature)
            closed, captured = _compat.hoist(closed)
            make_jitted = functools.partial(Jitted, devices=self._devices, autoshard=self._autoshard)
            devices = self._devices or tuple(jax.devices())
            trace = Trace(Call(closed, make_jitted, types=types), captured, jax.tree.structure(shapes), devices)
            if not captured:
                trace = self._cache.traces.setdefault(key, trace)
        return trace

    def _traced(self, call: Arguments, signature: Signature) -> tuple[Any, Any, AbstractMesh | None]:
        """Return the jaxpr, the shapes of results, and the mesh in its types.

        The trace of a function whose tasks have Explicit axes that no argument has is thrown away, and repeated with
        these in the types of values outside of tasks.
        """
        flat, structs = self._flat(call, signature)
        types = signature.types
        while True:
            meshes: list[Mesh] = []
            try:
                with (
                    pause_gc(),
                    _compat.devices_free(None if types is None else types.mesh),
                    _compat.explain_trace(lambda: self._name),
                    note_meshes(meshes),
                ):
                    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(
                        *(types.structs(structs) if types else structs)
                    )
            except Exception:
                if arguments.widen(types, len(structs), meshes) == types:
                    raise
            else:
                if arguments.widen(types, len(structs), meshes) == types:
                    return closed, shapes, None if types is None else types.mesh
            types = arguments.widen(types, len(structs), meshes)

    def _compiled(self, bound: Arguments, signature: Signature) -> Compiled | SingleProgram:
        functions = self._cache.compiled
        if signature in functions:
            return functions[signature]
        with self._cache.lock:
            compiled = functions.get(signature)
            if compiled is None and signature.context.options.autoshard:
                compiled = matching(signature, functions)
            if compiled is None:
                lowered = self._partition(bound, signature)
                compiled = lowered if isinstance(lowered, SingleProgram) else lowered.compile()
            functions[signature] = compiled
            return compiled

    def _context(self) -> _Context:
        options = contexts.current()
        if self._autoshard:
            options = contexts.with_autoshard(options)
        return _Context(options, registrations.in_force(), _compat.trace_context())

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and partition for these arguments (arrays or ``jax.ShapeDtypeStruct``)."""
        lowered = self._partition(*self._bind(args, kwargs))
        if isinstance(lowered, SingleProgram):
            raise self._without_tasks()
        return lowered

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Trace for these arguments; ``lower()`` of the result partitions."""
        bound, signature = self._bind(args, kwargs)
        trace, lower = self._trace(bound, signature), functools.partial(self.lower, *args, **kwargs)
        return TracedFunction(self._name, trace.call.closed, jax.tree.structure(bound.trees()), trace.out_tree, lower)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result with a ``jax.ShapeDtypeStruct`` for each array; nothing is partitioned, compiled or run."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget all traces and compiled functions, as ``clear_cache`` of ``jax.jit`` does."""
        with self._cache.lock:
            for part in (self._cache.compiled, self._cache.lowered, self._cache.traces):
                part.clear()
            self._cache.recent = None

    def _without_tasks(self) -> MultiMeshError:
        if contexts.ignoring():
            return MultiMeshError(f"{self._name}: tasks are ignored under ignore_transforms; leave it for a plan")
        return MultiMeshError(f"{self._name}: nothing in this function is a task; wrap parts of it in multimesh.task")

    @property
    def compiled(self) -> tuple[Compiled | SingleProgram, ...]:
        """The compiled functions so far, one for each signature."""
        return tuple(self._cache.compiled.values())

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these arguments. Compile and run nothing."""
        return self.lower(*args, **kwargs).plan

    def profile(self, *args: Any, repeats: int = 3, **kwargs: Any) -> Profile:
        """Return `Compiled.profile` for these arguments. Compile unless a call already did."""
        positional, named = self._parameters.bind(args, kwargs).trees()
        return self._planned(*args, **kwargs).profile(*positional, repeats=repeats, **named)

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled | SingleProgram:
        """Compile for these arguments (arrays or ``jax.ShapeDtypeStruct``), so that a call need not."""
        return self._compiled(*self._bind(args, kwargs))

    def memory_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, int], ...]:
        """Return `Compiled.memory_analysis` for these arguments. Compile unless a call already did."""
        return self._planned(*args, **kwargs).memory_analysis()

    def cost_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, float], ...]:
        """Return `Compiled.cost_analysis` for these arguments. Compile unless a call already did."""
        return self._planned(*args, **kwargs).cost_analysis()

    def _planned(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile a function with tasks, as `prepare` does."""
        compiled = self.prepare(*args, **kwargs)
        if isinstance(compiled, SingleProgram):
            raise self._without_tasks()
        return compiled

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, Signature]:
        bound = self._parameters.bind(args, kwargs)
        leaves, tree = jax.tree.flatten(bound.dynamic)
        return bound, self._signature(leaves, tree, bound)

    def _signature(self, leaves: Sequence[Any], tree: Any, bound: Arguments) -> Signature:
        try:
            avals = tuple(map(arguments.abstract, leaves))
        except UsageError:  # which then names the leaf
            avals = tuple(map(arguments.abstract, leaves, arguments.leaf_names(tree, self._parameters.names(bound))))
        context, entries = self._context(), [None] * len(leaves)
        options = context.options
        if self._in_shardings is not None:
            if bound.names:
                raise UsageError(f"{self._name}: in_shardings can't say where {bound.names[0]}= is; drop one of them")
            entries = spread_prefix(self._in_shardings, tree, "in_shardings")
        kinds = tuple(map(arguments.kind_of, leaves, entries))
        layouts = [arguments.layout_of(x) if entry is None else entry for x, entry in zip(leaves, entries, strict=True)]
        derived = None if options.autoshard else PartitionSpec()
        specs = tuple(derived if spec is None else strip(spec) for spec in map(spec_in, layouts))
        for layout in layouts:
            if isinstance(layout, NamedSharding) and getattr(layout.spec, "unreduced", None):
                raise UsageError(
                    f"{self._name}: an argument is unreduced ({layout.spec}): each device has a term of it; sum it up "
                    "before the call: jax.sharding.reshard(x, P(...))"
                )
        blocks = [layout_of_block(x) if isinstance(x, NamedSharding) else x for x in layouts]
        registered = (rule.task.mesh for rule in context.registrations if rule.task is not None)
        types = arguments.types_of(blocks, self._types, registered)
        homes = arguments.homes_of(leaves)
        meshes = {mesh for mesh in homes if mesh is not None}
        home = meshes.pop() if len(meshes) == 1 and not options.enable_fast_path else None
        signature = Signature(tree, avals, specs, kinds, bound.key, context, home, types=types)
        if options.ignore_transforms or len({frozenset(mesh.devices.flat) for mesh in meshes}) < 2:
            return signature
        return replace(signature, homes=self._trace(bound, signature).homes(homes))

    def _flat(self, bound: Arguments, signature: Signature) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function of flat leaves, and their types."""
        kinds = zip(signature.avals, signature.kinds, strict=True)
        structs = [_compat.struct(shape, dtype, weak, kind) for (shape, dtype, weak), kind in kinds]
        call = bound.caller(weak(self._fn))

        def flat(*leaves: Any) -> Any:
            args = jax.tree.unflatten(signature.tree, leaves)
            with partitioning(), refuse_changes(lambda: self._name, args):
                return call(args)

        return flat, structs

    def _partition(self, bound: Arguments, signature: Signature) -> Lowered | SingleProgram:
        """Partition the function, once for each signature."""
        lowered = self._cache.lowered.get(signature)
        if lowered is None:
            with pause_gc():
                lowered = self._cache.lowered.setdefault(signature, self._lower(bound, signature))
        return lowered

    def _lower(self, bound: Arguments, signature: Signature) -> Lowered | SingleProgram:
        donated = bound.donated_leaves(signature.tree)
        options: Options = signature.context.options
        devices = self._devices or tuple(jax.devices())
        if options.ignore_transforms:
            return SingleProgram(jax.jit(self._flat(bound, signature)[0], donate_argnums=tuple(donated)), devices[0])
        trace = self._trace(bound, signature)
        if trace.captured:
            raise MultiMeshError(f"{self._name}: captures a value of an enclosing transformation")
        closed, out_tree = trace.erased, trace.out_tree
        parameters = self._parameters.names(bound)
        pairs = arguments.match_results(
            signature, out_tree, list(map(_compat.shape_of, closed.out_avals)), donated, parameters
        )
        home = signature.home or Mesh(np.array(devices[:1]), ("devices",))
        out_entries = spread_prefix(self._out_shardings, out_tree, "out_shardings")
        out_specs = {i: spec for i, spec in enumerate(map(spec_in, out_entries)) if spec is not None}
        layouts = out_specs | {i: spec for i, spec in enumerate(self._layouts) if spec is not None}
        avals = ((i, getattr(aval, "sharding", None)) for i, aval in enumerate(trace.call.closed.out_avals))
        types = {i: layout.spec for i, layout in avals if layout is not None and _compat.is_typed(layout.mesh)}
        traced = PassInputs(
            closed, devices, options, home, signature.specs, donated, pairs, layouts, homes=signature.homes, types=types
        )
        stages = pipeline.run(traced)
        if not has_tasks(next(stages).result) and options.enable_fast_path and not signature.homes:
            if self._in_shardings is not None or self._out_shardings is not None:
                raise MultiMeshError(
                    f"{self._name}: nothing in this function is a task, so in_shardings and out_shardings name no "
                    "submesh; use jax.jit"
                )
            run = lambda *leaves: jax.tree.unflatten(out_tree, trace.call.function(*leaves))  # noqa: E731
            return SingleProgram(jax.jit(_compat.set_name(run, self._name), donate_argnums=tuple(donated)))
        passes: Mapping[str, Pass] = {result.name: result for result in stages}
        if passes[LAST].result.choices:
            from multimesh.calling.auto_schedule import fit_memory  # loaded by loops with ``auto`` alone

            traced, passes = fit_memory(traced, passes)
        plan: Plan = passes[LAST].result
        if self._devices is not None:
            refuse_other_devices(passes["delay_reductions"].result, self._devices)
        if not signature.homes:
            blocks = numbers(len(signature.specs), plan.stacks.arguments)
            leaf = {block: n for n, at in enumerate(blocks) for block in at}
            trace.defaults.update((leaf[arg], plan.submeshes[plan.slots[slot].submesh]) for arg, slot in plan.inputs)
        names = arguments.leaf_names(signature.tree, parameters)
        warn_of_costs(self._name, plan, names, donated, passes["place_operations"].result)
        in_entries = spread_prefix(self._in_shardings, signature.tree, "in_shardings")
        check_layouts(self._name, plan, names, in_entries, out_specs)
        memory = {i: getattr(entry, "memory_kind", None) for i, entry in enumerate(out_entries)}
        kinds = {i: kind for i, kind in memory.items() if kind is not None}
        return Lowered(plan, traced, out_tree, jax.tree.structure(bound.trees()), names, kinds, self._name)


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Jitted[P, R]: ...


@overload
def jit(
    fn: Callable[P, R],
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    devices: Any = None,
) -> Jitted[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> _Decorator: ...
def jit(  # type: ignore[misc]  # the options are those of the first overload
    fn: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    devices: Any = None,
) -> Any:
    """Compile a function whose tasks run on different submeshes.

    The function is traced once per signature (types, layouts, static arguments) and cut into kernels, one per submesh
    and stage. A call runs these kernels in the order of the plan, and sends arrays between the submeshes. Results stay
    on the submesh that made them.

    Parameters
    ----------
    fn
        The function. Without it, ``jit`` is a decorator with options.
    donate_argnums, donate_argnames
        Arguments whose buffers the call may reuse, by number or name. They can't be used after the call.
    static_argnums, static_argnames
        Arguments that are Python values, hashed into the signature, by number or name. It does not matter whether the
        call passes them by position or by name.
    in_shardings, out_shardings
        Pytree prefixes of ``NamedSharding``, ``PartitionSpec`` or None: the layout of arguments and results on their
        submesh. By default arguments keep theirs, and new parameters take that of the old. A result is placed in the
        memory kind that its ``NamedSharding`` names.
    devices
        The devices, in any nesting, that tasks may use and that `register_task` callbacks count; by default all.

    Returns
    -------
    Jitted
        Called like ``fn``, also as a method. It has the methods of ``jax.jit`` (``lower(*args).compile()``,
        ``trace(*args)``, ``eval_shape(*args)``, ``clear_cache()``), ``plan(*args)``, ``profile(*args)``,
        ``memory_analysis(*args)`` and ``cost_analysis(*args)``. Compiled functions belong to ``fn``: another ``jit`` of
        it finds them. Under ``jax.grad``, ``jax.vmap``, ``jax.jvp`` and ``jax.linearize`` it runs as plans too. Inside
        of ``jax.jit`` or ``lax.scan`` it is ``fn`` itself.

    Raises
    ------
    MultiMeshError
        If the function can't be partitioned; names the user's line.

    Examples
    --------
    >>> front, back = (Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2])
    >>> def forward(w, x):
    ...     return mm.task(jnp.matmul, "back", mesh=back)(mm.task(jnp.tanh, "front", mesh=front)(x), w)
    >>> mm.jit(forward)(jnp.eye(4), jnp.zeros((2, 4))).devices() == set(back.devices.flat)
    True
    """
    options = {"in_shardings": in_shardings, "out_shardings": out_shardings, "devices": devices}
    static, donate = (static_argnums, static_argnames), (donate_argnums, donate_argnames)

    def jitted(fn: Callable[..., Any]) -> Jitted:
        checks.function("jit: the first argument", fn)
        return Jitted(fn, Parameters(fn, static, donate), **options)

    return jitted if fn is None else jitted(fn)
