"""Arguments and results of a jitted function as flat leaves: signature, layouts given, which result replaces what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def replaced(signature: Signature, out_tree: Any, outs: Sequence[Any], donated: frozenset[int]) -> dict[int, int]:
    """Result leaf to the argument leaf that it replaces: subtrees with an argument's structure and types.

    A single array replaces only a donated one: many an activation has the shape of the input.
    """
    arguments: list[tuple[Any, int]] = []
    start = 0
    for child in signature.tree.children():
        if child.num_leaves > 1 or start in donated:
            arguments.append((child, start))
        start += child.num_leaves
    alike: dict[int, int] = {}

    def types(first: int, count: int) -> list[Any]:
        return [(shape, dtype) for shape, dtype, _ in signature.avals[first : first + count]]

    def visit(tree: Any, first: int) -> None:
        mine = [(tuple(o.shape), o.dtype) for o in outs[first : first + tree.num_leaves]]
        for child, at in arguments:
            if child == tree and types(at, child.num_leaves) == mine and tree.num_leaves:
                alike.update({first + k: at + k for k in range(tree.num_leaves)})
                return
        for child in tree.children():
            visit(child, first)
            first += child.num_leaves

    visit(out_tree, 0)
    return alike
