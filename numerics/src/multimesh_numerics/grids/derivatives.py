"""Derivatives, Poisson's equation and power spectra of periodic grids, by Fourier transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out
from multimesh.errors import UsageError

from multimesh_numerics.fft import fftfreq, irfftn, rfftfreq, rfftn


class PowerSpectrum(NamedTuple):
    """Mean wavenumber, power and number of modes in each bin."""

    k: Array
    power: Array
    modes: Array


def _spectrum_axes(axes: Sequence[Axes]) -> tuple[Axes, ...]:
    """Mesh axes of the transposed spectrum's dimensions: (Y, X), (Y, Z, X) or (Z, Y, X)."""
    if len(axes) == 2:
        return axes[0], ()
    return (axes[1], axes[0], ()) if axes[1] else (axes[0], (), ())


def _order(axes: Sequence[Axes]) -> tuple[int, ...]:
    """Return the dimension of the grid that each dimension of the transposed spectrum is."""
    return (1, 0) if len(axes) == 2 else (2, 1, 0) if axes[1] else (1, 2, 0)


def _lengths(func: str, box: Any, shape: Sequence[int]) -> tuple[float, ...]:
    lengths = tuple(shape) if box is None else (box,) * len(shape) if isinstance(box, (int, float)) else tuple(box)
    if len(lengths) != len(shape) or any(not length > 0 for length in lengths):
        raise UsageError(f"{func}: box is a length, or one for each of {len(shape)} dimensions; got {box!r}")
    return tuple(map(float, lengths))


def wavenumbers(
    shape: Sequence[int], *, mesh: AnyMesh, spec: P, box: float | Sequence[float] | None = None, dtype: Any = None
) -> tuple[Array, ...]:
    """Return the wavenumbers kx, ky (and kz) for the result of ``mm.fft.rfftn(x, transposed=True)``.

    Parameters
    ----------
    shape, mesh, spec
        Shape and sharding of the grid ``x``, of two or three dimensions.
    box
        Length of the grid, or one for each dimension; by default its cells have length 1.
    dtype
        float32 or float64; by default JAX's default.

    Returns
    -------
    For each dimension of ``x``, in its order, ``2 pi n / length``. Each broadcasts with the transposed spectrum and is
    sharded as its dimension there. The highest wavenumber of an even dimension, for which a derivative has no
    sign, is there with the sign that JAX gives it.
    """
    grid = jax.ShapeDtypeStruct(tuple(shape), float)
    if len(shape) not in (2, 3):
        raise UsageError(f"wavenumbers: a grid has two or three dimensions, not {len(shape)}")
    mesh, axes = specs.find("wavenumbers", grid, mesh, spec)
    lengths = _lengths("wavenumbers", box, shape)
    order, spread = _order(axes), _spectrum_axes(axes)
    result = []
    for d, (n, length) in enumerate(zip(shape, lengths, strict=True)):
        place = order.index(d)
        of = rfftfreq if d == len(shape) - 1 else fftfreq
        k = 2 * math.pi * of(n, length / n, mesh=mesh, spec=P(entry(spread[place])), dtype=dtype)
        result.append(k.reshape([-1 if at == place else 1 for at in range(len(shape))]))
    return tuple(result)


def _filter(
    func: str, x: Array, mesh: AnyMesh | None, spec: P | None, box: Any, filters: Callable[..., Sequence[Array]]
) -> list[Array]:
    """Apply each of the filters to ``x`` in Fourier space. They are functions of the wavenumbers."""
    x = specs.as_array(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(f"{func}: the grid is {x.dtype}; it must be real")
    mesh, axes = specs.find(func, x, mesh, spec)
    spec = P(*map(entry, axes))
    k = wavenumbers(x.shape, mesh=mesh, spec=spec, box=box, dtype=x.dtype)
    spectrum = rfftn(x, mesh=mesh, spec=spec, transposed=True)
    back = functools.partial(irfftn, s=x.shape, mesh=mesh, spec=P(*map(entry, _spectrum_axes(axes))), transposed=True)
    return [back(spectrum * f) for f in filters(x.shape, k)]


def _slopes(shape: Sequence[int], k: Sequence[Array]) -> list[Array]:
    """i k of each dimension, without the highest wavenumber of an even one: it has no sign, so no derivative."""
    highest = [jnp.max(jnp.abs(numbers)) if n % 2 == 0 else jnp.inf for n, numbers in zip(shape, k, strict=True)]
    return [1j * jnp.where(jnp.abs(numbers) < top, numbers, 0) for numbers, top in zip(k, highest, strict=True)]


def _square_norm(k: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, [numbers**2 for numbers in k])


def _inverse_laplacian(shape: Sequence[int], k: Sequence[Array]) -> list[Array]:
    square = _square_norm(k)
    return [-jnp.where(square > 0, 1 / jnp.where(square > 0, square, 1), 0)]


def gradient(
    x: Array, *, mesh: AnyMesh | None = None, spec: P | None = None, box: float | Sequence[float] | None = None
) -> tuple[Array, ...]:
    """Differentiate a real periodic grid along each of its dimensions, exactly for what the grid can hold.

    Parameters
    ----------
    x
        float32 or float64, of two or three dimensions, sharded over the first or, of three, the first two.
    mesh, spec
        The sharding of ``x``, if the array does not carry it.
    box
        Length of the grid, or one for each dimension; by default its cells have length 1.

    Returns
    -------
    For each dimension an array of the shape and sharding of ``x``.

    Raises
    ------
    UsageError
        If dtype, specs or ``box`` do not fit, as `multimesh.fft.rfftn`.
    """
    return tuple(_filter("gradient", x, mesh, spec, box, _slopes))


def poisson(
    source: Array, *, mesh: AnyMesh | None = None, spec: P | None = None, box: float | Sequence[float] | None = None
) -> Array:
    """Solve ``laplacian(f) = source`` for the periodic ``f`` with mean zero. The mean of ``source`` does not count.

    Arguments and errors are those of `gradient`. The result has the shape and sharding of ``source``.
    """
    return _filter("poisson", source, mesh, spec, box, _inverse_laplacian)[0]


def power_spectrum(
    x: Array,
    bins: int = 32,
    *,
    mesh: AnyMesh | None = None,
    spec: P | None = None,
    box: float | Sequence[float] | None = None,
) -> PowerSpectrum:
    """Return the power of a real periodic grid: the mean of ``|rfftn(x)|^2 * volume / cells^2`` in bins of wavenumbers.

    Parameters
    ----------
    x, mesh, spec, box
        As in `gradient`.
    bins
        Bins of equal width, from zero to the highest wavenumber along one dimension, which the last bin includes.
        The mean of ``x``, at wavenumber zero, is left out.

    Returns
    -------
    PowerSpectrum
        Each (bins,), whole on every device. Both of each pair of conjugate modes count. Empty bins are NaN.

    Raises
    ------
    UsageError
        As `gradient`, and if ``bins`` is less than 1.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise UsageError(f"power_spectrum: bins is a number, at least 1; got {bins!r}")
    x = specs.as_array(x)
    mesh, axes = specs.find("power_spectrum", x, mesh, spec)
    lengths = _lengths("power_spectrum", box, x.shape)
    spec = P(*map(entry, axes))
    k = wavenumbers(x.shape, mesh=mesh, spec=spec, box=lengths, dtype=x.dtype)
    spectrum = rfftn(x, mesh=mesh, spec=spec, transposed=True)
    top = max(math.pi * n / length for n, length in zip(x.shape, lengths, strict=True))
    volume = math.prod(lengths) / math.prod(x.shape) ** 2
    weights = [
        _modes(x.shape[d], d == x.ndim - 1, length) for d, length in zip(_order(axes), spectrum.shape, strict=True)
    ]
    layout = NamedSharding(mesh, P(*map(entry, _spectrum_axes(axes))))
    return _bin(spectrum, k, weights, layout, bins, top, volume)


def _modes(n: int, last: bool, length: int) -> Array:
    """Return the number of modes that each entry of a dimension of the spectrum stands for: none for its padding."""
    index = jnp.arange(length)
    if not last:
        return jnp.where(index < n, 1.0, 0.0)
    self_conjugate = (index == 0) | (2 * index == n)  # of others the conjugate is left out
    return jnp.where(index > n // 2, 0.0, jnp.where(self_conjugate, 1.0, 2.0))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _bin(
    x: Array, k: tuple[Array, ...], weights: list[Array], layout: NamedSharding, bins: int, top: float, volume: float
) -> PowerSpectrum:
    def run(spectrum: Array, size: Array, weight: Array) -> Array:
        inside = (size > 0) & (size <= top * (1 + 1e-6))
        number = jnp.where(inside, jnp.minimum(size / top * bins, bins - 1), bins).astype(int)
        power = jnp.real(spectrum) ** 2 + jnp.imag(spectrum) ** 2
        rows = jnp.stack([weight, weight * size, weight * power * volume])
        sums = jnp.zeros((3, bins), power.dtype).at[:, number.reshape(-1)].add(rows.reshape(3, -1), mode="drop")
        return lax.psum(sums, specs.axis_names(layout.spec))

    size = jnp.sqrt(_square_norm(k))
    weight = functools.reduce(jnp.multiply, jnp.ix_(*weights)).astype(size.dtype)
    f = jax.shard_map(run, mesh=layout.mesh, in_specs=(layout.spec,) * 3, out_specs=P())
    arrays = x, jnp.broadcast_to(size, x.shape), weight
    axes = tuple(map(specs.axes_of, layout.spec))
    modes, wavenumber, power = f(*(lay_out(array, layout.mesh, *axes) for array in arrays))
    return PowerSpectrum(wavenumber / modes, power / modes, modes)
