"""``microbatch``: a loop over the microbatches of one argument, in the order of a schedule."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh import schedules
from multimesh.core import _compat, checks
from multimesh.core.specs import carry_over
from multimesh.core.weak_cache import keep_with, weak
from multimesh.errors import UsageError
from multimesh.marking import contexts, marks
from multimesh.marking.result_reductions import (
    STACKS,
    STATELESS,
    Fold,
    NoGradient,
    ReducedPart,
    Total,
    is_float0,
    is_reduction,
    parts_of,
)
from multimesh.marking.tasks import call_under_mark
from multimesh.marking.tracing import is_partitioning, is_recording, of_loop

A = ParamSpec("A")
R = TypeVar("R")


@overload
def microbatch(
    fn: Callable[A, R],
    *,
    dim: int = 0,
    size: int | None,
    argnum: int = 0,
    schedule: str | schedules.Schedule = "1f1b",
    reduce: Any = "sum",
    index: None = None,
    carry: int | None = None,
    accumulate: Any = None,
) -> Callable[A, R]: ...
@overload
def microbatch(fn: Callable[..., R], *, size: int | None, index: str, **options: Any) -> Callable[..., R]: ...
def microbatch(  # type: ignore[misc]  # the options are those of the first overload
    fn: Callable[..., Any],
    *,
    dim: int = 0,
    size: int | None,
    argnum: int = 0,
    schedule: str | schedules.Schedule = "1f1b",
    reduce: Any = "sum",
    index: str | None = None,
    carry: int | None = None,
    accumulate: Any = None,
) -> Callable[..., Any]:
    """Call ``fn`` once for each microbatch of one argument, and sum, average, join or stack the results.

    Parameters
    ----------
    fn
        A function of all arguments. It gets ``size`` rows of argument ``argnum`` at a time.
    dim
        The dimension that holds the rows, in every leaf of that argument.
    size
        Rows of a microbatch. There are ``m = rows // size`` microbatches. Microbatch ``i`` takes rows ``i, i + m, i + 2
        m, ...``, so that rows that are sharded over data-parallel devices stay where they are. None for an argument
        that is cut already: then ``dim`` numbers its microbatches, and ``fn`` gets leaves without it.
    argnum
        The positional argument that is cut: a pytree of arrays with the same number of rows.
    schedule
        The order in which `multimesh.jit` runs the stages of the loop: a name in `multimesh.schedules`, or a schedule,
        such as a table of your own by `multimesh.schedules.custom` or `multimesh.schedules.load`.
    reduce
        ``"sum"``, ``"mean"``, ``"stack"``, ``"rows"``, ``"max"``, ``"min"``, ``"last"``, a reduction with ``init``,
        ``update`` and ``finalize`` (see `multimesh.Reduction`), or a pytree prefix of the result with these.
        `multimesh.Ratio` divides sums: of losses, by that of tokens. Gradients outside of the loop go through sums
        only. Leaves under ``"stack"`` are stacked along a new first axis of length ``m``.
        Leaves under ``"rows"`` have ``size`` rows in dimension ``dim``, as predictions do; the result has those of the
        whole argument, in its order.
    index
        Name of a keyword argument of ``fn``: it gets the number of the microbatch, an int32 scalar.
    carry
        The positional argument that is a state, which each microbatch hands to the next (batch-norm statistics, the
        history of a scale). ``fn`` then returns ``(state, result)``; the new state has the tree and types of the old.
        It stays on the submesh that updates it. Take gradients inside of the loop, or stop them at the state.
    accumulate
        The dtype in which floating results of fewer bits are summed, such as ``"float32"`` for gradients of bfloat16
        parameters; the sums are cast back at the end. Many microbatches lose much in few bits: a term is rounded away
        where it is 256 times smaller than its sum. None: float32 for results of at most 65,536 elements (losses, norms,
        biases), for others their own. If the gradient is taken outside of the loop, `multimesh.jit` does the same.

    Returns
    -------
    Callable
        A function with the signature of ``fn``; with ``carry`` it returns ``(last state, results)``.

    Raises
    ------
    UsageError
        If ``size`` does not divide the rows, leaves differ in rows, a result can't be reduced, a state changes its
        type. In `multimesh.jit`, if the schedule runs a microbatch before its state is there.

    Examples
    --------
    >>> def step(params, batch, stats):  # doctest: +SKIP
    ...     (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch, stats)
    ...     return stats, (loss, grads)
    >>> mm.microbatch(step, size=4, argnum=1, carry=2, reduce="mean")(params, batch, stats)
    >>> predictions = mm.microbatch(forward, size=4, argnum=1, reduce="rows")(params, batch)  # doctest: +SKIP
    """
    checks.function("microbatch: the first argument", fn)
    size = None if size is None else checks.integer("microbatch: size", size, 1)
    carry = None if carry is None else checks.integer("microbatch: carry", carry)
    dim, argnum = checks.integer("microbatch: dim", dim), checks.integer("microbatch: argnum", argnum)
    if carry is not None and carry == argnum:
        raise UsageError(f"microbatch: argument {argnum} can't be cut (argnum=) and carried (carry=)")
    order, accumulate = schedules.get(schedule), _float(accumulate)
    ways, tree_of_ways = jax.tree.flatten(reduce, is_leaf=is_reduction)
    keeps = any(way not in STATELESS for way in ways)

    @functools.wraps(fn)
    def looped(*args: Any, **kwargs: Any) -> Any:
        for name, number in (("argnum", argnum), ("carry", carry)):
            if number is not None and not -len(args) <= number < len(args):
                raise UsageError(f"microbatch: {name}={number}, but the call has {len(args)} positional arguments")
        if contexts.ignoring():
            if "stack" in ways or size is None:
                raise UsageError('microbatch: "stack" and size=None need the loop; leave ignore_transforms')
            return fn(*args, **kwargs, **({index: np.int32(0)} if index else {}))
        if is_partitioning():
            outer = jax.sharding.get_abstract_mesh()
            args = jax.tree.map(lambda x: _compat.enter_mesh(x, outer), args)
        rows = _rows_of(args[argnum], dim, argnum)
        if size is not None and rows % size:
            raise UsageError(
                f"microbatch: {rows} rows do not divide into microbatches of {size}; change size= or the batch"
            )
        count = rows if size is None else rows // size
        line = _compat.caller_line()
        mark = marks.LoopMark(count, order, line, carry is not None or keeps, accumulate)
        weakly = not is_recording() and isinstance(fn, types.FunctionType)
        called = weak(fn) if weakly else of_loop(fn)

        def loop(*args: Any, **kwargs: Any) -> Any:
            cut = functools.partial(_split, dim=dim, size=size, count=count)
            numbers = jnp.arange(count, dtype=np.int32) if index else None
            slices = jax.tree.map(cut, args[argnum]), numbers

            def call(piece: Any, state: Any) -> Any:
                full = list(args)
                rows, number = piece
                full[argnum] = rows if size is None else jax.tree.map(lambda x: jnp.moveaxis(x, 0, dim), rows)
                if carry is not None:
                    full[carry] = state
                with _explain_cut(full, argnum):
                    result = called(*full, **kwargs, **({index: number} if index else {}))
                return result if carry is not None else (None, result)

            state = None if carry is None else args[carry]
            parts = functools.partial(parts_of, reduce=reduce, dim=dim, size=size, dtype=accumulate)
            last, results = _scan(jax.jit(_compat.set_name(call, marks.BODY)), slices, state, parts, dim)
            return results if carry is None else (last, results)

        if not weakly:
            return call_under_mark(marks.loop_name(mark), loop, args, kwargs)
        key = dim, size, argnum, count, index, carry, accumulate, tuple(ways), tree_of_ways
        return call_under_mark("loop", loop, args, kwargs, lambda more, make: keep_with(fn, (*key, more), make))

    if index is not None:
        _hide(looped, index)
    return looped


def _hide(looped: Any, index: str) -> None:
    """Remove from the signature the parameter that gets the number of the microbatch."""
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(looped)
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        positional, any_name = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD in kinds.values()
        if kinds.get(index, positional) == positional and not any_name:
            raise UsageError(f"microbatch: index={index!r}, but the function takes no keyword argument of that name")
        parameters = [p for p in signature.parameters.values() if p.name != index]
        looped.__signature__ = signature.replace(parameters=parameters)


def _float(dtype: Any) -> Any:
    """Check the dtype of sums."""
    with contextlib.suppress(TypeError):
        if dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return None if dtype is None else jnp.dtype(dtype)
    raise checks.refuse("microbatch: accumulate", 'a floating dtype such as "float32"', dtype)


def _rows_of(arg: Any, dim: int, argnum: int) -> int:
    """Return the number of rows along ``dim`` of all leaves of an argument; refuse a leaf that differs, by its name."""
    leaves = [(f"argument {argnum}{jax.tree_util.keystr(path)}", x) for path, x in jax.tree.flatten_with_path(arg)[0]]
    if not leaves:
        raise UsageError(f"microbatch: argument {argnum} has no arrays to cut")
    for name, x in leaves:
        if not -np.ndim(x) <= dim < np.ndim(x):
            raise UsageError(f"microbatch: {name} of shape {np.shape(x)} has no rows along dim={dim}; {_remedy(x)}")
    rows = {name: np.shape(x)[dim] for name, x in leaves}
    common = collections.Counter(rows.values()).most_common(1)[0][0]
    if len(set(rows.values())) == len(rows):
        common = max(rows.values())
    for name, x in leaves:
        if rows[name] != common:
            raise UsageError(
                f"microbatch: leaves of argument {argnum} differ in rows along dim={dim}: {name} has {rows[name]}, "
                f"others {common}; {_remedy(x)}"
            )
    if not common:
        raise UsageError(f"microbatch: argument {argnum} has 0 rows along dim={dim}; give one microbatch at least")
    return common


def _remedy(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    key = dtype is not None and (
        jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and np.shape(x) in ((2,), (4,)))
    )
    if key:
        return "give a key as an argument of its own, and fold in the number of the microbatch, which index= passes"
    return "give what all rows share as an argument of its own, or repeat it for each row; argnum= says which is cut"


def _explain_cut(args: Sequence[Any], argnum: int) -> contextlib.AbstractContextManager[None]:
    """If a function fails on a microbatch of its first argument of several, add that this one was cut."""

    def meaning(error: Exception, line: str, says: str) -> UsageError | None:
        of_jax = isinstance(error, TypeError | ValueError) and _compat.is_raised_by_jax(error)
        if argnum or len(args) < 2 or not of_jax:
            return None
        return UsageError(
            f"{line}: the function failed on a microbatch of argument 0, which argnum=0 cuts; if the batch is another "
            f"argument, say so: argnum=1. {says}"
        )

    return _compat.explain(meaning)


def _split(x: Any, dim: int, size: int | None, count: int) -> jax.Array:
    """Reshape ``[..., rows, ...]`` to ``[count, size, ...]``: microbatch ``i`` has rows ``i, i + count, ...``."""
    x = jnp.moveaxis(jnp.asarray(x), dim, 0)
    if size is None:
        return x
    shape, layout = (size, count, *x.shape[1:]), jax.typeof(x).sharding
    split_layout = None
    if any(layout.spec):  # Explicit: that of the rows, if it divides a microbatch
        rows, *others = layout.spec
        split_layout = carry_over(P(rows, None, *others), shape, layout.mesh)
    return jnp.swapaxes(lax.reshape(x, shape, out_sharding=split_layout), 0, 1)


def _join_rows(x: jax.Array, dim: int) -> jax.Array:
    """Reshape ``[count, ..., size, ...]`` to ``[..., rows, ...]``, the inverse of `_split`."""
    x = jnp.moveaxis(x, dim + 1 if dim >= 0 else dim, 0)
    size, count, *others = x.shape
    layout, joined_layout = jax.typeof(x).sharding, None
    if any(layout.spec):
        rows, _, *axes = layout.spec
        joined_layout = NamedSharding(layout.mesh, P(rows, *axes))
    return jnp.moveaxis(lax.reshape(x, (size * count, *others), out_sharding=joined_layout), 0, dim)


def _scan(
    call: Callable[..., Any], slices: Any, state: Any, cut: Callable[[Any], tuple[Any, list[ReducedPart]]], dim: int
) -> tuple[Any, Any]:
    """Run ``call(piece, state) -> (state, result)`` over slices. Return the last state and the reduced results.

    Under ``jax.disable_jit`` no trace says the types of results: the first result does. So ``fn`` prints and stops with
    values, once for each microbatch.
    """
    types: list[Any] = []
    parts: list[ReducedPart] = []
    tree: Any = None

    def start(result: Any) -> list[Any]:
        nonlocal types, parts, tree
        types, (tree, parts) = jax.tree.leaves(result), cut(result)
        return [jax.tree.map(_strong, part.how.init(part.of(types))) for part in parts if part.how not in STACKS]

    def body(carried: Any, piece: Any) -> tuple[Any, list[Any]]:
        states, state = carried
        state, result = _check_state(call(piece, state), state)
        leaves = [leaf if is_float0(leaf) else jnp.asarray(leaf) for leaf in jax.tree.leaves(result)]
        states = start(jax.tree.unflatten(jax.tree.structure(result), leaves)) if states is None else states
        reduced = (part for part in parts if part.how not in STACKS)
        states = [_update(part, c, leaves) for part, c in zip(reduced, states, strict=True)]
        return (states, jax.tree.map(_strong, state)), [leaves[part.start] for part in parts if part.how in STACKS]

    states, state = None, jax.tree.map(_strong, state)
    if not jax.config.jax_disable_jit:
        piece = jax.tree.map(_compat.row_struct, slices)
        states = start(_check_state(jax.eval_shape(call, piece, state), state)[1])
    (states, state), stacks = lax.scan(body, (states, state), slices)
    states_left, stacks_left = iter(states), iter(stacks)
    count = len(jax.tree.leaves(slices)[0])
    outputs: list[Any] = []
    for part in parts:
        if part.how in STACKS:
            rows = next(stacks_left)
            outputs.append(rows if part.how == "stack" else _join_rows(rows, dim))
        else:
            total = part.how.finalize(next(states_left), count)
            named = isinstance(part.how, Total | Fold)
            outputs.append(jax.tree.map(functools.partial(_cast, like=types[part.start]), total) if named else total)
    return state, NoGradient.restore(jax.tree.unflatten(tree, outputs))


def _update(part: ReducedPart, state: Any, leaves: Sequence[Any]) -> Any:
    """Return the state of a reduction with one more result; refuse one that changes its tree or types."""
    new = part.how.update(state, part.of(leaves))
    if difference := _difference(state, new):
        raise UsageError(f"microbatch: update of the reduction {part.how} must keep its state, but {difference}")
    return jax.tree.map(_strong, new)


def _cast(x: jax.Array, like: Any) -> jax.Array:
    return _compat.cast_weak_type(x if x.dtype == like.dtype else x.astype(like.dtype), like)


def _check_state(output: Any, state: Any) -> tuple[Any, Any]:
    """Check that the function returned ``(state, result)`` with a state of the type of ``state``. Return both."""
    if not (isinstance(output, tuple) and len(output) == 2):
        raise UsageError("microbatch: with carry= the function returns (state, result)")
    if difference := _difference(state, output[0]):
        swapped = _difference(state, output[1]) is None
        order = "; the function returns (state, result), not (result, state)" if swapped else ""
        raise UsageError(f"microbatch: the state (carry=) must come out as it went in, but {difference}{order}")
    return output


def _difference(before_tree: Any, after_tree: Any) -> str | None:
    """Return in words the first leaf in which a new state differs from the old one; None if they are alike.

    Only leaves and their paths are compared: the user's containers may have no ``==``, or one that makes arrays.
    """
    (before, old_tree), (after, new_tree) = map(jax.tree.flatten_with_path, (before_tree, after_tree))
    old, new = (
        {f"state{jax.tree_util.keystr(path)}": f"{jnp.result_type(x)}{[*np.shape(x)]}" for path, x in leaves}
        for leaves in (before, after)
    )
    for name in old | new:
        if old.get(name) != new.get(name):
            return f"{name} goes in as {old.get(name, 'nothing')} and comes out as {new.get(name, 'nothing')}"
    return None if old_tree == new_tree else "it is in another container, or one with other static fields"


def _strong(x: Any) -> jax.Array:
    """Convert ``x`` to an array without weak type, so that a state keeps one type."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)
