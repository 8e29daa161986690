"""How results of microbatches are reduced: sums, means, extremes, the last, ratios of sums, and reductions of users.

A reduction is an object with three functions, as an optimizer of optax has two:

* ``init(like)`` returns the state before the first microbatch; ``like`` has the shapes and dtypes of a result;
* ``update(state, result)`` returns the state with one more result, of the tree and types of the old state;
* ``finalize(state, count)`` returns what all ``count`` microbatches give.

Each is a function of arrays that JAX can trace. A state that only has terms added to it is a sum to `multimesh.jit`:
gradients may go through it. Any other goes from one microbatch to the next, on the submesh that makes the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.core import _compat
from multimesh.errors import UsageError

_SMALL = 65_536  # elements: 128 KiB more for an accumulator of float32 in place of bfloat16


def accumulator(like: Any, target: Any) -> Any:
    """Return the dtype in which arrays with the shape and dtype of ``like`` are summed.

    ``target`` is a floating dtype, or None for float32 where that takes little memory. Dtypes that are no floating ones
    or have as many bits are kept.
    """
    shape, dtype = like.shape, like.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if target is None:
        target = jnp.dtype(jnp.float32) if math.prod(shape) <= _SMALL else dtype
    return target if jnp.finfo(target).bits > jnp.finfo(dtype).bits else dtype


@runtime_checkable
class Reduction(Protocol):
    """The type of ``reduce=`` of `multimesh.microbatch` for a subtree of its results."""

    def init(self, like: Any) -> Any:
        """Return the state before the first microbatch, for results with the shapes and dtypes of ``like``."""

    def update(self, state: Any, result: Any) -> Any:
        """Return the state with the result of one more microbatch."""

    def finalize(self, state: Any, count: int) -> Any:
        """Return what ``count`` microbatches give together."""


def is_reduction(x: Any) -> bool:
    """Return whether ``x`` is a leaf of a prefix of reductions: a name or an object. A class is none."""
    return isinstance(x, str) or (isinstance(x, Reduction) and not isinstance(x, type))


@dataclass(frozen=True)
class _Sums:
    dtype: Any = None

    def init(self, like: Any) -> Any:
        """Return zeros. Under Explicit axes their types have layouts."""
        return jax.tree.map(lambda x: _compat.fill(x, 0, accumulator(x, self.dtype)), like)

    def update(self, state: Any, result: Any) -> Any:
        """Add a result."""
        return jax.tree.map(lambda c, x: jnp.add(c, x if c.dtype == x.dtype else x.astype(c.dtype)), state, result)


@dataclass(frozen=True)
class Total(_Sums):
    """The sum, or the mean. Few bits are summed in ``dtype`` (see `accumulator`), and cast back.

    Its state only has terms added to it, so passes see an `ir.Sum`: a gradient may go through it.
    """

    mean: bool = False

    def finalize(self, state: Any, count: int) -> Any:
        """Divide a mean."""
        return jax.tree.map(lambda c: _compat.divide(c, count), state) if self.mean else state


@dataclass(frozen=True)
class Fold:
    """A state that ``of(state, result)`` replaces, as a maximum does, from ``start(dtype)`` on."""

    of: Callable[[Any, Any], Any]
    start: Callable[[Any], Any]

    def init(self, like: Any) -> Any:
        """Return the first state, which any result replaces."""
        return jax.tree.map(lambda x: _compat.fill(x, self.start(x.dtype), x.dtype), like)

    def update(self, state: Any, result: Any) -> Any:
        """Take one more result."""
        return jax.tree.map(self.of, state, result)

    def finalize(self, state: Any, count: int) -> Any:
        """Return the last state."""
        return state


@dataclass(frozen=True)
class Ratio(_Sums):
    """The sums of some results over the sum of another: of losses, or gradients, over that of tokens.

    Results under it are pairs ``(numerators, denominator)``: a pytree, and a scalar of any numeric dtype. Few bits are
    summed in ``dtype``; None: in float32 where that takes little memory. The mean over microbatches is another number
    where these have unlike numbers of tokens. Where all denominators are zero the result is zero.

    Examples
    --------
    >>> mean = mm.microbatch(sums_of, size=4, argnum=1, reduce=mm.Ratio())  # doctest: +SKIP
    """

    def init(self, like: Any) -> Any:
        """Return zeros; refuse results that are no pair."""
        if not (isinstance(like, tuple | list) and [getattr(x, "shape", None) for x in like[1:]] == [()]):
            shapes = jax.tree.map(lambda x: x.shape, like)
            raise UsageError(f"microbatch: reduce=Ratio() takes (numerators, a scalar), not results of shapes {shapes}")
        return super().init(like)

    def finalize(self, state: Any, count: int) -> Any:
        """Divide."""
        numerators, denominator = state
        divisor = jnp.where(denominator == 0, 1, denominator)
        return jax.tree.map(lambda x: x / divisor.astype(x.dtype), numerators)


def _bound(dtype: Any, least: bool) -> Any:
    """Return the least number of a dtype, or the largest."""
    if dtype == jnp.bool_:
        return not least
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if least else jnp.inf
    return jnp.iinfo(dtype).min if least else jnp.iinfo(dtype).max


NAMED = {
    "max": Fold(jnp.maximum, lambda dtype: _bound(dtype, True)),
    "min": Fold(jnp.minimum, lambda dtype: _bound(dtype, False)),
    "last": Fold(lambda _, result: result, lambda _: 0),
}
"""Reductions by name, beside `STATELESS`. One that is added here needs no other line."""

STACKS = ("stack", "rows")
"""Reductions that keep results microbatch by microbatch."""

STATELESS = ("sum", "mean", *STACKS)
"""Reductions that need no state but sums."""


def is_float0(x: Any) -> bool:
    """Return whether a result is the gradient of an integer, which has no numbers."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoGradient:
    """The gradient of an array of integers in trees that are reduced: one without leaves, so that it passes through."""

    shape: tuple[int, ...]

    @staticmethod
    def restore(tree: Any) -> Any:
        """Return a tree with JAX's arrays of float0 in the place of these."""
        return jax.tree.map(
            lambda x: np.zeros(x.shape, jax.dtypes.float0) if isinstance(x, NoGradient) else x,
            tree,
            is_leaf=lambda x: isinstance(x, NoGradient),
        )


@dataclass(frozen=True)
class ReducedPart:
    """Some leaves of a result, of one tree, and how they are reduced: ``"stack"``, ``"rows"`` or a reduction."""

    start: int
    tree: Any
    how: Any

    def of(self, leaves: Sequence[Any]) -> Any:
        """Return the part of a result's leaves, with gradients of integers as `NoGradient`."""
        part = leaves[self.start : self.start + self.tree.num_leaves]
        return jax.tree.unflatten(self.tree, [NoGradient(x.shape) if is_float0(x) else x for x in part])


def parts_of(result: Any, reduce: Any, dim: int, size: int | None, dtype: Any) -> tuple[Any, list[ReducedPart]]:
    """Return the tree of reduced results, with a leaf for each part, and the parts of a result."""
    leaves = jax.tree.leaves(result)
    names = [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.flatten_with_path(result)[0]]
    try:
        entries, above = jax.tree.flatten(reduce, is_leaf=is_reduction)
        subtrees = above.flatten_up_to(result)
    except ValueError as error:
        raise UsageError(f"microbatch: reduce= must be a pytree prefix of the result: {error}") from None
    one, parts, trees = jax.tree.structure(0), list[ReducedPart](), list[Any]()
    start = 0
    for entry, subtree in zip(entries, subtrees, strict=True):
        tree = jax.tree.structure(subtree)
        if isinstance(entry, str) or not is_reduction(entry):
            numbers = range(start, start + tree.num_leaves)
            parts += [ReducedPart(n, one, _way(names[n], leaves[n], entry, dim, size, dtype)) for n in numbers]
            trees.append(tree)
        else:
            parts.append(ReducedPart(start, tree, entry))
            trees.append(one)
        start += tree.num_leaves
    dummies = [jax.tree.unflatten(tree, [object()] * tree.num_leaves) for tree in trees]
    return jax.tree.structure(jax.tree.unflatten(above, dummies)), parts


def _way(name: str, leaf: Any, way: Any, dim: int, size: int | None, dtype: Any) -> Any:
    """Return how one leaf is reduced; refuse a way that does not fit it."""
    if way == "stack" or way in NAMED:
        return NAMED.get(way, way)
    if way not in STATELESS:
        names = ", ".join(f'"{name}"' for name in (*STATELESS, *NAMED))
        raise UsageError(f"microbatch: reduce= takes {names} and objects with init, update and finalize, not {way!r}")
    if way == "rows":
        if size is None or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != size:
            raise UsageError(
                f'microbatch: reduce="rows" takes results with size= rows in dimension {dim}, not of shape '
                f'{leaf.shape}; take "stack" for it'
            )
        return way
    if not is_float0(leaf) and not jnp.issubdtype(leaf.dtype, jnp.inexact if way == "mean" else jnp.number):
        action = "averaged" if way == "mean" else "summed"
        count = way == "mean" and jnp.issubdtype(leaf.dtype, jnp.number)
        remedy = 'sum it, as reduce=("mean", "sum") does with the second of two, or ' if count else ""
        raise UsageError(
            f'microbatch: a result of dtype {leaf.dtype} can\'t be {action}: {name}; {remedy}take reduce="stack" for it'
        )
    return Total(dtype, way == "mean")
