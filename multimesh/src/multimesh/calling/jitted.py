"""``multimesh.jit``: trace once, partition, compile, run."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multimesh.calling.aot import Compiled, Lowered, Plain, TracedFunction, export_error
from multimesh.calling.argument_types import OF_ARGUMENTS, layout_of, refuse_terms, result_specs, types_of, widen
from multimesh.calling.arguments import (
    Given,
    Parameters,
    Signature,
    abstracts,
    homes_of,
    host_kind,
    is_sharding,
    kind_of,
    layouts_of,
    leaf_names,
    match_results,
    memory_kinds,
    per_leaf,
    spec_of,
)
from multimesh.calling.auto_schedule import Made, fit_memory
from multimesh.calling.cache import Cache, Recent, Trace, matching, traits
from multimesh.calling.remarks import Remarks, check_devices
from multimesh.calling.transforms import Call
from multimesh.core import _compat, checks
from multimesh.core.row_blocks import numbers
from multimesh.core.specs import strip
from multimesh.core.weak_cache import keep_with, weak
from multimesh.errors import MultiMeshError, UsageError
from multimesh.ir.program import has_tasks
from multimesh.marking import contexts, registrations
from multimesh.marking.contexts import Options
from multimesh.marking.flax_modules import refuse_changes
from multimesh.marking.tracing import is_recording, note_meshes, partitioning, pause_gc
from multimesh.passes import pipeline
from multimesh.passes.pipeline import Traced
from multimesh.plan.plan import Plan

if TYPE_CHECKING:
    from multimesh.observe.profile import Profile


class _Context(NamedTuple):
    """The part of a trace's key that is no argument: options, registrations, JAX's own context."""

    options: Options
    registrations: tuple[registrations.Registration, ...]
    jax: Any


def _home(leaves: Iterable[Any]) -> Mesh | None:
    """The mesh of the arguments, for a function without tasks; None if they have none or several."""
    meshes = {s.mesh for s in (getattr(leaf, "sharding", None) for leaf in leaves) if isinstance(s, NamedSharding)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return mesh if isinstance(mesh, Mesh) else None


class Jitted:
    """A function that `jit` returned; call it like the function itself."""

    def __init__(
        self,
        fn: Callable[..., Any],
        parameters: Parameters | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        devices: Sequence[jax.Device] | None = None,
        precompiled: str | None = None,
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
        self._devices = tuple(devices) if devices is not None else None
        given, tree = jax.tree.flatten((in_shardings, out_shardings, layouts), is_leaf=is_sharding)
        self._precompiled = precompiled
        key = (self._parameters.key, tuple(given), tree, self._devices, precompiled, autoshard, types)
        self._cache = keep_with(fn, key, Cache)
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The bound method, if the function is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function. New types, layouts or static arguments trace and compile it first."""
        if jax.config.jax_disable_jit:
            args, kwargs = jax.tree.map(self._on_one_device, (args, kwargs))
            return self._fn(*args, **kwargs)
        given = self._parameters.given(args, kwargs)
        leaves, tree = jax.tree.flatten(given.dynamic)
        if not _compat.eager() or any(map(_compat.is_tracer, leaves)):
            if is_recording():
                return self._fn(*args, **kwargs)
            return self._trace(given, self._signature(leaves, tree, given)).bind(leaves)
        recent, key, context = self._cache.recent, given.key, self._context()
        if recent is not None and recent.fits(leaves, tree, key, context):
            return recent.compiled.run_flat(leaves)
        signature = self._signature(leaves, tree, given)
        if signature not in self._cache.compiled and not signature.context.options.ignore_transforms:
            trace = self._trace(given, signature)
            if trace.captured:  # of a jax.grad or jax.vmap around the function
                return trace.bind(leaves)
        compiled = self._compiled(given, signature)
        self._cache.recent = Recent(tree, key, context, tuple(map(traits, leaves)), compiled)
        return compiled.run_flat(leaves)

    def _on_one_device(self, x: Any) -> Any:
        """Move an argument to one device, for ``jax.disable_jit``: there each operation runs by itself."""
        if not isinstance(x, jax.Array) or _compat.is_tracer(x):
            return x
        return jax.device_put(x, (self._devices or jax.devices())[0])

    def _trace(self, given: Given, signature: Signature) -> Trace:
        """Trace the function, once for all layouts of these types. A trace that captures values is not kept."""
        key = replace(signature, specs=(), home=None, homes=())
        trace = self._cache.traces.get(key)
        if trace is None:
            closed, shapes, types = self._traced(given, signature)
            closed, captured = _compat.hoist(closed)
            alike = functools.partial(
                Jitted, devices=self._devices, precompiled=self._precompiled, autoshard=self._autoshard
            )
            devices = self._devices or tuple(jax.devices())
            trace = Trace(Call(closed, alike, types=types), captured, jax.tree.structure(shapes), devices)
            if not captured:
                trace = self._cache.traces.setdefault(key, trace)
        return trace

    def _traced(self, call: Given, signature: Signature) -> tuple[Any, Any, AbstractMesh | None]:
        """Return the jaxpr, the shapes of results, and the mesh in its types.

        The trace of a function whose tasks have Explicit axes that no argument has is thrown away, and repeated with
        these in the types of values outside of tasks.
        """
        flat, structs = self._flat(call, signature)
        types = signature.types
        while True:
            met: list[Mesh] = []
            try:
                with (
                    pause_gc(),
                    _compat.devices_free(None if types is None else types.mesh),
                    _compat.explain_trace(lambda: self._name),
                    note_meshes(met),
                ):
                    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(
                        *(types.structs(structs) if types else structs)
                    )
            except Exception:
                if widen(types, len(structs), met) == types:
                    raise
            else:
                if widen(types, len(structs), met) == types:
                    return closed, shapes, None if types is None else types.mesh
            types = widen(types, len(structs), met)

    def _compiled(self, given: Given, signature: Signature) -> Compiled | Plain:
        known = self._cache.compiled
        if signature in known:
            return known[signature]
        with self._cache.lock:
            compiled = known.get(signature)
            if compiled is None and signature.context.options.autoshard:
                compiled = matching(signature, known)
            if compiled is None:
                lowered = self._partition(given, signature)
                if isinstance(lowered, Plain) and self._precompiled is not None:
                    raise self._without_tasks()
                compiled = lowered if isinstance(lowered, Plain) else lowered.compile(precompiled=self._precompiled)
            known[signature] = compiled
            return compiled

    def _context(self) -> _Context:
        options = contexts.current()
        if self._autoshard:
            options = contexts.with_autoshard(options)
        return _Context(options, registrations.in_force(), _compat.trace_context())

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and partition for these arguments (arrays or ``jax.ShapeDtypeStruct``)."""
        given = self._parameters.given(args, kwargs)
        lowered = self._partition(given, self._signature_of(given))
        if isinstance(lowered, Plain):
            raise self._without_tasks()
        return lowered

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Trace for these arguments; ``lower()`` of the result partitions."""
        given = self._parameters.given(args, kwargs)
        trace = self._trace(given, self._signature_of(given))

        def lower(**options: Any) -> Lowered:
            if options:  # of jax.export
                raise export_error(self._name)
            return self.lower(*args, **kwargs)

        return TracedFunction(self._name, trace.call.closed, jax.tree.structure(given.trees()), trace.out_tree, lower)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result with a ``jax.ShapeDtypeStruct`` for each array; nothing is partitioned, compiled or run."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget all traces and compiled functions, as ``clear_cache`` of ``jax.jit`` does."""
        self._cache.clear()

    def _without_tasks(self) -> MultiMeshError:
        if contexts.ignoring():
            return MultiMeshError(f"{self._name}: tasks are ignored under ignore_transforms; leave it for a plan")
        return MultiMeshError(f"{self._name}: nothing in this function is a task; wrap parts of it in multimesh.task")

    @property
    def compiled(self) -> tuple[Compiled | Plain, ...]:
        """The compiled functions so far, one for each signature."""
        return tuple(self._cache.compiled.values())

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these arguments. Compile and run nothing."""
        return self.lower(*args, **kwargs).plan

    def profile(self, *args: Any, repeats: int = 3, **kwargs: Any) -> Profile:
        """Return `Compiled.profile` for these arguments. Compile unless a call already did."""
        positional, named = self._parameters.given(args, kwargs).trees()
        return self._planned(*args, **kwargs).profile(*positional, repeats=repeats, **named)

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled | Plain:
        """Compile for these arguments (arrays or ``jax.ShapeDtypeStruct``), so that a call need not."""
        given = self._parameters.given(args, kwargs)
        return self._compiled(given, self._signature_of(given))

    def memory_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, int], ...]:
        """Return `Compiled.memory_analysis` for these arguments. Compile unless a call already did."""
        return self._planned(*args, **kwargs).memory_analysis()

    def cost_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, float], ...]:
        """Return `Compiled.cost_analysis` for these arguments. Compile unless a call already did."""
        return self._planned(*args, **kwargs).cost_analysis()

    def _planned(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile a function with tasks, as `prepare` does."""
        compiled = self.prepare(*args, **kwargs)
        if isinstance(compiled, Plain):
            raise self._without_tasks()
        return compiled

    def _signature_of(self, given: Given) -> Signature:
        leaves, tree = jax.tree.flatten(given.dynamic)
        return self._signature(leaves, tree, given)

    def _signature(self, leaves: Sequence[Any], tree: Any, given: Given) -> Signature:
        avals = abstracts(leaves, tree, lambda: self._parameters.names(given))
        context = self._context()
        specs = [spec_of(leaf, or_none=context.options.autoshard) for leaf in leaves]
        kinds = tuple(map(kind_of, leaves))
        found = [*map(layout_of, leaves)]
        if self._in_shardings is not None:
            if given.names:
                raise UsageError(f"{self._name}: in_shardings can't say where {given.names[0]}= is; drop one of them")
            layouts = per_leaf(self._in_shardings, tree, "in_shardings")
            specs = [spec if g is None else strip(g) for spec, g in zip(specs, layouts, strict=True)]
            asked = layouts_of(self._in_shardings, tree, "in_shardings")
            found = [own if g is None else g for own, g in zip(found, asked, strict=True)]
            given_kinds = memory_kinds(self._in_shardings, tree, "in_shardings")
            kinds = tuple(host_kind(given_kinds.get(n, kind)) for n, kind in enumerate(kinds))
        home = None if context.options.enable_fast_path else _home(leaves)
        refuse_terms(self._name, found)
        types = types_of(found, self._types, registrations.meshes(context.registrations))
        signature = Signature(tree, avals, tuple(specs), kinds, given.key, context, home, types=types)
        homes = () if context.options.ignore_transforms else homes_of(leaves)
        return signature if not homes else replace(signature, homes=self._trace(given, signature).homes(homes))

    def _flat(self, given: Given, signature: Signature) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function of flat leaves, and their types."""
        kinds = zip(signature.avals, signature.kinds, strict=True)
        structs = [_compat.struct(shape, dtype, weak, kind) for (shape, dtype, weak), kind in kinds]
        call = given.caller(weak(self._fn))

        def flat(*leaves: Any) -> Any:
            args = jax.tree.unflatten(signature.tree, leaves)
            with partitioning(), refuse_changes(lambda: self._name, args):
                return call(args)

        return flat, structs

    def _partition(self, given: Given, signature: Signature) -> Lowered | Plain:
        """Partition the function, once for each signature."""
        lowered = self._cache.lowered.get(signature)
        if lowered is None:
            with pause_gc():
                lowered = self._cache.lowered.setdefault(signature, self._lower(given, signature))
        return lowered

    def _lower(self, given: Given, signature: Signature) -> Lowered | Plain:
        donated = given.donated_leaves(signature.tree)
        options: Options = signature.context.options
        devices = self._devices or tuple(jax.devices())
        if options.ignore_transforms:
            return Plain(jax.jit(self._flat(given, signature)[0], donate_argnums=tuple(donated)), devices[0])
        trace = self._trace(given, signature)
        if trace.captured:
            raise MultiMeshError(f"{self._name}: captures a value of an enclosing transformation")
        closed, out_tree = trace.erased, trace.out_tree
        parameters = self._parameters.names(given)
        alike = match_results(signature, out_tree, list(map(_compat.shape_of, closed.out_avals)), donated, parameters)
        home = signature.home or Mesh(np.array(devices[:1]), ("devices",))
        results = per_leaf(self._out_shardings, out_tree, "out_shardings")
        out_specs = {i: spec for i, spec in enumerate(results) if spec is not None}
        layouts = out_specs | {i: spec for i, spec in enumerate(self._layouts) if spec is not None}
        types = result_specs(trace.call.closed.out_avals)
        traced = Traced(
            closed, devices, options, home, signature.specs, donated, alike, layouts, homes=signature.homes, types=types
        )
        stages = pipeline.run(traced)
        if not has_tasks(next(stages).made) and options.enable_fast_path and not signature.homes:
            if self._in_shardings is not None or self._out_shardings is not None:
                raise MultiMeshError(
                    f"{self._name}: nothing in this function is a task, so in_shardings and out_shardings name no "
                    "submesh; use jax.jit"
                )
            return Plain(
                jax.jit(_compat.set_name(lambda *leaves: trace.run(*leaves), self._name), donate_argnums=tuple(donated))
            )
        fit = fit_memory(Made(traced, {stage.name: stage for stage in stages}))
        if self._devices is not None:
            check_devices(fit.passes["reductions"].made, self._devices)
        if not signature.homes:
            blocks = numbers(len(signature.specs), fit.plan.stacks.arguments)
            leaf = {block: n for n, at in enumerate(blocks) for block in at}
            trace.defaults.update(
                (leaf[arg], fit.plan.submeshes[fit.plan.slots[slot].submesh]) for arg, slot in fit.plan.inputs
            )
        remarks = Remarks(self._name, fit.plan, leaf_names(signature.tree, parameters))
        remarks.warn_of_stacks()
        remarks.warn_of_copies(fit.passes["place"].made)
        remarks.warn_of_idle_axes()
        remarks.check_layouts(per_leaf(self._in_shardings, signature.tree, "in_shardings"), out_specs)
        return Lowered(
            fit.plan,
            fit.traced,
            out_tree,
            jax.tree.structure(given.trees()),
            remarks.names,
            memory_kinds(self._out_shardings, out_tree, "out_shardings"),
            self._name,
        )


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    devices: Sequence[jax.Device] | None = None,
    precompiled: str | os.PathLike[str] | None = None,
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
        The devices that tasks may use and that `register_task` callbacks count; by default all.
    precompiled
        A folder that `Compiled.save` has written, perhaps on a machine without these devices. Calls load the kernels
        from there and compile none. Kernels of another plan, JAX or device are refused. See docs/forecasts.md.

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
    """
    folder = None if precompiled is None else checks.path("jit: precompiled", precompiled)
    options = {"in_shardings": in_shardings, "out_shardings": out_shardings, "devices": devices, "precompiled": folder}
    static, donate = (static_argnums, static_argnames), (donate_argnums, donate_argnames)

    def jitted(fn: Callable[..., Any]) -> Jitted:
        if not callable(fn):
            raise UsageError(f"jit: expected a callable, got {type(fn).__name__}")
        wanted = "a sequence of jax devices"
        if devices is not None and not all(
            isinstance(d, jax.Device) for d in checks.many("jit: devices", devices, wanted)
        ):
            raise checks.refuse("jit: devices", wanted, devices)
        return Jitted(fn, Parameters(fn, static, donate), **options)

    return jitted if fn is None else jitted(fn)
