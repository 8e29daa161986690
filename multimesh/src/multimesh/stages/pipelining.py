"""``pipeline``: a function without marks as the stages of a pipeline."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from multimesh.core import _compat, checks
from multimesh.core._compat.executables import shares_executables
from multimesh.core.submesh import AxisMap, make_task
from multimesh.errors import UsageError
from multimesh.marking import contexts
from multimesh.marking.flax_modules import refuse_changes
from multimesh.marking.tracing import Change, in_a_mesh, in_loops, inside, is_partitioning, is_recording, note_mesh
from multimesh.schedules.costs import cost
from multimesh.stages import balance
from multimesh.stages.balance import SLACK, Chain, ChainCut, Layers
from multimesh.stages.chains import add_work, chain_of, count_state, orders, rescale, scan_over_time, work_of
from multimesh.stages.stage_cuts import Cuts, StageCut, Work
from multimesh.stages.staged import run
from multimesh.stages.units import KEPT_LOOP, Unit, Units, kind_of, read

P = ParamSpec("P")
R = TypeVar("R")

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class PipelinedFunction(Generic[P, R]):
    """A function that is cut into stages when it is traced, made by `pipeline`."""

    fn: Callable[P, R]
    meshes: tuple[Mesh, ...]
    interleave: int
    argnums: frozenset[int]
    seconds: tuple[float, ...]
    logical_axes: AxisMap | None = field(hash=False)
    within_layers: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function; each stage is a task on its submesh."""
        if not self.meshes or contexts.ignoring() or not is_recording():
            with in_a_mesh(self._name):
                return self.fn(*args, **kwargs)
        outer = jax.sharding.get_abstract_mesh()
        if is_partitioning():
            args, kwargs = jax.tree.map(self._enter, (args, kwargs))
        traced = self._traced(args, kwargs)
        if traced.loops:
            loops: list[Callable[..., Any]] = []

            def change(fn: Callable[..., Any]) -> Callable[..., Any]:
                loops.append(fn)
                return replace(self, fn=fn)

            with in_loops(change):
                out = self.fn(*args, **kwargs)
            if not loops:
                raise UsageError(f"{self._name}: {KEPT_LOOP}")
            return out
        units, stages, cuts = self._cut(traced)
        if cuts.remark:
            _compat.warn_at(cuts.over_time, cuts.remark.removeprefix(f"{cuts.over_time}: "))
        meshes = self.meshes * self.interleave
        tasks = (make_task(f"stage{s}", mesh=mesh, logical_axes=self.logical_axes) for s, mesh in enumerate(meshes))
        places = [
            replace(task, cuts=cuts, types=self._types, part=n)
            for task, parts in zip(tasks, stages, strict=True)
            for n in range(len(parts))
        ]
        with self._on_types():
            results = run(units, [*itertools.chain(*stages)], places, traced.arrays)
        if self._types is not None:
            results = [_compat.enter_mesh(x, outer) for x in results]
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
        return (
            contextlib.nullcontext() if self._types is None else _compat.abstract_mesh_context(self._types, typed=True)
        )

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
        results: list[Cuts] = []

        def cut(fn: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                results.append(replace(self, fn=fn).cuts(*args, **kwargs))
                return fn(*args, **kwargs)

            return noted

        traced = self._traced(args, kwargs, cut)
        return results[0] if results else self._cut(traced)[2]

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change = lambda fn: fn) -> _Trace:
        """Trace the function; ``change`` may wrap the functions of its microbatch loops."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        first = make_task("pipeline", mesh=self.meshes[0], logical_axes=self.logical_axes)
        first = replace(first, types=self._types)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        loops: list[Callable[..., Any]] = []

        def note(fn: Callable[..., Any]) -> Callable[..., Any]:
            loops.append(fn)
            return change(fn)

        def fn(*arrays: Any) -> Any:
            values = list(leaves)
            for i, array in zip(where, arrays, strict=True):
                values[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, values)
            changes = refuse_changes(lambda: self._name, (inner_args, inner_kwargs))
            with in_loops(note), inside(first), changes:
                return self.fn(*inner_args, **inner_kwargs)

        arrays = tuple(leaves[i] for i in where)
        with self._on_types(), _compat.explain_trace(lambda: self._name):
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        number = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]  # keywords follow
        trained = [place for place, array in enumerate(arrays) if hasattr(array, "primal")] or [
            place for place, i in enumerate(where) if i < len(number) and number[i] in self.argnums
        ]
        return _Trace(closed, jax.tree.structure(shapes), arrays, tuple(trained), bool(loops))

    @property
    def _name(self) -> str:
        return f"pipeline: {getattr(self.fn, '__name__', 'the function')}"

    def _cut(self, traced: _Trace) -> tuple[Units, list[list[tuple[Unit, ...]]], Cuts]:
        """Return the units of a function, the parts of its stages, and what they cost."""
        number = len(self.meshes) * self.interleave
        units = read(traced.closed, number, traced.trained)
        candidates = [self._cut_order(units.forward, order, number) for order in orders(units.forward)]
        best = functools.reduce(lambda old, new: new if _worth(new[0], old[0]) else old, candidates)
        cut, chain, order, works, finer, layers = best
        pieces = list(itertools.pairwise(cut.ends))
        stages = tuple(order[a:b] for a, b in pieces)
        cuts = (
            StageCut(*_line(stage), sum(chain.times[a:b]), held, chain.received(a, b), add_work(works[a:b]))
            for stage, held, (a, b) in zip(stages, count_state(units.forward, stages), pieces, strict=True)
        )
        name = getattr(self.fn, "__name__", "pipeline")
        kinds = [*map(kind_of, order)]
        equal = balance.equal_stages([tuple(kinds[a:b]) for a, b in pieces])
        described = Cuts(tuple(cuts), name, equal, finer, scan_over_time(units, stages))
        ends = balance.split_stages(cut.ends, layers, kinds)
        parts = [[order[a:b] for a, b in itertools.pairwise(stage)] for stage in ends]
        shared = shares_executables(device for mesh in self.meshes for device in mesh.devices.flat)
        meshes = self.meshes * self.interleave
        return units, parts if shared and not any(map(eq, meshes, meshes[1:])) else [[s] for s in stages], described

    def _cut_order(
        self, function: Units, order: tuple[Unit, ...], number: int
    ) -> tuple[ChainCut, Chain, tuple[Unit, ...], list[Work], float, Sequence[Layers]]:
        """Return the cut of an order, what it cuts, the slowest stage of cuts inside of layers, and the layers."""
        if not order:
            raise UsageError(f"{self._name} returns nothing of its arrays that is worth a stage; return the result")
        if len(order) < number:
            raise UsageError(
                f"pipeline: {len(order)} operations cannot make {number} stages ({len(self.meshes)} submeshes x "
                f"{self.interleave}); give fewer meshes"
            )
        works = work_of(function, order)
        chain = chain_of(function, order, works)
        cut, finest, layers = self._cut_chain(chain, order, number)
        if self.seconds:
            chain = rescale(chain, cut.ends, self.seconds)
            cut, finest, layers = self._cut_chain(chain, order, number)
        return cut, chain, order, works, finest, layers

    def _cut_chain(self, chain: Chain, order: Sequence[Unit], number: int) -> tuple[ChainCut, float, Sequence[Layers]]:
        """Return the cut of a chain, the time of the slowest stage of cuts inside of layers, and the layers."""
        anywhere = balance.cut_chain(chain, number)
        layers = () if self.within_layers else balance.find_layers(chain, [*map(kind_of, order)])
        between = balance.cut_between_layers(chain, number, layers, anywhere) if layers else None
        return between or anywhere, anywhere.slowest, layers


@dataclass(frozen=True)
class _Trace:
    """A traced function."""

    closed: Any
    tree: Any  # of its results
    arrays: tuple[Any, ...]  # that it is called with
    trained: tuple[int, ...]  # those with a gradient
    loops: bool  # whether it has microbatch loops


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
    fn: Callable[P, R],
    meshes: Sequence[Mesh] | None,
    *,
    interleave: int = 1,
    argnums: int | Sequence[int] = 0,
    seconds: Sequence[float] | None = None,
    logical_axes: AxisMap | None = None,
    within_layers: bool = False,
) -> PipelinedFunction[P, R]:
    """Cut a function without marks into the stages of a pipeline.

    The result takes the arguments of ``fn`` and computes the same. Use it where a function with tasks could be: inside
    of `multimesh.microbatch`, `jax.grad` and `multimesh.jit`. When it is traced, its operations become one
    `multimesh.task` for each stage. Stages take about the same time, and few bytes go between them. A `jax.lax.scan`
    over stacked layers is cut between its rows; each stage has its own part of the stack. Other layers that repeat
    stay whole too.

    Parameters
    ----------
    fn
        A function of arrays that JAX can trace: a loss, a forward pass, or a train step. A backward pass that it has
        itself runs in the stages of its forward pass; what follows, such as an optimizer, runs where its arrays are. A
        train step with `multimesh.microbatch` inside is cut within that loop.
    meshes
        The submesh of each stage, in the order of the pipeline; one may have several. None, or no mesh: ``fn`` stays
        one program, as under `jax.jit`.
    interleave
        How often the stages go through ``meshes``.
    argnums
        The arguments that are trained, as of `jax.grad`: a stage computes no gradient of others.
        ``()``: none, as in a forward pass. Where `multimesh.microbatch` is inside, those of its function. Where
        `jax.grad` is around the call, the arrays that it differentiates count instead.
    seconds
        Measured seconds of F, B and W together of each stage of the cut that is made without them. The function is cut
        again, by seconds: an operation takes its part of those of its stage.
    logical_axes
        For `multimesh.with_sharding_constraint` in ``fn``, as in `multimesh.task`. All meshes then need the same axes.
    within_layers
        Whether stages may begin inside of layers that repeat. By default they do so only where that makes the slowest
        stage more than 5 % faster: stages of whole layers share their kernels.

    Returns
    -------
    PipelinedFunction
        ``pipelined(*args)`` runs it; ``pipelined.cuts(*args)`` says where it is cut, without running it.

    Raises
    ------
    UsageError
        When it is traced, if there are fewer operations than stages, ``fn`` has tasks, or its `multimesh.microbatch` is
        in a `jax.jit`.

    Examples
    --------
    >>> meshes = [Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2]]
    >>> loss = lambda layers, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), layers, x) ** 2)
    >>> step = mm.microbatch(jax.value_and_grad(mm.pipeline(loss, meshes)), argnum=1, size=2, reduce="mean")
    >>> value, grads = mm.jit(step)([jnp.eye(4)] * 4, jnp.ones((8, 4)))
    >>> [grad.device.id for grad in grads]
    [0, 0, 1, 1]
    """
    checks.function("pipeline: the first argument", fn)
    grids = () if meshes is None else checks.many("pipeline: meshes", meshes, "a sequence of jax meshes")
    for mesh in grids:
        if not isinstance(mesh, Mesh):
            raise checks.refuse("pipeline: a mesh", "a jax.sharding.Mesh", mesh)
    interleave = checks.integer("pipeline: interleave", interleave, 1)
    listed = (argnums,) if isinstance(argnums, int) else argnums
    numbers = checks.many("pipeline: argnums", listed, "numbers of arguments")
    trained = frozenset(checks.integer("pipeline: argnums", number, 0) for number in numbers)
    took = tuple(cost(x, "pipeline: seconds of a stage") for x in seconds or ())
    if seconds is not None and len(took) != len(grids) * interleave:
        raise UsageError(f"pipeline: {len(grids) * interleave} stages, but seconds of {len(took)}; give one for each")
    return PipelinedFunction(fn, grids, interleave, trained, took, logical_axes, within_layers)
