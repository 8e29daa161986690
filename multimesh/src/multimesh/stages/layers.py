"""``sequential``: a list of layers as the stages of a pipeline, cut by their costs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from multimesh.core import _compat, checks
from multimesh.errors import UsageError
from multimesh.ir.flops import count_program
from multimesh.marking.tasks import task
from multimesh.schedules import LayerCosts, Partition, partition
from multimesh.schedules.partitioning import STATES, cut

Layer = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sequential:
    """A function of parameters and an input, made by `sequential`."""

    layers: tuple[Layer, ...]
    meshes: tuple[Mesh, ...]
    sizes: tuple[int, ...] | None
    microbatches: int
    chunks: int
    costs: tuple[LayerCosts | float, ...] | None
    memory: float | None
    placement: tuple[int, ...]

    def __call__(self, params: Sequence[Any], x: Any) -> Any:
        """Run all layers; each stage is a task on its submesh."""
        for stage, piece in enumerate(self.partition(params, x).pieces):
            run = functools.partial(_run, self.layers[piece.start : piece.stop])
            mesh = self.meshes[self.placement[stage % len(self.placement)]]
            x = task(run, f"stage{stage}", mesh=mesh)(tuple(params[piece.start : piece.stop]), x)
        return x

    def partition(self, params: Sequence[Any], x: Any) -> Partition:
        """Cut the layers, without running them.

        Takes parameters and an input, as arrays or ``jax.ShapeDtypeStruct``.
        """
        if len(params) != len(self.layers):
            raise UsageError(
                f"sequential: {len(self.layers)} layers, but parameters for {len(params)}; give a sequence"
            )
        if self.sizes is not None:
            return cut(self.costs or (0.0,) * len(self.layers), self.sizes)
        costs = self.costs or estimate_layers(self.layers, params, x, self.meshes)
        shape: dict[str, Any] = {"microbatches": self.microbatches, "chunks": self.chunks}
        return partition(costs, len(self.meshes), memory=self.memory, **shape)


def sequential(
    layers: Sequence[Layer],
    meshes: Sequence[Mesh],
    *,
    partition: str | Sequence[int] = "auto",
    microbatches: int,
    chunks: int = 1,
    costs: Sequence[LayerCosts | float] | None = None,
    memory: float | None = None,
    placement: Sequence[int] | None = None,
) -> Sequential:
    """Make the stages of a pipeline of a list of layers.

    Parameters
    ----------
    layers
        Functions ``layer(params, x)``. Each takes what the one before returns.
    meshes
        The submeshes, in the order of the pipeline.
    partition
        The number of layers of each stage, or ``"auto"``: `multimesh.schedules.partition` cuts by the costs.
    microbatches
        The number of microbatches of the loop around it.
    chunks
        Stages on each submesh.
    costs
        The costs of each layer, as you measured them; a number is its time. None: they are estimated when the function
        is traced. The time is then the operations on a microbatch, a forward three times (twice without parameters);
        ``held`` is four times the bytes of the parameters; ``activation`` is what JAX keeps for the backward pass.
    memory
        Bytes of a submesh.
    placement
        The submesh of stages 0, 1, ..., as `Schedule.placement` of the loop's schedule gives it; by default in turn.

    Returns
    -------
    Sequential
        Called as ``fn(params, x)`` with a sequence of parameters, one for each layer. ``fn.partition(params, x)`` shows
        how the layers are cut.

    Raises
    ------
    UsageError
        If layers, meshes and sizes do not fit together; when it is traced, if no cut fits into memory.

    Examples
    --------
    >>> model = mm.sequential([embed, *blocks, head], meshes, microbatches=8)  # doctest: +SKIP
    >>> def loss(params, batch):  # doctest: +SKIP
    ...     return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)
    """
    given = checks.many("sequential: layers", layers, "a sequence of functions")
    for layer in given:
        checks.function("sequential: a layer", layer)
    grids = checks.many("sequential: meshes", meshes, "a sequence of jax meshes")
    for mesh in grids:
        if not isinstance(mesh, Mesh):
            raise checks.refuse("sequential: a mesh", "a jax.sharding.Mesh", mesh)
    chunks = checks.whole("sequential: chunks", chunks, 1)
    number = len(grids) * chunks
    sizes = None
    if partition != "auto":
        if isinstance(partition, str):
            raise UsageError(f"sequential: partition must be 'auto' or the layers of each stage, got {partition!r}")
        found = checks.many("sequential: partition", partition, "'auto' or a sequence of ints")
        sizes = tuple(checks.whole("sequential: partition: a size", size, 1) for size in found)
        if (len(sizes), sum(sizes)) != (number, len(given)):
            raise UsageError(
                f"sequential: partition has {len(sizes)} stages with {sum(sizes)} layers, but there are {number} "
                f"({len(grids)} submeshes x {chunks}) and {len(given)} layers"
            )
    if costs is not None and len(costs) != len(given):
        raise UsageError(f"sequential: costs of {len(costs)} layers, but there are {len(given)}")
    route = checks.placement("sequential", placement, len(grids))
    microbatches = checks.whole("sequential: microbatches", microbatches, 1)
    known = None if costs is None else tuple(costs)
    return Sequential(given, grids, sizes, microbatches, chunks, known, memory, route)


def estimate_layers(
    layers: Sequence[Layer], params: Sequence[Any], x: Any, meshes: Sequence[Mesh]
) -> tuple[LayerCosts, ...]:
    """Estimate the costs of layers, from the types of their parameters and of the input of the first.

    They are traced on what submeshes with Explicit axes have in common.
    """
    costs = []
    types = _compat.common_mesh(meshes)
    on_types = contextlib.nullcontext if types is None else functools.partial(_compat.types_context, types)

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        plain = _compat.abstractify(x)
        return plain if types is None else _compat.with_layout(plain, jax.typeof(x).sharding.spec, types)

    x = jax.tree.map(struct, x)
    for layer, own in zip(layers, params, strict=True):
        own = jax.tree.map(struct, own)
        with on_types():
            forward, shapes = jax.make_jaxpr(layer, return_shape=True)(own, x)
            kept = jax.make_jaxpr(lambda p, x, layer=layer: jax.tree.leaves(jax.vjp(layer, p, x)[1]))(own, x).jaxpr
        count = len(jax.tree.leaves(own))
        given = set(kept.invars[:count])
        residuals = {v for v in kept.outvars if not isinstance(v, _compat.Literal)} - given
        held = sum(map(_compat.nbytes, jax.tree.leaves(own)))
        activation = sum(_compat.nbytes(v.aval) for v in residuals)
        costs.append(
            LayerCosts((3 if count else 2) * count_program(forward.jaxpr), float(STATES * held), float(activation))
        )
        x = jax.tree.unflatten(jax.tree.structure(shapes), map(_compat.struct_of, forward.out_avals))
    return tuple(costs)


def _run(layers: Sequence[Layer], params: Sequence[Any], x: Any) -> Any:
    for layer, own in zip(layers, params, strict=True):
        x = layer(own, x)
    return x
