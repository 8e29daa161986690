"""Arguments and results of a jitted function as flat leaves: signature, layouts given, which result replaces what."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import SequenceKey

from multimesh import _compat
from multimesh.errors import UsageError


@dataclass(frozen=True)
class Signature:
    """What a trace depends on: tree, types, layouts, static arguments, and the context it is made in."""

    tree: Any
    avals: tuple[Any, ...]
    specs: tuple[PartitionSpec | None, ...]  # None: to be derived
    static: tuple[Any, ...]
    context: Any
    home: Mesh | None = None  # where a function without tasks is planned, when it is not plain jit


def dynamic(positional: tuple[Any, ...], static: tuple[int, ...]) -> list[Any]:
    """Arguments that are not static."""
    return [a for i, a in enumerate(positional) if i not in static]


def parameter_names(fn: Callable[..., Any], static: tuple[int, ...]) -> list[str]:
    """Names of the parameters that are not static, as far as ``fn`` tells them."""
    try:
        return dynamic(tuple(inspect.signature(fn).parameters), static)
    except (TypeError, ValueError):
        return []


def leaf_names(tree: Any, parameters: Sequence[str]) -> tuple[str, ...]:
    """Names of the argument leaves as in the source of a function: ``params['w'][0]``."""
    names = []
    for argument, *path in _paths(tree):
        known = argument.idx < len(parameters)
        name = parameters[argument.idx] if known else f"argument {argument.idx}"
        names.append(name + jax.tree_util.keystr(tuple(path)))
    return tuple(names)


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in jax.tree.flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))[0]]


def abstract(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype and weak type of a leaf."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False))
    try:
        struct = _compat.abstractify(leaf)
    except TypeError:
        raise UsageError(
            f"multimesh.jit: an argument of type {type(leaf).__name__} is no array; name it in static_argnums"
        ) from None
    return tuple(struct.shape), struct.dtype, bool(struct.weak_type)


def spec_of(x: Any, *, or_none: bool = False) -> PartitionSpec | None:
    """Spec of an array or of anything with a ``sharding``; where it has none: replicated, or None."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return stripped(sharding.spec)
    return None if or_none else PartitionSpec()


def stripped(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing entries that say nothing."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def per_leaf(shardings: Any, tree: Any, what: str) -> list[PartitionSpec | None]:
    """Partition spec per leaf of a pytree prefix of ``NamedSharding``, ``PartitionSpec`` and None (= not given)."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, jax.sharding.Sharding | PartitionSpec)

    def spec(x: Any) -> PartitionSpec | None:
        if isinstance(x, NamedSharding):
            return x.spec
        if x is None or isinstance(x, PartitionSpec):
            return x
        raise UsageError(f"{what}: use NamedSharding, PartitionSpec or None, not {type(x).__name__}")

    if isinstance(shardings, list) and tree.num_leaves:
        shardings = tuple(shardings)
    dummy = jax.tree.unflatten(tree, range(tree.num_leaves))
    if isinstance(dummy, list) and isinstance(shardings, tuple):
        dummy = tuple(dummy)
    try:
        spread = jax.tree.map(lambda s, part: [s] * len(jax.tree.leaves(part)), shardings, dummy, is_leaf=is_leaf)
    except ValueError as error:
        raise UsageError(f"{what}: not a pytree prefix of the arguments: {error}") from None
    return [spec(s) for s in jax.tree.leaves(spread, is_leaf=is_leaf)]


def replaced(
    signature: Signature, out_tree: Any, outs: Sequence[Any], donated: frozenset[int], parameters: Sequence[str]
) -> dict[int, int]:
    """Result leaf to the argument leaf that it replaces: subtrees of results with an argument's structure and types.

    The largest first, each argument is replaced once: by the result of its name, else in order. Further results of a
    kind take the layout of the first (gradients beside new parameters). A single array replaces only a donated one:
    many an activation has the shape of the input.
    """
    given = [(shape, dtype) for shape, dtype, _ in signature.avals]
    made = [(tuple(o.shape), o.dtype) for o in outs]
    arguments: dict[Any, list[_Subtree]] = {}
    for part in _subtrees(signature.tree, given, parameters):
        if part.depth and (len(part.leaves) > 1 or (part.depth == 1 and part.leaves[0] in donated)):
            arguments.setdefault(part.kind, []).append(part)
    results = [part for part in _subtrees(out_tree, made) if part.kind in arguments]
    named = {(result.kind, result.name) for result in results if result.name}
    alike: dict[int, int] = {}
    used: set[int] = set()
    for result in sorted(results, key=lambda part: -len(part.leaves)):
        if not alike.keys().isdisjoint(result.leaves):
            continue
        free = [a for a in arguments[result.kind] if used.isdisjoint(a.leaves)]
        of_name = (a for a in free if result.name and a.name == result.name)
        in_order = (a for a in free if (a.kind, a.name) not in named)
        argument = next(itertools.chain(of_name, in_order), None)
        if argument is not None:
            used.update(argument.leaves)
        alike.update(zip(result.leaves, (argument or arguments[result.kind][0]).leaves, strict=True))
    return alike


@dataclass(frozen=True)
class _Subtree:
    """Part of a pytree: what it is made of, which leaves it has, how deep it is, and its key or argument's name."""

    kind: tuple[Any, tuple[Any, ...]]
    leaves: range
    depth: int
    name: str


def _subtrees(tree: Any, types: Sequence[Any], parameters: Sequence[str] = ()) -> Iterator[_Subtree]:
    """Every subtree that has leaves, the outer before the inner."""
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
