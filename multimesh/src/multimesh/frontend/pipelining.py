"""``pipeline``: a function without marks as the stages of a pipeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.core import _compat, checks
from multimesh.core.submesh import AxisMap, make_task
from multimesh.core.text import amount, columns
from multimesh.errors import UsageError
from multimesh.frontend.chains import chain_of, orders
from multimesh.frontend.staged import run
from multimesh.frontend.units import Unit, Units, read
from multimesh.marking import contexts
from multimesh.marking.flax_modules import unchanged
from multimesh.marking.tracing import in_a_mesh, inside, partitioned_trace, recorded
from multimesh.schedules import LayerCosts
from multimesh.schedules.costs import cost
from multimesh.schedules.cuts import SLACK, Chain, ChainCut, cut_chain
from multimesh.schedules.partitioning import alive

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class StageCut:
    """A stage of a function that `pipeline` has cut.

    Attributes
    ----------
    line
        The user's line of its first operation.
    costs
        Operations, bytes of the training state of what it reads first, and bytes that it keeps of a microbatch.
    received
        Bytes that it gets from stages before it, for each microbatch; a shared parameter counts too.
    """

    line: str
    costs: LayerCosts
    received: float


@dataclass(frozen=True)
class Cuts:
    """How `pipeline` has cut a function; ``str`` is a table of the stages.

    Attributes
    ----------
    stages
        One for each stage, in order.
    """

    stages: tuple[StageCut, ...]

    @property
    def slowest(self) -> float:
        """Operations of the longest stage, as a multiple of the mean."""
        times = [stage.costs.time for stage in self.stages]
        return max(times) * len(times) / sum(times) if any(times) else 1.0

    @property
    def sent(self) -> float:
        """Bytes that stages get from stages before them."""
        return sum(stage.received for stage in self.stages)

    def __str__(self) -> str:
        total = sum(stage.costs.time for stage in self.stages) or 1.0
        parts: list[tuple[str, Sequence[str]]] = [
            ("stage", [str(s) for s in range(len(self.stages))]),
            ("operations", [amount(stage.costs.time, "") for stage in self.stages]),
            ("share", [f"{100 * stage.costs.time / total:.1f} %" for stage in self.stages]),
            ("state", [amount(stage.costs.held, "bytes") for stage in self.stages]),
            ("receives", [amount(stage.received, "bytes") for stage in self.stages]),
            ("starts at", [stage.line for stage in self.stages]),
        ]
        end = f"the slowest stage has {self.slowest:.2f} x the mean; {amount(self.sent, 'bytes')} are sent"
        return "\n".join([*columns(parts, left=(5,)), end])


@dataclass(frozen=True)
class Pipelined:
    """A function that is cut into stages when it is traced, made by `pipeline`."""

    fn: Callable[..., Any]
    meshes: tuple[Mesh, ...]
    interleave: int
    memory: float
    placement: tuple[int, ...]
    logical_axes: AxisMap | None = field(hash=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; each stage is a task on its submesh."""
        if not self.meshes or contexts.ignoring() or not recorded():
            with in_a_mesh(self._name):
                return self.fn(*args, **kwargs)
        if partitioned_trace():
            args, kwargs = jax.tree.map(_compat.leave_mesh, (args, kwargs))
        traced = self._traced(args, kwargs)
        found, stages, _ = self._cut(traced.closed)
        meshes = [self.meshes[self.placement[s % len(self.placement)]] for s in range(len(stages))]
        return jax.tree.unflatten(traced.tree, run(found, stages, meshes, self.logical_axes, traced.arrays))

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
        return self._cut(self._traced(args, kwargs).closed)[2]

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
        leaves, tree = jax.tree.flatten((args, kwargs))
        first = make_task("pipeline", mesh=self.meshes[0], logical_axes=self.logical_axes)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def fn(*arrays: Any) -> Any:
            full = list(leaves)
            for i, array in zip(where, arrays, strict=True):
                full[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, full)
            with inside(first), unchanged(lambda: self._name, (inner_args, inner_kwargs)):
                return self.fn(*inner_args, **inner_kwargs)

        arrays = tuple(leaves[i] for i in where)
        with _compat.traced_as(lambda: self._name):
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        return _Traced(closed, jax.tree.structure(shapes), arrays)

    @property
    def _name(self) -> str:
        return f"pipeline: {getattr(self.fn, '__name__', 'the function')}"

    def _cut(self, closed: Any) -> tuple[Units, tuple[tuple[Unit, ...], ...], Cuts]:
        number = len(self.meshes) * self.interleave
        found = read(closed, number)
        best: tuple[ChainCut, Chain, tuple[Unit, ...]] | None = None
        for order in orders(found):
            if len(order) < number:
                raise UsageError(
                    f"pipeline: {len(order)} operations cannot make {number} stages ({len(self.meshes)} submeshes x "
                    f"{self.interleave}); give fewer meshes"
                )
            chain = chain_of(found, order)
            cut = cut_chain(chain, number, None if math.isinf(self.memory) else self._fits)
            if cut is not None and (best is None or _worth(cut, best[0])):
                best = cut, chain, order
        if best is None:
            raise UsageError(
                f"pipeline: no cut into {number} stages fits into {amount(self.memory, 'bytes')} on each submesh; "
                "use more submeshes, or keep less of a microbatch with jax.checkpoint"
            )
        cut, chain, order = best
        pieces = list(itertools.pairwise(cut.ends))
        cuts = Cuts(tuple(StageCut(_line(order[a:b]), chain.costs_of(a, b), chain.received(a, b)) for a, b in pieces))
        return found, tuple(order[a:b] for a, b in pieces), cuts

    def _fits(self, stage: int, costs: LayerCosts) -> bool:
        kept = alive(stage, len(self.meshes), self.interleave) * costs.activation
        return costs.held + kept <= self.memory / self.interleave


@dataclass(frozen=True)
class _Traced:
    """A traced function, the tree of its results, and the arrays that it is called with."""

    closed: Any
    tree: Any
    arrays: tuple[Any, ...]


def _worth(new: ChainCut, old: ChainCut) -> bool:
    """Whether a cut is better than another: fewer bytes where both are about as even, else the more even one."""
    if max(new.slowest, old.slowest) <= (1 + SLACK) * min(new.slowest, old.slowest):
        return (new.sent, new.slowest) < (old.sent, old.slowest)
    return new.slowest < old.slowest


def _line(stage: Sequence[Unit]) -> str:
    """The user's line of a stage's first operation, and its row of a scan."""
    for unit in stage:
        line = _compat.user_line(unit.eqn.source_info, libraries=False)
        if not line:
            continue
        scopes, _ = _compat.scopes(unit.eqn)
        where = f"{line} in {'/'.join(scopes)}" if scopes else line
        return f"{where}, row {unit.rows.start} of {unit.eqn.params['length']}" if unit.rows else where
    return "a line that JAX did not record"


def pipeline(
    fn: Callable[..., Any],
    meshes: Sequence[Mesh] | None,
    *,
    interleave: int = 1,
    memory: float | None = None,
    placement: Sequence[int] | None = None,
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
        A function of arrays that JAX can trace: a loss or a forward pass. Gradients are taken around it.
    meshes
        The submeshes, in the order of the pipeline. None, or no mesh: ``fn`` stays one program, as under `jax.jit`.
    interleave
        Stages on each submesh.
    memory
        Bytes of a submesh. A stage fits if it takes at most its part: four times the parameters that it reads, and what
        it keeps of as many microbatches as 1F1B has in flight. None: enough.
    placement
        The submesh of stages 0, 1, ..., as `Schedule.placement` of the loop's schedule gives it; by default in turn.
    logical_axes
        For `multimesh.with_sharding_constraint` in ``fn``, as in `multimesh.task`. All meshes then need the same axes.

    Returns
    -------
    Pipelined
        ``pipelined(*args)`` runs it; ``pipelined.cuts(*args)`` says where it is cut, without running it.

    Raises
    ------
    UsageError
        When it is traced, if there are fewer operations than stages, no cut fits into memory, or ``fn`` has tasks.

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
    route = tuple(range(len(grids))) if placement is None else tuple(placement)
    if not set(route) <= set(range(len(grids))) or len(route) < bool(grids):
        raise UsageError(f"pipeline: placement={placement!r} must name submeshes 0 to {len(grids) - 1}")
    return Pipelined(fn, grids, interleave, room, route, logical_axes)
