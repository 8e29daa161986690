"""MaxText's gradient accumulation as the loop over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

import multimesh
from multimesh import _compat
from multimesh.errors import UnsupportedError

_PARAMETERS = "ga_params"
"""What MaxText carries through its loop and no microbatch changes."""

_STATE = "rest_state"
"""What MaxText hands from a microbatch to the next: keys of random number generators, and how often each was used."""

_CALLS = ("jit", "checkpoint", "remat2")
_IDENTITIES = ("multimesh_leave", "copy", "sharding_constraint")


def accumulate_microbatches(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: dict[str, Any],
    batch: Any,
    *,
    length: int,
    home: Callable[[Any], Mesh],
    **loop: Any,
) -> tuple[dict[str, Any], Any]:
    """Run MaxText's accumulation over microbatches as the microbatch loop.

    A pipeline has no order in which one microbatch could hand its state to the next. But what MaxText hands on only
    counts: microbatch i gets its counters from i.

    Parameters
    ----------
    body
        MaxText's, of carry and microbatch: the carry's sums grow, its parameters stay, the state counts.
    init
        The carry; its sums are zero.
    batch
        Arrays whose first dimension is the rows of the step. Microbatch i takes rows i, i + length, ..., in MaxText
        as in `multimesh.microbatch`.
    length
        Number of microbatches.
    home
        Submesh of a leaf of the state, by its path.
    loop
        Further arguments of `multimesh.microbatch`.

    Raises
    ------
    UnsupportedError
        Where the state does more than count.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    sums = {key: value for key, value in init.items() if key not in (_PARAMETERS, _STATE)}
    micro = _trace(body, init, jax.tree.map(lambda x: x[: rows // length], batch))
    strides = micro.strides()

    leaves, tree = jax.tree.flatten(init[_STATE])

    def before(microbatch: jax.Array) -> Any:
        """State that a microbatch starts with."""
        moved = [x + stride * microbatch if stride else x for x, stride in zip(leaves, strides, strict=True)]
        return jax.tree.unflatten(tree, moved)

    def final(path: Any, x: Any, stride: int) -> Any:
        """State after all microbatches, where it was before: no layer says so of what only the next step reads."""
        if not stride:
            return x
        return multimesh.task(lambda x: x + stride * length, "count", mesh=home(path))(x)

    def one(rows_and_number: Any) -> tuple[Any, Any]:
        rows, number = rows_and_number
        # Zeros made here are folded by the compiler; those of `init` would be arrays that every microbatch reads.
        zeros = jax.tree.map(jnp.zeros_like, sums)
        carry, aux = micro({**zeros, _PARAMETERS: init[_PARAMETERS], _STATE: before(number[0])}, rows)
        return {key: carry[key] for key in sums}, aux

    # Cut as the rows are, this gives each microbatch its number.
    numbers = jnp.arange(rows, dtype=jnp.uint32) % length
    total, aux = multimesh.microbatch(one, size=rows // length, **loop)((batch, numbers))
    # MaxText sums over the microbatches once more; here they are one row, summed already.
    aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
    state = jax.tree_util.tree_map_with_path(final, init[_STATE], jax.tree.unflatten(tree, strides))
    return {**total, _PARAMETERS: init[_PARAMETERS], _STATE: state}, aux


@dataclass(frozen=True)
class _Microbatch:
    """MaxText's loop body, traced once: a function like it.

    Attributes
    ----------
    traced
        The jaxpr.
    state
        Which of its arguments are the state.
    result
        Types of the results.
    """

    traced: Any
    state: list[int]
    result: Any

    def __call__(self, carry: Any, rows: Any) -> Any:
        results = jaxpr_as_fun(self.traced)(*jax.tree.leaves((carry, rows)))
        return jax.tree.unflatten(jax.tree.structure(self.result), results)

    def strides(self) -> list[int]:
        """By how much a microbatch advances each leaf of the state."""
        made = self.traced.jaxpr.outvars
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.result)]
        new = [i for i, path in enumerate(paths) if _in_state(path)]
        (advance,), reads = _compat.dce([self.traced], [i in new for i in range(len(made))])
        read = [i for i, used in enumerate(reads) if used]
        counts = _count(advance.jaxpr, [(i, 0) for i in read])
        for leaf, at, path in zip(self.state, counts, (paths[i] for i in new), strict=True):
            if at is None or at[0] != leaf:
                name = jax.tree_util.keystr(path[2:])
                raise UnsupportedError(
                    f"{name} changes with every microbatch, but counts nothing: stages cannot hand it on; "
                    "use --batch-size and --microbatch-size for one microbatch, or --backend spmd"
                )
        return [at[1] for at in counts if at]


_Count = tuple[int, int] | None
"""A counter's first value, as the number of an argument, and how often it was advanced; ``None`` is anything else."""


def _count(jaxpr: Any, arguments: Sequence[_Count]) -> list[_Count]:
    """Follow counters through a jaxpr that does nothing but count."""
    known: dict[Any, _Count] = dict(zip(jaxpr.invars, arguments, strict=True))

    def look(atom: Any) -> _Count:
        return None if isinstance(atom, _compat.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        inside = next(_compat.subjaxprs(eqn.params), None)
        results: list[_Count] = [None] * len(eqn.outvars)
        if inside is not None and eqn.primitive.name in _CALLS:
            results = _count(inside, [look(atom) for atom in eqn.invars])
        elif eqn.primitive.name in _IDENTITIES:
            results = [look(eqn.invars[0])]
        elif eqn.primitive is _compat.add_p and isinstance(eqn.invars[1], _compat.Literal):
            before = look(eqn.invars[0])
            results = [before and (before[0], before[1] + int(eqn.invars[1].val))]
        known |= zip(eqn.outvars, results, strict=True)
    return [look(atom) for atom in jaxpr.outvars]


def _trace(body: Callable[[Any, Any], Any], carry: Any, rows: Any) -> _Microbatch:
    traced, result = jax.make_jaxpr(body, return_shape=True)(carry, rows)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((carry, rows))]
    return _Microbatch(traced, [i for i, path in enumerate(paths) if _in_state(path)], result)


def _in_state(path: Any) -> bool:
    """Whether a leaf of ``(carry, ...)`` belongs to the state."""
    return _STATE in jax.tree_util.keystr(path[:2])
