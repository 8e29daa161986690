"""Mass of particles on a grid, and values of a grid at particles, by clouds in cells."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out, size
from multimesh.errors import UsageError

from multimesh_numerics.grids.halos import halo_add, halo_exchange


class MassGrid(NamedTuple):
    """A grid of mass, and how many particles were outside the halos of their devices and so left out."""

    mass: Array
    lost: Array


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A grid, the mesh axes of its dimensions and of its particles', and the cells around a block that these reach."""

    mesh: AnyMesh
    shape: tuple[int, ...]
    axes: tuple[Axes, ...]
    particles: tuple[Axes, ...]
    widths: tuple[int, ...]

    @property
    def spec(self) -> P:
        return P(*map(entry, self.axes))

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(n // size(self.mesh, axes) for n, axes in zip(self.shape, self.axes, strict=True))

    def clouds(self, positions: Array) -> tuple[Array, Iterator[tuple[tuple[Array, ...], Array]]]:
        """Flag particles (k, d) outside of the block; for each corner of their clouds yield cells and weights.

        Cells are those of the block with its halo. Weights outside are zero.
        """
        corners, fractions, lost = [], [], jnp.zeros(len(positions), bool)
        for d, (n, block, axes, width) in enumerate(zip(self.shape, self.block, self.axes, self.widths, strict=True)):
            origin = lax.axis_index(axes) * block if axes else 0
            x = positions[:, d] - origin
            if axes:  # the image that is nearest to the middle of the block
                x = x - n * jnp.round((x - (block - 1) / 2) / n)
            corner = jnp.floor(x)
            fractions.append(x - corner)
            corners.append(corner.astype(int) + width)
            lost |= ((corner < -width) | (corner + 1 >= block + width)) & bool(axes) | ~jnp.isfinite(x)

        def cells_and_weights() -> Iterator[tuple[tuple[Array, ...], Array]]:
            for step in itertools.product((0, 1), repeat=len(self.shape)):
                weight = math.prod((f if s else 1 - f) for s, f in zip(step, fractions, strict=True))
                cell = [c + s if axes else (c + s) % n
                        for c, s, n, axes in zip(corners, step, self.shape, self.axes, strict=True)]  # fmt: skip
                yield tuple(cell), jnp.where(lost, 0, weight)

        return lost, cells_and_weights()


def _check(
    func: str, grid: Any, mesh: AnyMesh | None, spec: P | None, halo: Any, positions: Any
) -> tuple[Array, _Grid]:
    """Return positions as an array, and their grid, which is like ``grid``, both checked."""
    mesh, axes = specs.find(func, grid, mesh, spec)
    specs.check_fits(f"{func}: the grid", grid.shape, P(*map(entry, axes)) if spec is None else spec, mesh)
    if isinstance(halo, bool) or not isinstance(halo, int) or halo < 1:
        raise UsageError(f"{func}: halo is a number of cells, at least 1; got {halo!r}")
    positions, rank = specs.as_array(positions), len(grid.shape)
    if positions.shape[-1:] != (rank,) or not jnp.issubdtype(positions.dtype, jnp.floating):
        raise UsageError(
            f"{func}: positions are floats of shape (..., {rank}), one for each dimension of the grid; got "
            f"{positions.dtype}{list(positions.shape)}"
        )
    if positions.ndim not in (2, rank + 1):
        raise UsageError(
            f"{func}: positions have shape (particles, {rank}), or that of a grid of particles and {rank}; got "
            f"{positions.shape}"
        )
    particles = (sum(axes, ()),) if positions.ndim == 2 else axes
    specs.check_fits(f"{func}: positions", positions.shape, P(*map(entry, particles)), mesh)
    return positions, _Grid(mesh, grid.shape, axes, particles, tuple(halo if sharded else 0 for sharded in axes))


@functools.partial(jax.jit, static_argnames="grid")
def _paint(positions: Array, mass: Array, *, grid: _Grid) -> MassGrid:
    def run(positions: Array, mass: Array) -> MassGrid:
        positions = positions.reshape(-1, positions.shape[-1])
        lost, clouds = grid.clouds(positions)
        block = jnp.zeros([n + 2 * w for n, w in zip(grid.block, grid.widths, strict=True)], positions.dtype)
        for cell, weight in clouds:
            block = block.at[cell].add(weight * mass.reshape(-1), mode="drop")
        total = halo_add(block, grid.widths, list(map(entry, grid.axes)))
        return MassGrid(total, lax.psum(jnp.sum(lost), specs.axis_names(grid.spec)))

    spec, out = P(*map(entry, grid.particles)), MassGrid(grid.spec, P())
    run = jax.shard_map(run, mesh=grid.mesh, in_specs=(spec, spec), out_specs=out, check_vma=False)
    return run(lay_out(positions, grid.mesh, *grid.particles), lay_out(mass, grid.mesh, *grid.particles))


def paint(
    positions: Array, mass: Array | float = 1.0, *, shape: Sequence[int], mesh: AnyMesh, spec: P, halo: int = 4
) -> MassGrid:
    """Give the mass of particles to the cells around them (cloud in cell), on a periodic grid.

    Parameters
    ----------
    positions
        In cells: (particles, D), sharded over all axes of the grid, or the shape of a grid of particles and D, sharded
        as the grid. A particle must be at most ``halo`` cells away from the block of the device that has it.
    mass
        One number, or one for each particle.
    shape, mesh, spec
        Shape and sharding of the grid, of two or three dimensions.
    halo
        Cells around a block that its particles may reach.

    Returns
    -------
    MassGrid
        ``mass``, of the grid's shape and sharding, and ``lost``, the number of particles that were too far away and
        were left out. Check that it is 0.

    Raises
    ------
    UsageError
        If shapes, dtypes, specs or the halo do not fit.
    """
    positions, grid = _check("paint", jax.ShapeDtypeStruct(tuple(shape), float), mesh, spec, halo, positions)
    mass = jnp.asarray(mass, positions.dtype)
    if mass.shape not in ((), positions.shape[:-1]):
        raise UsageError(f"paint: mass is one number or has shape {positions.shape[:-1]}; got {mass.shape}")
    return _paint(positions, jnp.broadcast_to(mass, positions.shape[:-1]), grid=grid)


@functools.partial(jax.jit, static_argnames="grid")
def _read(values: Array, positions: Array, *, grid: _Grid) -> Array:
    def run(values: Array, positions: Array) -> Array:
        lost, clouds = grid.clouds(positions.reshape(-1, positions.shape[-1]))
        block = halo_exchange(values, grid.widths, list(map(entry, grid.axes)))
        total = sum(weight * block.at[cell].get(mode="clip") for cell, weight in clouds)
        return jnp.where(lost, jnp.nan, total).reshape(positions.shape[:-1])

    spec = P(*map(entry, grid.particles))
    run = jax.shard_map(run, mesh=grid.mesh, in_specs=(grid.spec, spec), out_specs=spec, check_vma=False)
    return run(lay_out(values, grid.mesh, *grid.axes), lay_out(positions, grid.mesh, *grid.particles))


def read(
    values: Array, positions: Array, *, mesh: AnyMesh | None = None, spec: P | None = None, halo: int = 4
) -> Array:
    """Interpolate a periodic grid at particles, from the cells around them (cloud in cell); the transpose of `paint`.

    ``values`` is the grid, sharded by ``mesh`` and ``spec``, or as the array carries them. Positions, ``halo`` and
    errors are those of `paint`. The result has a value for each particle; NaN for those that are too far away.
    """
    values = specs.as_array(values)
    positions, grid = _check("read", values, mesh, spec, halo, positions)
    return _read(values, positions, grid=grid)
