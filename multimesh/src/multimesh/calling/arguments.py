"""Arguments and results of a jitted function: parameters, flat leaves, layouts (also in types), replaced arguments."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import SequenceKey

from multimesh.core import _compat, checks
from multimesh.core.specs import spread, strip
from multimesh.errors import UsageError
from multimesh.stacked.row_blocks import is_stacked, spec_of_blocks

Layout: TypeAlias = NamedSharding | PartitionSpec | None


@dataclass(frozen=True)
class Types:
    """The mesh in the types of values outside of tasks, and the spec of each argument leaf; None: replicated."""

    mesh: AbstractMesh
    specs: tuple[PartitionSpec | None, ...]

    def structs(self, plain: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of argument leaves to trace with."""
        return [_compat.with_layout(x, spec, self.mesh) for x, spec in zip(plain, self.specs, strict=True)]


@dataclass(frozen=True)
class Signature:
    """The key of a trace: tree, types, layouts, static arguments and context."""

    tree: Any
    avals: tuple[Any, ...]
    specs: tuple[PartitionSpec | None, ...]  # None: the layout is derived
    kinds: tuple[str | None, ...]  # of memory; None: that of the device
    static: tuple[Any, ...]
    context: Any
    home: Mesh | None = None  # submesh of a function without tasks, if it gets a plan
    homes: tuple[Mesh | None, ...] = ()  # submeshes of leaves that no task reads, if leaves lie on several
    types: Types | None = None  # layouts in the types of leaves, if an axis is Explicit


class Arguments(NamedTuple):
    """The arguments of a call: positional ones, then keyword arguments sorted by name."""

    values: tuple[Any, ...]
    names: tuple[str, ...] = ()
    static: tuple[int, ...] = ()  # which of the values
    donated: tuple[int, ...] = ()

    @property
    def dynamic(self) -> list[Any]:
        """The values that are not static."""
        if not self.static:
            return list(self.values)
        return [value for i, value in enumerate(self.values) if i not in self.static]

    @property
    def key(self) -> tuple[Any, ...]:
        """Names, and static values with their types; hashable."""
        key = (self.names, *((type(self.values[i]), self.values[i]) for i in self.static))
        if self.static:
            try:
                hash(key)
            except TypeError:
                raise UsageError("static_argnums, static_argnames: static arguments must be hashable") from None
        return key

    def caller(self, fn: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
        """Make ``fn`` a function of the dynamic values. It keeps only the static ones alive."""
        count, names = len(self.values), self.names
        fixed = {i: self.values[i] for i in self.static}

        def call(dynamic: Sequence[Any]) -> Any:
            dynamic_values = iter(dynamic)
            full = [fixed[i] if i in fixed else next(dynamic_values) for i in range(count)]
            return fn(*full[: count - len(names)], **dict(zip(names, full[count - len(names) :], strict=True)))

        return call

    def trees(self) -> tuple[Any, Any]:
        """Positional and keyword arguments that are not static, in the form of JAX's ``in_tree``."""
        first = len(self.values) - len(self.names)
        dynamic = [(i, value) for i, value in enumerate(self.values) if i not in self.static]
        return tuple(v for i, v in dynamic if i < first), {self.names[i - first]: v for i, v in dynamic if i >= first}

    def donated_leaves(self, tree: Any) -> frozenset[int]:
        """Return the numbers of the donated leaves; ``tree`` is the tree of the dynamic values."""
        numbers = (i for i in range(len(self.values)) if i not in self.static)
        counts = [child.num_leaves for child in tree.children()]
        parts = zip(numbers, counts, itertools.accumulate(counts), strict=True)
        return frozenset(n for i, count, end in parts if i in self.donated for n in range(end - count, end))


class Parameters:
    """The parameters of a function. Some are static or donated, as given by number, by name, or by both."""

    def __init__(self, fn: Callable[..., Any], static: tuple[Any, Any] = ((), ()), donate: tuple[Any, Any] = ((), ())):
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._signature: inspect.Signature | None = None
        with contextlib.suppress(TypeError, ValueError):
            self._signature = inspect.signature(fn)
        self._kinds = {} if self._signature is None else {n: p.kind for n, p in self._signature.parameters.items()}
        self._places = [n for n, k in self._kinds.items() if k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD)]
        self._static, self._donate = self._both(*static, "static"), self._both(*donate, "donate")
        if both := self._static & self._donate:
            raise UsageError(
                f"jit: argument {min(both, key=str)!r} of {self._name} can't be static and donated; drop one"
            )
        self.key = (self._static, self._donate)

    def _both(self, nums: Any, names: Any, option: str) -> frozenset[int | str]:
        """Return numbers and names of the same parameters; a call may use either, if the function allows it."""
        places, kinds = self._places, self._kinds
        any_number, any_name = (
            self._signature is None or kind in kinds.values()
            for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        )
        label, entries = f"{option}_argnums", () if nums is None else nums if isinstance(nums, Iterable) else (nums,)
        numbers = [checks.integer(label, n) for n in checks.many(label, entries, "an int or ints")]
        if any_number and min(numbers, default=0) < 0:
            raise UsageError(f"{label}: count from the front; the function takes any number of positional arguments")
        for n in () if any_number else numbers:
            if not -len(places) <= n < len(places):
                count = len(places)
                raise UsageError(f"{label}: {n} is out of range for a function of {count} positional arguments")
        numbers = numbers if any_number else [n % len(places) for n in numbers]
        argnames = {names} if isinstance(names, str) or not isinstance(names, Iterable) else set(names)
        if any(not isinstance(name, str) for name in argnames):
            raise UsageError(f"{option}_argnames: must be a str or strs, got {names!r}")
        keywords = {n for n, k in kinds.items() if k in (k.KEYWORD_ONLY, k.POSITIONAL_OR_KEYWORD)}
        if argnames - keywords and not any_name:
            raise UsageError(
                f"{option}_argnames: {self._name} has no parameter {min(argnames - keywords)!r}; it has {[*keywords]}"
            )
        by_name = {places[i] for i in numbers if i < len(places) and places[i] in keywords}
        return frozenset((*numbers, *(places.index(n) for n in argnames if n in places), *argnames, *by_name))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call. Keyword arguments become positional if the function allows it."""
        names: tuple[str, ...] = ()
        if kwargs:
            if self._signature is not None:
                try:
                    bound = self._signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise UsageError(f"{self._name}: {error}") from None
                args, kwargs = bound.args, bound.kwargs
            names = tuple(sorted(kwargs))
            args = (*args, *(kwargs[name] for name in names))
        return Arguments(args, names, self._among(self._static, args, names), self._among(self._donate, args, names))

    def names(self, bound: Arguments) -> list[str]:
        """Return the names of the arguments of a call that are not static, as far as the signature has them."""
        places, first = self._places, len(bound.values) - len(bound.names)
        names = [*places[:first], *(f"argument {i}" for i in range(len(places), first)), *bound.names]
        return [name for i, name in enumerate(names) if i not in bound.static]

    @staticmethod
    def _among(chosen: frozenset[int | str], values: Sequence[Any], names: Sequence[str]) -> tuple[int, ...]:
        if not chosen:
            return ()
        return tuple(i for i, key in enumerate((*range(len(values) - len(names)), *names)) if key in chosen)


def flat_devices(devices: Any) -> tuple[jax.Device, ...]:
    """Return devices in any nesting as one row."""
    flat = tuple(np.asarray(devices, dtype=object).flat)
    if not flat or not all(isinstance(device, jax.Device) for device in flat):
        raise checks.refuse("devices=", "jax devices, in any nesting", devices)
    return flat


def leaf_names(tree: Any, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the leaves of the arguments, written as in source code: ``params['w'][0]``."""
    named = dict(enumerate(parameters))
    return tuple(
        named.get(argument.idx, f"argument {argument.idx}") + jax.tree_util.keystr(tuple(path))
        for argument, *path in _paths(tree)
    )


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in jax.tree.flatten_with_path(_dummy(tree))[0]]


def _dummy(tree: Any) -> Any:
    """Return the tree with bare objects as leaves, as JAX builds it too: every container must take these."""
    return jax.tree.unflatten(tree, [object() for _ in range(tree.num_leaves)])


def abstract(leaf: Any, name: str = "an argument") -> tuple[tuple[int, ...], Any, bool]:
    """Return shape, dtype and weak type of a leaf."""
    if isinstance(leaf, jax.Ref):
        raise UsageError(
            f"multimesh.jit: {name} is a mutable array (jax.new_ref), and programs of several submeshes can't share "
            "one; pass its value, x[...], return the new one, and write it outside: x[...] = new"
        )
    try:
        aval = leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jax.typeof(leaf)
    except TypeError:
        remedy = "name it in static_argnums or static_argnames"
        if callable(leaf):
            remedy += "; of a model, such as a module of Equinox, pass the arrays: eqx.partition(model, eqx.is_array)"
        raise UsageError(f"multimesh.jit: {name} of type {type(leaf).__name__} is no array; {remedy}") from None
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def layout_of(leaf: Any) -> NamedSharding | None:
    """Return the sharding of a leaf, or the layout in the type of a traced one; None if it has none."""
    sharding = jax.typeof(leaf).sharding if _compat.is_tracer(leaf) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def kind_of(leaf: Any, entry: Layout) -> str | None:
    """Return the kind of memory of a leaf, as its entry or itself says; None for any that types of JAX do not tell."""
    kinds = [getattr(sharding, "memory_kind", None) for sharding in (entry, getattr(leaf, "sharding", None))]
    return "pinned_host" if next(filter(None, kinds), None) == "pinned_host" else None


def spec_in(entry: Layout) -> PartitionSpec | None:
    """Return the spec of an entry of `spread_prefix`; for a stack that of a block."""
    return spec_of_blocks(entry) if isinstance(entry, NamedSharding) else entry


OF_ARGUMENTS = "of arguments"


def types_of(layouts: Sequence[Layout], mesh: AbstractMesh | str | None, more: Iterable[Mesh]) -> Types | None:
    """Return the types of leaves with these layouts; None if no axis is Explicit.

    The mesh in them is ``mesh``, or of `OF_ARGUMENTS` the common one of the leaves and of ``more``.
    """
    if isinstance(mesh, str):
        mesh = _compat.common_mesh([*(s.mesh for s in layouts if isinstance(s, NamedSharding)), *more])
    if mesh is None:
        return None
    specs = (s.spec if isinstance(s, NamedSharding) else s for s in layouts)
    return Types(mesh, tuple(None if s is None else s.update(partitions=_compat.partitions(strip(s))) for s in specs))


def widen(types: Types | None, count: int, task_meshes: Iterable[Mesh]) -> Types | None:
    """Return argument types on a mesh that has the axes of all arguments and of ``task_meshes``."""
    types_mesh = None if types is None else types.mesh
    mesh = _compat.common_mesh([*filter(None, (types_mesh,)), *task_meshes])
    if mesh is None or mesh == types_mesh:
        return types
    return Types(mesh, (None,) * count) if types is None else replace(types, mesh=mesh)


def homes_of(leaves: Sequence[Any]) -> tuple[Mesh | None, ...]:
    """Return the mesh of each leaf that has one, but for stacks: their blocks are where the function reads them."""
    layouts = (None if _compat.is_tracer(x) else getattr(x, "sharding", None) for x in leaves)
    meshes = (s.mesh if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) else None for s in layouts)
    return tuple(None if is_stacked(mesh) else mesh for mesh in meshes)


def is_sharding(x: Any) -> bool:
    """Return whether ``x`` is a leaf of a prefix of layouts."""
    return x is None or isinstance(x, jax.sharding.Sharding | PartitionSpec)


def spread_prefix(shardings: Any, tree: Any, keyword: str) -> list[Layout]:
    """Return the entry of each leaf in a pytree prefix of ``NamedSharding``, ``PartitionSpec`` and None (not given)."""
    if isinstance(shardings, list) and tree.num_leaves:
        shardings = tuple(shardings)
    dummy = _dummy(tree)
    if isinstance(dummy, list) and isinstance(shardings, tuple):
        dummy = tuple(dummy)
    try:
        leaves = spread(shardings, dummy, is_leaf=is_sharding)
    except ValueError as error:
        raise UsageError(f"{keyword}: not a pytree prefix of the arguments: {error}") from None
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, NamedSharding | PartitionSpec)):
            raise UsageError(f"{keyword}: use NamedSharding, PartitionSpec or None, not {type(leaf).__name__}")
    return leaves


def match_results(
    signature: Signature, out_tree: Any, outs: Sequence[Any], donated: frozenset[int], parameters: Sequence[str]
) -> dict[int, int]:
    """Map each result leaf to the argument leaf that it replaces.

    A subtree of the results replaces an argument with its structure and types. The largest subtrees come first, and
    each argument is replaced once: by the result of its name, or else in order. Further results with the same structure
    take the layout of the first, as gradients beside new parameters. A single array replaces only a donated one,
    because many activations have the shape of the input.
    """
    argument_types = [(shape, dtype) for shape, dtype, _ in signature.avals]
    result_types = [(tuple(o.shape), o.dtype) for o in outs]
    arguments: dict[Any, list[_Subtree]] = {}
    for part in _subtrees(signature.tree, argument_types, parameters):
        if part.depth and (len(part.leaves) > 1 or (part.depth == 1 and part.leaves[0] in donated)):
            arguments.setdefault(part.kind, []).append(part)
    results = [part for part in _subtrees(out_tree, result_types) if part.kind in arguments]
    named = {(result.kind, result.name) for result in results if result.name}
    replaced: dict[int, int] = {}
    used: set[int] = set()
    for result in sorted(results, key=lambda part: -len(part.leaves)):
        if not replaced.keys().isdisjoint(result.leaves):
            continue
        free = [a for a in arguments[result.kind] if used.isdisjoint(a.leaves)]
        of_name = (a for a in free if result.name and a.name == result.name)
        in_order = (a for a in free if (a.kind, a.name) not in named)
        argument = next(itertools.chain(of_name, in_order), None)
        if argument is not None:
            used.update(argument.leaves)
        replaced.update(zip(result.leaves, (argument or arguments[result.kind][0]).leaves, strict=True))
    return replaced


@dataclass(frozen=True)
class _Subtree:
    """A part of a pytree: its structure and types, its leaves, its depth, and its key or argument name."""

    kind: tuple[Any, tuple[Any, ...]]
    leaves: range
    depth: int
    name: str


def _subtrees(tree: Any, types: Sequence[Any], parameters: Sequence[str] = ()) -> Iterator[_Subtree]:
    """Yield every subtree with leaves, an outer one before its inner ones."""
    paths = _paths(tree)

    def visit(part: Any, start: int, depth: int) -> Iterator[_Subtree]:
        leaves = range(start, start + part.num_leaves)
        if not leaves:
            return
        key = paths[start][depth - 1] if depth else None
        name = str(getattr(key, "key", getattr(key, "name", "")))
        if depth == 1 and isinstance(key, SequenceKey) and key.idx < len(parameters):
            name = parameters[key.idx]
        yield _Subtree((part, tuple(types[start : leaves.stop])), leaves, depth, name)
        for child in part.children():
            yield from visit(child, start, depth + 1)
            start += child.num_leaves

    return visit(tree, 0, 0)
