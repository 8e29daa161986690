"""``microbatch``: a loop over the microbatches of one argument, in the order of a schedule."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh import schedules
from multimesh.core import _compat, checks
from multimesh.core.numbers import accumulator
from multimesh.core.prefixes import spread
from multimesh.core.specs import carry_over
from multimesh.core.weak_cache import kept, weak
from multimesh.errors import UsageError
from multimesh.marking import contexts, marks
from multimesh.marking.tasks import call_under_mark
from multimesh.marking.tracing import is_partitioning, is_recording, of_loop

_APART = ("stack", "rows")  # results that are kept microbatch by microbatch


def microbatch(
    fn: Callable[..., Any],
    *,
    dim: int = 0,
    size: int | None,
    argnum: int = 0,
    schedule: str | schedules.Schedule = "1f1b",
    interleave: int = 1,
    num_stages: int | None = None,
    custom_schedule: schedules.Custom | Iterable[Iterable[str | tuple[int, str]]] | None = None,
    stack: Any = None,
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
        The order in which `multimesh.jit` runs the stages of the loop: a name in `multimesh.schedules`, or a schedule.
    interleave
        The number of stages that the loop must have on each submesh; 1 leaves it to the tasks.
    num_stages
        The number of stages that the loop must have. `multimesh.jit` checks both numbers.
    custom_schedule
        A table of your own, instead: rows as `multimesh.schedules.custom` takes them, or the result of
        `multimesh.schedules.load`. It is checked against the loop before anything is compiled.
    stack
        Pytree prefix of the result: leaves under True are stacked along a new first axis of length ``m``.
    reduce
        ``"sum"``, ``"mean"``, ``"rows"`` or a pytree prefix of the result with these, for leaves that are not stacked.
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
        type, or the custom table is none. In `multimesh.jit`, if the schedule runs a microbatch before its state is
        there.

    Examples
    --------
    >>> def step(params, batch, stats):  # doctest: +SKIP
    ...     (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch, stats)
    ...     return stats, (loss, grads)
    >>> mm.microbatch(step, size=4, argnum=1, carry=2, reduce="mean")(params, batch, stats)
    >>> predictions = mm.microbatch(forward, size=4, argnum=1, reduce="rows")(params, batch)  # doctest: +SKIP
    """
    checks.function("microbatch: the first argument", fn)
    size = None if size is None else checks.whole("microbatch: size", size, 1)
    carry = None if carry is None else checks.whole("microbatch: carry", carry)
    interleave = checks.whole("microbatch: interleave", interleave, 1)
    dim, argnum = checks.whole("microbatch: dim", dim), checks.whole("microbatch: argnum", argnum)
    num_stages = None if num_stages is None else checks.whole("microbatch: num_stages", num_stages, 1)
    if carry is not None and carry == argnum:
        raise UsageError(f"microbatch: argument {argnum} can't be cut (argnum=) and carried (carry=)")
    plan, accumulate = _schedule(schedule, custom_schedule), _float(accumulate)
    wanted = (stack, reduce)

    @functools.wraps(fn)
    def looped(*args: Any, **kwargs: Any) -> Any:
        for name, number in (("argnum", argnum), ("carry", carry)):
            if number is not None and not -len(args) <= number < len(args):
                raise UsageError(f"microbatch: {name}={number}, but the call has {len(args)} positional arguments")
        if contexts.ignoring():
            if any(jax.tree.leaves(stack)) or size is None:
                raise UsageError("microbatch: stack= and size=None need the loop; leave ignore_transforms")
            return fn(*args, **kwargs, **({index: np.int32(0)} if index else {}))
        if is_partitioning():
            args = jax.tree.map(_compat.leave_mesh, args)
        rows = _rows(args[argnum], dim, argnum)
        if size is not None and rows % size:
            raise UsageError(
                f"microbatch: {rows} rows do not divide into microbatches of {size}; change size= or the batch"
            )
        count = rows if size is None else rows // size
        mark = marks.LoopMark(count, plan, num_stages, interleave, _compat.caller_line(), carry is not None, accumulate)
        alone = not is_recording() and isinstance(fn, types.FunctionType)
        called = weak(fn) if alone else of_loop(fn)

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
                result = called(*full, **kwargs, **({index: number} if index else {}))
                return result if carry is not None else (None, result)

            state = None if carry is None else args[carry]
            ways = functools.partial(_ways, stack=stack, reduce=reduce, dim=dim, size=size)
            last, results = _scan(jax.jit(_compat.named(call, marks.BODY)), slices, state, ways, dim, accumulate)
            return results if carry is None else (last, results)

        if not alone:
            return call_under_mark(marks.loop_name(mark), loop, args, kwargs)
        leaves, tree = jax.tree.flatten(wanted)
        key = dim, size, argnum, count, index, carry, accumulate, tuple(leaves), tree
        return call_under_mark("loop", loop, args, kwargs, lambda more, make: kept(fn, (*key, more), make))

    if index is not None:
        _hide(looped, index)
    return looped


def _hide(looped: Any, index: str) -> None:
    """Remove from the signature the parameter that gets the number of the microbatch."""
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(looped)
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        if kinds.get(index) in (None, inspect.Parameter.POSITIONAL_ONLY) and inspect.Parameter.VAR_KEYWORD not in (
            kinds.values()
        ):
            raise UsageError(f"microbatch: index={index!r}, but the function takes no keyword argument of that name")
        looped.__signature__ = signature.replace(
            parameters=[p for p in signature.parameters.values() if p.name != index]
        )


def _schedule(schedule: str | schedules.Schedule, custom: Any) -> schedules.Schedule:
    if custom is None:
        return schedules.get(schedule)
    if schedule not in ("1f1b", "custom"):  # the default, or the name of a custom schedule
        raise UsageError(f"microbatch: schedule={str(schedule)!r} and custom_schedule= are two orders; drop one")
    return custom if isinstance(custom, schedules.Custom) else schedules.custom(custom)


def _float(dtype: Any) -> Any:
    """Check the dtype of sums."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise checks.refuse("microbatch: accumulate", 'a floating dtype such as "float32"', dtype)
    return found


def _rows(arg: Any, dim: int, argnum: int) -> int:
    leaves = jax.tree.leaves(arg)
    if not leaves:
        raise UsageError(f"microbatch: argument {argnum} has no arrays to cut")
    shapes = [np.shape(leaf) for leaf in leaves]
    if any(not -len(shape) <= dim < len(shape) for shape in shapes):
        raise UsageError(f"microbatch: dim={dim} is out of range for a leaf of argument {argnum}; shapes {shapes[:4]}")
    rows = {shape[dim] for shape in shapes}
    if len(rows) > 1:
        raise UsageError(f"microbatch: leaves of argument {argnum} differ in rows along dim={dim}: {sorted(rows)}")
    if 0 in rows:
        raise UsageError(f"microbatch: argument {argnum} has 0 rows along dim={dim}; give one microbatch at least")
    return rows.pop()


def _split(x: Any, dim: int, size: int | None, count: int) -> jax.Array:
    """Reshape ``[..., rows, ...]`` to ``[count, size, ...]``: microbatch ``i`` has rows ``i, i + count, ...``."""
    x = jnp.moveaxis(jnp.asarray(x), dim, 0)
    if size is None:
        return x
    shape = (size, count, *x.shape[1:])
    return jnp.swapaxes(lax.reshape(x, shape, out_sharding=_split_layout(x, shape)), 0, 1)


def _split_layout(x: jax.Array, shape: tuple[int, ...]) -> NamedSharding | None:
    """Return the layout of split rows under Explicit axes: that of the rows, if it divides a microbatch."""
    layout = jax.typeof(x).sharding
    if not any(layout.spec):
        return None
    rows, *others = layout.spec
    return carry_over(P(rows, None, *others), shape, layout.mesh)


def _join_rows(x: jax.Array, dim: int) -> jax.Array:
    """Reshape ``[count, ..., size, ...]`` to ``[..., rows, ...]``, the inverse of `_split`."""
    x = jnp.moveaxis(x, dim + 1 if dim >= 0 else dim, 0)
    size, count, *others = x.shape
    shape, layout = (size * count, *others), jax.typeof(x).sharding
    if any(layout.spec):
        rows, _, *rest = layout.spec
        return jnp.moveaxis(lax.reshape(x, shape, out_sharding=NamedSharding(layout.mesh, P(rows, *rest))), 0, dim)
    return jnp.moveaxis(lax.reshape(x, shape), 0, dim)


def _scan(
    call: Callable[..., Any],
    slices: Any,
    state: Any,
    ways_of: Callable[[Any], tuple[Any, list[str]]],
    dim: int,
    dtype: Any,
) -> tuple[Any, Any]:
    """Run ``call(piece, state) -> (state, result)`` over slices.

    Returns the last state and the reduced results. Few bits are summed in ``dtype``; see `accumulator`.
    """
    count = len(jax.tree.leaves(slices)[0])
    state = jax.tree.map(_strong, state)
    if jax.config.jax_disable_jit:  # so ``fn`` prints and stops with values, once for each microbatch
        results = []
        for i in range(count):
            state, result = _check_state(call(jax.tree.map(lambda x, i=i: x[i], slices), state), state)
            results.append(jax.tree.map(jnp.asarray, result))
        (tree, ways), types = ways_of(results[0]), jax.tree.leaves(results[0])
        rows = zip(*map(jax.tree.leaves, results), strict=True)
        made = [
            jnp.stack(r) if way in _APART else functools.reduce(jnp.add, (x.astype(accumulator(x, dtype)) for x in r))
            for r, way in zip(rows, ways, strict=True)
        ]
    else:
        piece = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slices)
        shapes = _check_state(jax.eval_shape(call, piece, state), state)[1]
        (tree, ways), types = ways_of(shapes), jax.tree.leaves(shapes)

        def body(carried: Any, piece: Any) -> tuple[Any, list[Any]]:
            sums, state = carried
            state, result = call(piece, state)
            outs = list(zip(jax.tree.leaves(result), ways, strict=True))
            terms = (o for o, way in outs if way not in _APART)
            summed = [
                jnp.add(c, o if c.dtype == o.dtype else o.astype(c.dtype)) for c, o in zip(sums, terms, strict=True)
            ]
            return (summed, jax.tree.map(_strong, state)), [o for o, way in outs if way in _APART]

        zeros = [
            _zeros(leaf, accumulator(leaf, dtype)) for leaf, way in zip(types, ways, strict=True) if way not in _APART
        ]
        (sums, state), stacks = lax.scan(body, (zeros, state), slices)
        sums_left, stacks_left = iter(sums), iter(stacks)
        made = [next(stacks_left if way in _APART else sums_left) for way in ways]
    last = {"mean": lambda x: x / count, "rows": lambda x: _join_rows(x, dim)}
    whole = (last.get(way, lambda x: x)(x) for x, way in zip(made, ways, strict=True))
    cast = (x if x.dtype == of.dtype else x.astype(of.dtype) for x, of in zip(whole, types, strict=True))
    return state, jax.tree.unflatten(tree, cast)


def _ways(result: Any, stack: Any, reduce: Any, dim: int, size: int | None) -> tuple[Any, list[str]]:
    """Return the tree of a result, and ``"sum"``, ``"mean"``, ``"rows"`` or ``"stack"`` for each leaf."""
    leaves, tree = jax.tree.flatten(result)
    stacked, given = _prefix(stack or False, result, "stack"), _prefix(reduce, result, "reduce")
    ways = []
    for leaf, keep, way in zip(leaves, stacked, given, strict=True):
        if way not in ("sum", "mean", "rows"):
            raise UsageError(f'microbatch: reduce= takes "sum", "mean" and "rows", not {way!r}')
        if not keep and way == "rows":
            if size is None or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != size:
                raise UsageError(
                    f'microbatch: reduce="rows" takes results with size= rows in dimension {dim}, not of shape '
                    f"{leaf.shape}; mark it True in stack="
                )
        elif not keep and not jnp.issubdtype(leaf.dtype, jnp.inexact if way == "mean" else jnp.number):
            known = "averaged" if way == "mean" else "summed"
            kind = "float0, the gradient of an integer," if leaf.dtype == jax.dtypes.float0 else f"dtype {leaf.dtype}"
            raise UsageError(f"microbatch: a result of {kind} can't be {known}; mark it True in stack=")
        ways.append("stack" if keep else way)
    return tree, ways


def _check_state(made: Any, given: Any) -> tuple[Any, Any]:
    """Check that the function returned ``(state, result)`` with a state of the type it was ``given``. Return both."""

    if not (isinstance(made, tuple) and len(made) == 2):
        raise UsageError("microbatch: with carry= the function returns (state, result)")
    if difference := _difference(given, made[0]):
        raise UsageError(f"microbatch: the state (carry=) must come out as it went in, but {difference}")
    return made


def _difference(given: Any, made: Any) -> str | None:
    """Return in words the first leaf in which a new state differs from the old one; None if they are alike.

    Only leaves and their paths are compared: the user's containers may have no ``==``, or one that makes arrays.
    """
    (before, old_tree), (after, new_tree) = map(jax.tree.flatten_with_path, (given, made))
    old, new = (
        {f"state{jax.tree_util.keystr(path)}": f"{jnp.result_type(x)}{[*np.shape(x)]}" for path, x in leaves}
        for leaves in (before, after)
    )
    for name in old | new:
        if name not in new:
            return f"{name} is missing in what the function returns"
        if name not in old:
            return f"the function returns {name} too, which the argument does not have"
        if old[name] != new[name]:
            return f"{name} goes in as {old[name]} and comes out as {new[name]}"
    return None if old_tree == new_tree else "it is in another container, or one with other static fields"


def _zeros(like: jax.ShapeDtypeStruct, dtype: Any) -> jax.Array:
    """The zero that a sum starts from. Under Explicit axes its type has a layout."""
    layout = like.sharding if isinstance(like.sharding, NamedSharding) and any(like.sharding.spec) else None
    return jnp.zeros(like.shape, dtype, out_sharding=layout)


def _strong(x: Any) -> jax.Array:
    """Convert ``x`` to an array without weak type, so that a state keeps one type."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)


def _prefix(given: Any, shapes: Any, what: str) -> list[Any]:
    try:
        return spread(given, shapes)
    except ValueError as error:
        raise UsageError(f"microbatch: {what}= must be a pytree prefix of the result: {error}") from None
