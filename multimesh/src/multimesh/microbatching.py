"""``microbatch``: a loop over microbatches of one argument, the loop that a pipeline schedule reorders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh import _compat, checks, contexts, marks, schedules
from multimesh.errors import UsageError
from multimesh.submesh import carry_over
from multimesh.tasks import marked_call
from multimesh.tracing import partitioned_trace


def microbatch(
    fn: Callable[..., Any],
    *,
    dim: int = 0,
    size: int,
    argnum: int = 0,
    schedule: str | schedules.Schedule = "1f1b",
    interleave: int = 1,
    num_stages: int | None = None,
    custom_schedule: schedules.Custom | Iterable[Iterable[str | tuple[int, str]]] | None = None,
    stack: Any = None,
) -> Callable[..., Any]:
    """Call ``fn`` once per microbatch of one argument and sum the results.

    Parameters
    ----------
    fn
        Function of the whole argument list; it sees ``size`` rows of argument ``argnum`` at a time.
    dim
        The dimension of every leaf of that argument that holds the rows.
    size
        Rows of a microbatch. There are ``m = rows // size`` of them; microbatch ``i`` takes rows ``i, i + m, i + 2 m,
        ...``, so that rows that are sharded over data-parallel devices stay where they are.
    argnum
        Which positional argument is cut; any pytree of arrays with the same number of rows.
    schedule
        Order in which `multimesh.jit` runs the stages of the loop: a name of `multimesh.schedules` or a schedule
        object.
    interleave
        The number of stages that the loop must have on each submesh; 1 leaves it to where the tasks are.
    num_stages
        The number of stages that the loop must have; both are checked when it is partitioned.
    custom_schedule
        The order as a table of your own instead: rows as `multimesh.schedules.custom` takes them, or what
        `multimesh.schedules.load` read. Checked against the loop before anything is compiled.
    stack
        Pytree prefix of the result: leaves under True are stacked along a new first axis of length ``m`` instead of
        summed.

    Returns
    -------
    Callable
        With the signature of ``fn``. Averages are the caller's: divide by ``m``.

    Raises
    ------
    UsageError
        When rows do not divide by ``size``, leaves differ in rows, a result can't be summed, or a custom table is none.
    """
    checks.function("microbatch: the first argument", fn)
    size = checks.whole("microbatch: size", size, 1)
    interleave = checks.whole("microbatch: interleave", interleave, 1)
    dim, argnum = checks.whole("microbatch: dim", dim), checks.whole("microbatch: argnum", argnum)
    num_stages = None if num_stages is None else checks.whole("microbatch: num_stages", num_stages, 1)
    plan = _schedule(schedule, custom_schedule)

    @functools.wraps(fn)
    def looped(*args: Any, **kwargs: Any) -> Any:
        if not -len(args) <= argnum < len(args):
            raise UsageError(f"microbatch: argnum={argnum}, but the call has {len(args)} positional arguments")
        if contexts.ignoring():
            if any(jax.tree.leaves(stack)):
                raise UsageError("microbatch: a stacked result (stack=) needs the loop; leave ignore_transforms")
            return fn(*args, **kwargs)
        if partitioned_trace():
            args = jax.tree.map(_compat.leave_mesh, args)
        rows = _rows(args[argnum], dim, argnum)
        if rows % size:
            raise UsageError(
                f"microbatch: {rows} rows do not divide into microbatches of {size}; change size= or the batch"
            )
        count = rows // size
        mark = marks.LoopMark(count, plan, num_stages, interleave, _compat.caller_line())

        def loop(*args: Any) -> Any:
            slices = jax.tree.map(lambda x: _split(jnp.asarray(x), dim, size, count), args[argnum])

            def call(piece: Any) -> Any:
                full = list(args)
                full[argnum] = jax.tree.map(lambda x: jnp.moveaxis(x, 0, dim), piece)
                return fn(*full, **kwargs)

            return _scan(jax.jit(_compat.named(call, marks.BODY)), slices, stack)

        return marked_call(marks.loop_name(mark), loop, args, {})

    return looped


def _schedule(schedule: str | schedules.Schedule, custom: Any) -> schedules.Schedule:
    if custom is None:
        return schedules.get(schedule)
    if schedule not in ("1f1b", "custom"):  # the default, or what it is
        raise UsageError(f"microbatch: schedule={str(schedule)!r} and custom_schedule= are two orders; drop one")
    return custom if isinstance(custom, schedules.Custom) else schedules.custom(custom)


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
    return rows.pop()


def _split(x: jax.Array, dim: int, size: int, count: int) -> jax.Array:
    """``[..., rows, ...]`` to ``[count, size, ...]``: microbatch ``i`` holds rows ``i, i + count, ...``."""
    x = jnp.moveaxis(x, dim, 0)
    shape = (size, count, *x.shape[1:])
    return jnp.swapaxes(lax.reshape(x, shape, out_sharding=_split_layout(x, shape)), 0, 1)


def _split_layout(x: jax.Array, shape: tuple[int, ...]) -> NamedSharding | None:
    """Layout of split rows where the axes of ``x`` are Explicit: that of the rows, if a microbatch divides by it."""
    layout = jax.typeof(x).sharding
    if not any(layout.spec):
        return None
    rows, *others = layout.spec
    return carry_over(PartitionSpec(rows, None, *others), shape, layout.mesh)


def _scan(call: Callable[[Any], Any], slices: Any, stack: Any) -> Any:
    made: list[Any] = []
    if jax.config.jax_disable_jit:  # a print or breakpoint in ``fn`` is then met with values, and once a microbatch
        count = jax.tree.leaves(slices)[0].shape[0]
        made = [jax.tree.map(jnp.asarray, call(jax.tree.map(lambda x, i=i: x[i], slices))) for i in range(count)]
        shapes = made[0]
    else:
        piece = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slices)
        shapes = jax.eval_shape(call, piece)
    leaves, tree = jax.tree.flatten(shapes)
    stacked = _stacked_leaves(stack, shapes)
    for leaf, keep in zip(leaves, stacked, strict=True):
        if not keep and not jnp.issubdtype(leaf.dtype, jnp.number):
            raise UsageError(f"microbatch: a result of dtype {leaf.dtype} can't be summed; mark it True in stack=")
    if made:
        rows = zip(*map(jax.tree.leaves, made), strict=True)
        total = [jnp.stack(r) if keep else functools.reduce(jnp.add, r) for r, keep in zip(rows, stacked, strict=True)]
        return jax.tree.unflatten(tree, total)

    def body(carry: list[Any], piece: Any) -> tuple[list[Any], list[Any]]:
        outs = jax.tree.leaves(call(piece))
        summed = [o for o, keep in zip(outs, stacked, strict=True) if not keep]
        kept = [o for o, keep in zip(outs, stacked, strict=True) if keep]
        return [jnp.add(c, o) for c, o in zip(carry, summed, strict=True)], kept

    zeros = [_zeros(leaf) for leaf, keep in zip(leaves, stacked, strict=True) if not keep]
    sums, stacks = lax.scan(body, zeros, slices)
    sums_left, stacks_left = iter(sums), iter(stacks)
    return jax.tree.unflatten(tree, [next(stacks_left if keep else sums_left) for keep in stacked])


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """A sum to start from; with the layout in its type where axes are Explicit."""
    layout = like.sharding if isinstance(like.sharding, NamedSharding) and any(like.sharding.spec) else None
    return jnp.zeros(like.shape, like.dtype, out_sharding=layout)


def _stacked_leaves(stack: Any, shapes: Any) -> list[bool]:
    if stack is None:
        return [False] * len(jax.tree.leaves(shapes))
    try:
        full = jax.tree.map(lambda keep, part: jax.tree.map(lambda _: bool(keep), part), stack, shapes)
    except ValueError as error:
        raise UsageError(f"microbatch: stack= must be a pytree prefix of the result: {error}") from None
    return jax.tree.leaves(full)
