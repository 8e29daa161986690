"""``multimesh.jit``: trace once, partition, compile, run."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh import _compat, contexts, ir, marks
from multimesh.arguments import (
    Signature,
    abstract,
    dynamic,
    leaf_names,
    parameter_names,
    per_leaf,
    replaced,
    spec_of,
    stripped,
)
from multimesh.contexts import Options
from multimesh.errors import MultiMeshError, UsageError
from multimesh.layouts import derive, matching
from multimesh.lowered import Compiled, Lowered, Plain
from multimesh.passes.pipeline import Traced, passes
from multimesh.passes.place import has_tasks
from multimesh.plan import Plan
from multimesh.tracing import partitioning
from multimesh.transforms import Call

if TYPE_CHECKING:
    from multimesh.profiling import Profile


@dataclass(frozen=True, eq=False)
class _Recent:
    """The arguments of the last call: when the next ones are alike, their signature need not be made again."""

    tree: Any
    static: tuple[Any, ...]
    context: Any
    traits: tuple[Any, ...]
    compiled: Compiled | Plain

    def fits(self, leaves: Sequence[Any], tree: Any, static: tuple[Any, ...], context: Any) -> bool:
        """Whether a call has the same types, layouts and static arguments, by identity of what JAX shares."""
        if tree != self.tree or static != self.static or context != self.context:
            return False
        for leaf, (kind, sharding, shape, dtype, weak) in zip(leaves, self.traits, strict=True):
            if type(leaf) is not kind or leaf.shape != shape or leaf.dtype != dtype:
                return False
            if sharding is not None and (leaf.sharding is not sharding or getattr(leaf, "weak_type", False) != weak):
                return False
        return True


class _Context(NamedTuple):
    """What a trace depends on beside the arguments."""

    options: Options
    registrations: tuple[marks.Registration, ...]
    jax: Any


def _home(leaves: Iterable[Any]) -> Mesh | None:
    """The mesh of arguments, for a function without tasks; one device where they have none or several."""
    meshes = {s.mesh for s in (getattr(leaf, "sharding", None) for leaf in leaves) if isinstance(s, NamedSharding)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return mesh if isinstance(mesh, Mesh) else None


def _traits(leaf: Any) -> tuple[Any, ...]:
    """What `_Recent` compares; a leaf that is neither a JAX nor a NumPy array never fits."""
    if isinstance(leaf, jax.Array):
        return type(leaf), leaf.sharding, leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    return (np.ndarray if type(leaf) is np.ndarray else None, None, np.shape(leaf), getattr(leaf, "dtype", None), False)


class Jitted:
    """The result of `jit`; see there."""

    def __init__(
        self,
        fn: Callable[..., Any],
        donate: tuple[int, ...],
        static: tuple[int, ...],
        in_shardings: Any,
        out_shardings: Any,
        devices: Sequence[jax.Device] | None,
        *,
        autoshard: bool = False,
    ):
        self._fn = fn
        self._autoshard = autoshard
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._donate, self._static = donate, static
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._devices = tuple(devices) if devices is not None else None
        self._compiled: dict[Signature, Compiled | Plain] = {}
        self._recent: _Recent | None = None
        self._calls: dict[Signature, tuple[Call, list[Any], Any]] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; traces and compiles when the types, layouts or static arguments are new."""
        positional = self._positional(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic(positional, self._static))
        if not _compat.eager() or any(map(_compat.is_tracer, leaves)):
            return self._transformed(positional, leaves, tree)
        recent = self._recent
        static, context = self._static_values(positional), self._context()
        if recent is not None and recent.fits(leaves, tree, static, context):
            return recent.compiled.run_flat(leaves)
        signature = self._signature(leaves, tree, positional)
        compiled = self._compiled.get(signature) or self._compile(positional, signature)
        self._recent = _Recent(tree, static, context, tuple(map(_traits, leaves)), compiled)
        return compiled.run_flat(leaves)

    def _transformed(self, positional: tuple[Any, ...], leaves: Sequence[Any], tree: Any) -> Any:
        """A call under a transformation: part of the program that is traced, else a primitive that runs as a plan."""
        if _compat.staged():
            return self._fn(*positional)
        key = replace(self._signature(leaves, tree, positional), specs=())
        call, captured, out_tree = self._calls.get(key) or self._traced(positional, key)
        if not captured:
            self._calls[key] = call, captured, out_tree
        arrays = [x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in (*captured, *leaves)]
        return jax.tree.unflatten(out_tree, call(*arrays))

    def _traced(self, positional: tuple[Any, ...], signature: Signature) -> tuple[Call, list[Any], Any]:
        """The traced function, the values of the enclosing transformation that it captures, and its result's tree."""
        flat, structs = self._flat(positional, signature)
        with _compat.devices_free():
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*structs)
            closed, captured = _compat.hoisted(closed)
        return Call(closed, self._alike), captured, jax.tree.structure(shapes)

    def _alike(self, fn: Callable[..., Any]) -> Jitted:
        """`jit` of another function as this one was jitted."""
        return Jitted(fn, (), (), None, None, self._devices, autoshard=self._autoshard)

    def _compile(self, positional: tuple[Any, ...], signature: Signature) -> Compiled | Plain:
        with self._lock:
            compiled = self._compiled.get(signature)
            if compiled is None and signature.context.options.autoshard:
                compiled = matching(signature, self._compiled)
            if compiled is None:
                lowered = self._lower(positional, signature)
                compiled = lowered if isinstance(lowered, Plain) else lowered.compile()
            self._compiled[signature] = compiled
            return compiled

    def _context(self) -> _Context:
        options = contexts.current()
        if self._autoshard:
            options = contexts.autosharded(options)
        return _Context(options, marks.registrations(), _compat.trace_context())

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and partition for these arguments (arrays or ``jax.ShapeDtypeStruct``)."""
        positional = self._positional(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic(positional, self._static))
        lowered = self._lower(positional, self._signature(leaves, tree, positional))
        if isinstance(lowered, Plain):
            raise self._without_tasks()
        return lowered

    def _without_tasks(self) -> MultiMeshError:
        if contexts.ignoring():
            return MultiMeshError(f"{self._name}: tasks are ignored under ignore_transforms; leave it for a plan")
        return MultiMeshError(f"{self._name}: nothing in this function is a task; wrap parts of it in multimesh.task")

    @property
    def compiled(self) -> tuple[Compiled | Plain, ...]:
        """What calls have compiled so far, one for each signature."""
        return tuple(self._compiled.values())

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments; nothing is compiled or run."""
        return self.lower(*args, **kwargs).plan

    def profile(self, *args: Any, repeats: int = 3) -> Profile:
        """`Compiled.profile` for these arguments; compiles unless a call already did."""
        compiled = self.prepare(*args)
        if isinstance(compiled, Plain):
            raise self._without_tasks()
        return compiled.profile(*dynamic(args, self._static), repeats=repeats)

    def prepare(self, *args: Any) -> Compiled | Plain:
        """Compile for these arguments (arrays or ``jax.ShapeDtypeStruct``), so that a call need not."""
        leaves, tree = jax.tree.flatten(dynamic(args, self._static))
        return self._compile(args, self._signature(leaves, tree, args))

    def memory_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, int], ...]:
        """`Compiled.memory_analysis` for these arguments."""
        return self.lower(*args, **kwargs).compile().memory_analysis()

    def cost_analysis(self, *args: Any, **kwargs: Any) -> tuple[dict[str, float], ...]:
        """`Compiled.cost_analysis` for these arguments."""
        return self.lower(*args, **kwargs).compile().cost_analysis()

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return args
        try:
            bound = inspect.signature(self._fn).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self._name}: {error}") from None
        if bound.kwargs:
            raise UsageError(
                f"{self._name}: keyword-only arguments ({', '.join(bound.kwargs)}) can't be "
                " passed through multimesh.jit; make them positional"
            )
        return bound.args

    def _signature(self, leaves: Sequence[Any], tree: Any, positional: tuple[Any, ...]) -> Signature:
        avals = tuple(map(abstract, leaves))
        given = per_leaf(self._in_shardings, tree, "in_shardings") if self._in_shardings is not None else None
        context = self._context()
        specs = [spec_of(leaf, or_none=context.options.autoshard) for leaf in leaves]
        if given is not None:
            specs = [spec if g is None else stripped(g) for spec, g in zip(specs, given, strict=True)]
        home = None if context.options.enable_fast_path else _home(leaves)
        return Signature(tree, avals, tuple(specs), self._static_values(positional), context, home)

    def _static_values(self, positional: tuple[Any, ...]) -> tuple[Any, ...]:
        static = tuple((type(positional[i]), positional[i]) for i in self._static if i < len(positional))
        try:
            hash(static)
        except TypeError:
            raise UsageError("static_argnums: static arguments must be hashable") from None
        return static

    def _flat(self, positional: tuple[Any, ...], signature: Signature) -> tuple[Callable[..., Any], list[Any]]:
        """The function of flat leaves, and their types."""
        structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in signature.avals]
        count, fixed = len(positional), {i: positional[i] for i in self._static if i < len(positional)}

        def flat(*leaves: Any) -> Any:
            dynamic = iter(jax.tree.unflatten(signature.tree, leaves))
            full = [fixed[i] if i in fixed else next(dynamic) for i in range(count)]
            with partitioning():
                return self._fn(*full)

        return flat, structs

    def _lower(self, positional: tuple[Any, ...], signature: Signature) -> Lowered | Plain:
        flat, structs = self._flat(positional, signature)
        options: Options = signature.context.options
        devices = self._devices or tuple(jax.devices())
        if options.ignore_transforms:
            return Plain(self._one_program(flat, signature), devices[0])
        with _compat.devices_free():
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*structs)
        out_tree = jax.tree.structure(shapes)
        donated = self._donated_leaves(signature.tree)
        parameters = parameter_names(self._fn, self._static)
        alike = replaced(signature, out_tree, jax.tree.leaves(shapes), donated, parameters)
        home = signature.home or Mesh(np.array(devices[:1]), ("devices",))
        traced = Traced(closed, devices, options, home, signature.specs, donated, alike)
        stages = passes(traced)
        if not has_tasks(next(stages).made) and options.enable_fast_path:
            return self._plain(flat, signature)
        made = {stage.name: stage.made for stage in stages}
        program, plan = made["reductions"], made["planning"]
        self._check_devices(program)
        out_specs = self._result_specs(out_tree)
        self._check_axes(plan, signature.tree, out_specs.values())
        return Lowered(
            plan,
            traced,
            tuple(PartitionSpec() if spec is None else spec for spec in signature.specs),
            out_tree,
            out_specs,
            jax.tree.structure(tuple(dynamic(positional, self._static))),
            derive(plan, program, signature.specs),
            leaf_names(signature.tree, parameters),
        )

    def _check_axes(self, plan: Plan, tree: Any, out_specs: Iterable[PartitionSpec]) -> None:
        """Refuse a given layout that no submesh has the axes for."""
        given = per_leaf(self._in_shardings, tree, "in_shardings") if self._in_shardings is not None else []
        known = {axis for mesh in plan.submeshes for axis in mesh.axis_names}
        for spec in filter(None, (*given, *out_specs)):
            entries = ((e,) if isinstance(e, str) else e for e in spec)
            named = {axis for entry in entries if isinstance(entry, tuple) for axis in entry}
            if named - known:
                raise UsageError(
                    f"{self._name}: in_shardings or out_shardings name axis {min(named - known)!r}, which no "
                    f"submesh has; axes are {sorted(known)}"
                )

    def _plain(self, flat: Callable[..., Any], signature: Signature) -> Plain:
        if self._in_shardings is not None or self._out_shardings is not None:
            raise MultiMeshError(
                f"{self._name}: nothing in this function is a task, so in_shardings and out_shardings name no submesh; "
                "use jax.jit"
            )
        return Plain(self._one_program(flat, signature))

    def _one_program(self, flat: Callable[..., Any], signature: Signature) -> Any:
        return jax.jit(flat, donate_argnums=tuple(self._donated_leaves(signature.tree)))

    def _check_devices(self, program: ir.Program) -> None:
        if self._devices is None:
            return
        known = set(self._devices)
        for item in program.items:
            for op in item.ops if isinstance(item, ir.Loop) else (item,):
                if op.task is not None and not known.issuperset(op.task.mesh.devices.flat):
                    raise UsageError(
                        f"{_compat.user_line(op.source)}: task {op.task.name!r} is on devices that are not among "
                        "jit(devices=...)"
                    )

    def _donated_leaves(self, tree: Any) -> frozenset[int]:
        dynamic = (i for i in itertools.count() if i not in self._static)
        donated: list[int] = []
        start = 0
        for number, child in zip(dynamic, tree.children(), strict=False):
            if number in self._donate:
                donated += range(start, start + child.num_leaves)
            start += child.num_leaves
        return frozenset(donated)

    def _result_specs(self, out_tree: Any) -> dict[int, PartitionSpec]:
        if self._out_shardings is None:
            return {}
        given = per_leaf(self._out_shardings, out_tree, "out_shardings")
        return {i: spec for i, spec in enumerate(given) if spec is not None}


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    devices: Sequence[jax.Device] | None = None,
) -> Any:
    """Compile a function whose tasks run on different submeshes.

    The function is traced once per signature (types, layouts, static arguments), cut into one program per submesh and
    dataflow level, and run; data moves between submeshes by itself. Results stay on the submesh that made them.

    Parameters
    ----------
    fn
        The function; without it ``jit`` is a decorator with options.
    donate_argnums
        Arguments whose buffers the call may reuse; they can't be used after it.
    static_argnums
        Arguments that are Python values, hashed into the signature.
    in_shardings, out_shardings
        Pytree prefixes of ``NamedSharding``, ``PartitionSpec`` or None: the layout of arguments and results on their
        submesh. By default arguments keep theirs, and new parameters take that of the old.
    devices
        The devices that tasks may use and that `register_task` callbacks count; by default all.

    Returns
    -------
    Jitted
        Called like ``fn``; has ``lower(*args).compile()``, ``plan(*args)``, ``memory_analysis(*args)`` and
        ``cost_analysis(*args)``. Under ``jax.grad``, ``jax.vmap``, ``jax.jvp`` and ``jax.linearize`` it runs as plans
        too; inside what ``jax.jit`` or ``lax.scan`` traces it is ``fn`` itself.

    Raises
    ------
    MultiMeshError
        When the function can't be partitioned; names the user's line.
    """
    if fn is None:
        return functools.partial(
            jit,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            devices=devices,
        )
    if not callable(fn):
        raise UsageError(f"jit: expected a callable, got {type(fn).__name__}")
    count = _positional_count(fn)
    return Jitted(
        fn,
        _argnums(donate_argnums, count, "donate_argnums"),
        _argnums(static_argnums, count, "static_argnums"),
        in_shardings,
        out_shardings,
        devices,
    )


def _positional_count(fn: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _argnums(given: int | Sequence[int], count: int | None, what: str) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    if any(not isinstance(n, int) for n in numbers):
        raise UsageError(f"{what}: must be an int or ints, got {given!r}")
    if count is None and any(n < 0 for n in numbers):
        raise UsageError(f"{what}: count from the front; the function takes any number of positional arguments")
    if count is not None:
        for n in numbers:
            if not -count <= n < count:
                raise UsageError(f"{what}: {n} is out of range for a function of {count} positional arguments")
        numbers = tuple(n % count for n in numbers)
    return tuple(sorted(set(numbers)))
