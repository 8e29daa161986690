"""``pipeline``: a function without marks as the stages of a pipeline."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from multimesh.core import _compat, checks
from multimesh.core.submesh import AxisMap, make_task
from multimesh.core.text import amount
from multimesh.errors import UsageError
from multimesh.marking import contexts
from multimesh.marking.flax_modules import refuse_changes
from multimesh.marking.tracing import Change, in_a_mesh, in_loops, inside, is_partitioning, is_recording, note_mesh
from multimesh.schedules.costs import cost
from multimesh.schedules.cuts import SLACK, Chain, ChainCut, cut_chain
from multimesh.schedules.partitioning import LayerCosts, alive
from multimesh.schedules.stage_cuts import Cuts, StageCut, Work
from multimesh.stages.chains import chain_of, orders, rescale, uneven_rows, work_of
from multimesh.stages.staged import run
from multimesh.stages.units import KEPT_LOOP, Unit, Units, read
from multimesh.stages.work import add_work

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Pipelined:
    """A function that is cut into stages when it is traced, made by `pipeline`."""

    fn: Callable[..., Any]
    meshes: tuple[Mesh, ...]
    interleave: int
    memory: float
    placement: tuple[int, ...]
    argnums: frozenset[int]
    seconds: tuple[float, ...]
    logical_axes: AxisMap | None = field(hash=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; each stage is a task on its submesh."""
        if not self.meshes or contexts.ignoring() or not is_recording():
            with in_a_mesh(self._name):
                return self.fn(*args, **kwargs)
        around = jax.sharding.get_abstract_mesh()
        if is_partitioning():
            args, kwargs = jax.tree.map(self._enter, (args, kwargs))
        traced = self._traced(args, kwargs)
        if traced.loops:
            return self._in_loops(lambda fn: replace(self, fn=fn), args, kwargs)
        found, stages, cuts = self._cut(traced)
        meshes = [self.meshes[self.placement[s % len(self.placement)]] for s in range(len(stages))]
        places = [
            replace(make_task(f"stage{s}", mesh=mesh, logical_axes=self.logical_axes), cuts=cuts, types=self._types)
            for s, mesh in enumerate(meshes)
        ]
        with self._on_types():
            results = run(found, stages, places, traced.arrays)
        if self._types is not None:
            results = [_compat.enter_mesh(x, around) for x in results]
        return jax.tree.unflatten(traced.tree, results)

    @functools.cached_property
    def _types(self) -> AbstractMesh | None:
        """The mesh in the types of values; None if all axes are Auto."""
        return _compat.common_mesh(self.meshes)

    def _enter(self, x: Any) -> Any:
        return _compat.leave_mesh(x) if self._types is None else _compat.enter_mesh(x, self._types)

    def _on_types(self) -> contextlib.AbstractContextManager[Any]:
        for mesh in self.meshes:
            note_mesh(mesh)
        return contextlib.nullcontext() if self._types is None else _compat.types_context(self._types)

    def cuts(self, *args: Any, **kwargs: Any) -> Cuts:
        """Cut the function, without running it.

        Takes its arguments, as arrays or ``jax.ShapeDtypeStruct``, with the rows of one microbatch.

        Raises
        ------
        UsageError
            If it can't be cut.
        """
        if not self.meshes:
            raise UsageError("pipeline: without meshes there is nothing to cut")
        traced = self._traced(args, kwargs)
        if not traced.loops:
            return self._cut(traced)[2]
        found: list[Cuts] = []

        def cut(fn: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                found.append(replace(self, fn=fn).cuts(*args, **kwargs))
                return fn(*args, **kwargs)

            return noted

        jax.eval_shape(lambda *arrays: self._in_loops(cut, *traced.given(arrays)), *traced.arrays)
        return found[0]

    def _in_loops(self, cut: Change, args: Any, kwargs: Any) -> Any:
        """Run the function, and cut the functions of its microbatch loops instead of the function itself."""
        loops = _Loops(cut)
        with in_loops(loops):
            out = self.fn(*args, **kwargs)
        if not loops.number:
            raise UsageError(f"{self._name}: {KEPT_LOOP}")
        return out

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
        leaves, tree = jax.tree.flatten((args, kwargs))
        first = make_task("pipeline", mesh=self.meshes[0], logical_axes=self.logical_axes)
        first = replace(first, types=self._types)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def given(arrays: Sequence[Any]) -> Any:
            full = list(leaves)
            for i, array in zip(where, arrays, strict=True):
                full[i] = array
            return jax.tree.unflatten(tree, full)

        loops = _Loops(lambda fn: fn)

        def fn(*arrays: Any) -> Any:
            inner_args, inner_kwargs = given(arrays)
            with (
                in_loops(loops),
                inside(first),
                refuse_changes(lambda: self._name, (inner_args, inner_kwargs)),
            ):
                return self.fn(*inner_args, **inner_kwargs)

        arrays = tuple(leaves[i] for i in where)
        with self._on_types(), _compat.explain_trace(lambda: self._name):
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        named = max(self.argnums, default=0)  # with loops they are those of the loop's function
        if not loops.number and self.memory < math.inf and named >= max(len(args), 1):
            raise UsageError(
                f"{self._name}: argnums names argument {named}, and the call has {len(args)} positional "
                "arguments; name those that are trained, counted from 0"
            )
        number = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]  # keywords follow
        trained = [place for place, array in enumerate(arrays) if _compat.is_differentiated(array)] or [
            place for place, i in enumerate(where) if i < len(number) and number[i] in self.argnums
        ]
        return _Traced(closed, jax.tree.structure(shapes), arrays, tuple(trained), given, loops.number > 0)

    @property
    def _name(self) -> str:
        return f"pipeline: {getattr(self.fn, '__name__', 'the function')}"

    def _cut(self, traced: _Traced) -> tuple[Units, tuple[tuple[Unit, ...], ...], Cuts]:
        number = len(self.meshes) * self.interleave
        found = read(traced.closed, number, traced.trained)
        best: tuple[ChainCut, Chain, tuple[Unit, ...], list[Work]] | None = None
        for order in orders(found.forward):
            if not order:
                raise UsageError(f"{self._name} computes nothing from its arrays that it returns; return the result")
            if len(order) < number:
                raise UsageError(
                    f"pipeline: {len(order)} operations cannot make {number} stages ({len(self.meshes)} submeshes x "
                    f"{self.interleave}); give fewer meshes"
                )
            works = work_of(found.forward, order)
            chain = chain_of(found.forward, order, works)
            fits = None if math.isinf(self.memory) else self._fits
            cut = cut_chain(chain, number, fits)
            if cut is not None and self.seconds:
                chain = rescale(chain, cut.ends, self.seconds)
                cut = cut_chain(chain, number, fits)
            if cut is not None and (best is None or _worth(cut, best[0])):
                best = cut, chain, order, works
        if best is None:
            raise UsageError(
                f"pipeline: no cut into {number} stages fits into {amount(self.memory, 'bytes')} on each submesh; "
                "use more submeshes, or keep less of a microbatch with jax.checkpoint"
            )
        cut, chain, order, works = best
        pieces = list(itertools.pairwise(cut.ends))
        cuts = (
            StageCut(*_line(order[a:b]), chain.costs_of(a, b), chain.received(a, b), add_work(works[a:b]))
            for a, b in pieces
        )
        stages = tuple(order[a:b] for a, b in pieces)
        return found, stages, Cuts(tuple(cuts), getattr(self.fn, "__name__", "pipeline"), uneven_rows(found, stages))

    def _fits(self, stage: int, costs: LayerCosts) -> bool:
        kept = alive(stage, len(self.meshes), self.interleave) * costs.activation
        return costs.held + kept <= self.memory / self.interleave


class _Loops:
    """Changes the functions of microbatch loops, and counts them."""

    def __init__(self, change: Change) -> None:
        self._change, self.number = change, 0

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.number += 1
        return self._change(fn)


@dataclass(frozen=True)
class _Traced:
    """A traced function, the tree of its results, the arrays that it is called with, and which have a gradient.

    ``given`` makes arguments and keywords of such arrays; ``loops`` says whether it has microbatch loops.
    """

    closed: Any
    tree: Any
    arrays: tuple[Any, ...]
    trained: tuple[int, ...]
    given: Callable[[Sequence[Any]], Any]
    loops: bool


def _worth(new: ChainCut, old: ChainCut) -> bool:
    """Whether a cut is better than another: fewer bytes where both are about as even, else the more even one."""
    if max(new.slowest, old.slowest) <= (1 + SLACK) * min(new.slowest, old.slowest):
        return (new.sent, new.slowest) < (old.sent, old.slowest)
    return new.slowest < old.slowest


def _line(stage: Sequence[Unit]) -> tuple[str, str]:
    """The user's line of a stage's first operation, with its modules and its row of a scan; and the line's text."""
    for unit in stage:
        line = _compat.user_line(unit.eqn.source_info)
        if not line:
            continue
        path, _, number = line.rpartition(":")
        scopes, _ = _compat.scopes(unit.eqn)
        where = f"{line} in {'/'.join(scopes)}" if scopes else line
        where += f", row {unit.rows.start} of {unit.eqn.params['length']}" if unit.rows else ""
        return where, linecache.getline(path, int(number)).strip()
    return "a line that JAX did not record", ""


def pipeline(
    fn: Callable[..., Any],
    meshes: Sequence[Mesh] | None,
    *,
    interleave: int = 1,
    memory: float | None = None,
    placement: Sequence[int] | None = None,
    argnums: int | Sequence[int] = 0,
    seconds: Sequence[float] | None = None,
    logical_axes: AxisMap | None = None,
) -> Pipelined:
    """Cut a function without marks into the stages of a pipeline.

    The result takes the arguments of ``fn`` and computes the same. Use it where a function with tasks could be: inside
    of `multimesh.microbatch`, `jax.grad` and `multimesh.jit`. When it is traced, its operations become one
    `multimesh.task` for each stage. Stages take about the same time, and few bytes go between them. A `jax.lax.scan`
    over stacked layers is cut between its rows; each stage has its own part of the stack.

    Parameters
    ----------
    fn
        A function of arrays that JAX can trace: a loss, a forward pass, or a train step. A backward pass that it has
        itself runs in the stages of its forward pass; what follows, such as an optimizer, runs where its arrays are. A
        train step with `multimesh.microbatch` inside is cut within that loop.
    meshes
        The submeshes, in the order of the pipeline. None, or no mesh: ``fn`` stays one program, as under `jax.jit`.
    interleave
        Stages on each submesh.
    memory
        Bytes of a submesh. A stage fits if it takes at most its part. It holds the arguments that it reads: frozen ones
        once; trained ones four times, with a gradient and two moments (twice if an earlier stage reads them too). It
        keeps what backward passes read, of as many microbatches as 1F1B has in flight. None: enough.
    placement
        The submesh of stages 0, 1, ..., as `Schedule.placement` of the loop's schedule gives it; by default in turn.
    argnums
        The arguments that are trained, as of `jax.grad`: a stage computes no gradient, and holds no moments, of others.
        ``()``: none, as in a forward pass. Where `multimesh.microbatch` is inside, those of its function. Where
        `jax.grad` is around the call, the arrays that it differentiates count instead.
    seconds
        Measured seconds of F, B and W together of each stage of the cut that is made without them. The function is cut
        again, by seconds: an operation takes its part of those of its stage.
    logical_axes
        For `multimesh.with_sharding_constraint` in ``fn``, as in `multimesh.task`. All meshes then need the same axes.

    Returns
    -------
    Pipelined
        ``pipelined(*args)`` runs it; ``pipelined.cuts(*args)`` says where it is cut, without running it.

    Raises
    ------
    UsageError
        When it is traced, if there are fewer operations than stages, no cut fits into memory, ``fn`` has tasks, or its
        `multimesh.microbatch` is in a `jax.jit`.

    Examples
    --------
    >>> loss = mm.pipeline(loss_of, meshes)  # doctest: +SKIP
    >>> print(loss.cuts(params, microbatch))  # doctest: +SKIP
    >>> step = mm.jit(mm.microbatch(jax.value_and_grad(loss), size=4, argnum=1, reduce="mean"))  # doctest: +SKIP
    """
    checks.function("pipeline: the first argument", fn)
    grids = () if meshes is None else checks.many("pipeline: meshes", meshes, "a sequence of jax meshes")
    for mesh in grids:
        if not isinstance(mesh, Mesh):
            raise checks.refuse("pipeline: a mesh", "a jax.sharding.Mesh", mesh)
    interleave = checks.whole("pipeline: interleave", interleave, 1)
    room = math.inf if memory is None else cost(memory, "pipeline: memory of a submesh")
    route = checks.placement("pipeline", placement, len(grids)) if grids else ()
    listed = (argnums,) if isinstance(argnums, int) else argnums
    numbers = checks.many("pipeline: argnums", listed, "numbers of arguments")
    trained = frozenset(checks.whole("pipeline: argnums", number, 0) for number in numbers)
    took = tuple(cost(x, "pipeline: seconds of a stage") for x in seconds or ())
    if seconds is not None and len(took) != len(grids) * interleave:
        raise UsageError(f"pipeline: {len(grids) * interleave} stages, but seconds of {len(took)}; give one for each")
    return Pipelined(fn, grids, interleave, room, route, trained, took, logical_axes)
