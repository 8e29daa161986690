"""`fftn`, `ifftn`, `rfftn` and `irfftn` of a sharded array; their frequencies, and the removal of padding."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.core import specs
from multimesh.core.specs import AnyMesh, Axes, entry, lay_out
from multimesh.errors import UsageError

from multimesh_numerics.fft import shards
from multimesh_numerics.fft.shards import Decomposition

Arguments = ParamSpec("Arguments")


def fftn(
    x: Array,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: P | None = None,
    transposed: bool = False,
    chunks: int = 1,
) -> Array:
    """Compute ``jnp.fft.fftn`` over two or three dimensions of a sharded array.

    Among the transformed dimensions the first must be sharded (a slab), or of three the first two (pencils), each over
    one mesh axis or several. The last one is whole on every device. The other dimensions may be sharded too. ``axes``
    has the order of the dimensions.

    ======  ==================  =======================  =============================
    ..      ``x``               result                   result with ``transposed``
    ======  ==================  =======================  =============================
    slab    (X, Y, Z)           (X, Y', Z)               (Y', Z, X)
    ..      P(a, None, None)    P(None, a, None)         P(a, None, None)
    pencil  (X, Y, Z)           (X, Y', Z')              (Z', Y', X)
    ..      P(a, b, None)       P(None, a, b)            P(b, a, None)
    two     (X, Z)              (X, Z')                  (Z', X)
    ..      P(a, None)          P(None, a)               P(a, None)
    ======  ==================  =======================  =============================

    Parameters
    ----------
    x
        float32, float64, complex64 or complex128.
    s, axes, norm
        As for ``jnp.fft.fftn``. ``transposed`` moves the transformed dimensions to the end.
    mesh, spec
        The sharding of ``x``, if the array does not carry it. A sharded dimension that does not divide is padded first.
    transposed
        Leave out the last local transposition. A filter between two transforms does not need it.
    chunks
        Cut each all-to-all into this many parts. GPUs can overlap them with transforms. A single transform of two
        dimensions isn't cut.

    Returns
    -------
    The transform, with the shape and spec above. Y' is Y, and Z' the size of the transformed Z, both padded with zeros
    to a multiple of the devices that share them. `unpad` removes the padding.

    Raises
    ------
    UsageError
        If sizes, dtypes or specs are wrong.

    Examples
    --------
    >>> x = jax.device_put(x, NamedSharding(mesh, P("x")))  # doctest: +SKIP
    >>> y = mm.fft.ifftn(mm.fft.fftn(x))  # doctest: +SKIP
    """
    return _transform("fftn", x, s, axes, norm, mesh=mesh, spec=spec, transposed=transposed, chunks=chunks)


def _like(of: Callable[Arguments, Array]) -> Callable[[Callable[..., Array]], Callable[Arguments, Array]]:
    """Give a function the signature of another."""

    def sign(fn: Any) -> Any:
        fn.__signature__ = inspect.signature(of)
        return fn

    return sign


@_like(fftn)
def rfftn(*args: Any, **kwargs: Any) -> Array:
    """Compute ``jnp.fft.rfftn`` of a real sharded array; otherwise as `fftn`.

    The transformed Z has Z // 2 + 1 entries. If it is sharded, it is padded as in `fftn`.
    """
    return _transform("rfftn", *args, **kwargs)


@_like(fftn)
def ifftn(*args: Any, **kwargs: Any) -> Array:
    """Compute ``jnp.fft.ifftn`` in the layout of `fftn`'s result, with the same ``axes`` and ``transposed``.

    ``mesh`` and ``spec`` are those of the transformed array. ``s`` has the sizes of the result, in the order of
    ``axes``; it is needed if `fftn` padded one. The result is sharded as the argument of `fftn`. A sharded dimension
    that does not divide is padded with zeros. Errors are those of `fftn`.
    """
    return _transform("ifftn", *args, **kwargs)


@_like(fftn)
def irfftn(*args: Any, **kwargs: Any) -> Array:
    """Compute ``jnp.fft.irfftn`` of an array in the layout of `rfftn`'s result; otherwise as `ifftn`.

    ``s`` is needed if the last of ``axes`` is sharded (pencils, two dimensions), since its size may be padded.
    """
    return _transform("irfftn", *args, **kwargs)


def _transform(
    func: str,
    x: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: P | None = None,
    transposed: bool = False,
    chunks: int = 1,
) -> Array:
    x = specs.as_array(x)
    specs.check_dtype(func, x)
    if func == "rfftn" and jnp.iscomplexobj(x):
        raise UsageError("rfftn: the array is complex; use fftn, or transform its real part")
    if norm not in (None, "backward", "ortho", "forward"):
        raise UsageError(f"{func}: norm is None, 'backward', 'ortho' or 'forward', got {norm!r}")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"{func}: chunks is a number, at least 1; got {chunks!r}")
    dims = _dims(func, x.ndim, s, axes)
    s = None if s is None else tuple(map(int, s))
    mesh, entries = specs.find(func, x, mesh, spec)
    inverse = func in ("ifftn", "irfftn")
    at = tuple(range(x.ndim - len(dims), x.ndim)) if inverse and transposed else dims
    order = [entries[d] for d in at]
    batch = tuple(e for d, e in enumerate(entries) if d not in at)
    first, second = _inverse_axes(func, order, transposed) if inverse else _forward_axes(func, order, dims)
    shape = [x.shape[d] for d in at]
    layout = Decomposition(mesh, dims, (0,) * len(dims), first, second, batch, "r" in func, transposed, norm, chunks)
    if inverse and transposed:
        shape = [shape[place] for place in layout.turned]  # X, Y, Z
    sizes = _sizes(func, shape, s, layout, inverse)
    if 0 in (*shape, *sizes):
        raise UsageError(f"{func}: a transformed dimension of the array of shape {x.shape} is empty; pass s=, or axes=")
    layout = dataclasses.replace(layout, sizes=sizes)
    return _compile(layout, inverse)(x)


@functools.lru_cache(maxsize=256)
def _compile(layout: Decomposition, inverse: bool) -> Callable[[Array], Array]:
    start, end = (layout.after, layout.before) if inverse else (layout.before, layout.after)
    in_spec, out_spec = (P(*map(entry, axes)) for axes in (start, end))
    if layout.devices == 1:
        of_shards = functools.partial(shards.transform_on_one_device, layout=layout, inverse=inverse)
    else:
        of_shards = functools.partial(shards.inverse if inverse else shards.forward, layout=layout)
    f = jax.shard_map(of_shards, mesh=layout.mesh, in_specs=in_spec, out_specs=out_spec)

    def run(x: Array) -> Array:
        missing = [-n % specs.size(layout.mesh, axes) for n, axes in zip(x.shape, start, strict=True)]
        x = jnp.pad(x, [(0, n) for n in missing]) if any(missing) else x
        return f(lay_out(x, layout.mesh, *start))

    compiled = jax.jit(run)
    # The layout is set again outside: JAX drops axes of one device from specs that it derives, and the inverse reads
    # the spec. With ``out_shardings``, JAX would refuse cotangents in any other layout.
    return lambda x: lay_out(compiled(x), layout.mesh, *end)


def _dims(func: str, ndim: int, s: Any, axes: Any) -> tuple[int, ...]:
    """The transformed dimensions of an array, in order."""
    if any(value is not None and np.ndim(value) != 1 for value in (s, axes)):
        raise UsageError(f"{func}: s and axes are sequences of numbers; got s={s!r}, axes={axes!r}")
    if axes is None:
        axes = range(-len(s), 0) if s is not None else range(ndim)
    if not all(isinstance(a, Integral) for a in axes):
        raise UsageError(f"{func}: axes={axes!r} must be numbers of dimensions")
    axes = tuple(axes)
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) != len(axes):
        raise UsageError(f"{func}: axes={axes} must be different dimensions of an array that has {ndim}")
    if len(axes) not in (2, 3):
        raise UsageError(f"{func}: transforms two or three dimensions, not {len(axes)}; pass axes=, such as (-2, -1)")
    if s is not None and len(s) != len(axes):
        raise UsageError(f"{func}: s={tuple(s)} has {len(s)} sizes for {len(axes)} axes")
    if s is not None and any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in s):
        raise UsageError(f"{func}: s={tuple(s)} must be sizes of at least 1")
    return tuple(a % ndim for a in axes)


def _forward_axes(func: str, order: list[Axes], dims: tuple[int, ...]) -> tuple[Axes, Axes]:
    if order[-1]:
        raise UsageError(
            f"{func}: dimension {dims[-1]}, the last of axes, is sharded over {order[-1]}; it must be whole on every "
            "device. Shard others, or give axes= in another order"
        )
    if not order[0]:
        raise UsageError(
            f"{func}: dimension {dims[0]}, the first of axes, must be sharded; give axes= with a sharded one first. "
            "Where none is, jnp.fft does it"
        )
    return order[0], order[1] if len(order) == 3 else ()


def _inverse_axes(func: str, order: list[Axes], transposed: bool) -> tuple[Axes, Axes]:
    second: Axes = ()
    if transposed:
        unsharded, first = order[-1], order[0]
        if len(order) == 3 and order[1]:  # pencils: the mesh axes have changed places
            unsharded, first, second = order[-1] if order[0] else order[1], order[1], order[0]
    else:
        unsharded, first, second = order[0], order[1], order[2] if len(order) == 3 else ()
    if unsharded or not first:
        spec = P(*map(entry, order))
        places = "the first, or the first two of three" if transposed else "the second, or the last two of three"
        raise UsageError(
            f"{func}: transposed={transposed} means that of the transformed dimensions {places} are sharded, and they "
            f"are {spec}; pass transposed={not transposed} if that is how the array was made"
        )
    return first, second


def _sizes(
    func: str, shape: list[int], s: tuple[int, ...] | None, layout: Decomposition, inverse: bool
) -> tuple[int, ...]:
    """Sizes of X, Y and Z before the transform."""
    if not (inverse and layout.real):
        return tuple(shape if s is None else s)
    axes = layout.second if len(shape) == 3 else layout.first
    if s is None:
        if axes:
            raise UsageError(
                f"{func}: the last of axes is sharded, and its size may be padded; pass s=, the sizes of the result"
            )
        return (*shape[:-1], 2 * (shape[-1] - 1))
    half = s[-1] // 2 + 1
    padded = half + -half % specs.size(layout.mesh, axes)
    if shape[-1] not in (half, padded):
        raise UsageError(f"{func}: s={s} needs {half} entries along the last of axes, and the array has {shape[-1]}")
    return s


def fftfreq(n: int, d: float = 1.0, *, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None = None) -> Array:
    """Return ``jnp.fft.fftfreq(n, d)``, sharded by ``spec``'s entry, and padded with zeros to a multiple of devices.

    With the entry of a dimension of a transform's result, it has the length and placement of that dimension.
    """
    return _frequencies("fftfreq", n, d, mesh, spec, dtype)


def rfftfreq(n: int, d: float = 1.0, *, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None = None) -> Array:
    """Return ``jnp.fft.rfftfreq(n, d)``, sharded and padded as in `fftfreq`."""
    return _frequencies("rfftfreq", n, d, mesh, spec, dtype)


def _frequencies(func: str, n: int, d: float, mesh: AnyMesh, spec: P, dtype: jnp.dtype | None) -> Array:
    size = jax.ShapeDtypeStruct((n,), float)
    if not specs.axis_names(spec):
        axes: Axes = ()
    else:
        mesh, (axes,) = specs.find(func, size, mesh, spec)

    def values() -> Array:
        frequencies = getattr(jnp.fft, func)(n, d, dtype=dtype)
        return jnp.pad(frequencies, (0, -len(frequencies) % specs.size(mesh, axes)))

    return jax.jit(values, out_shardings=NamedSharding(mesh, P(specs.entry(axes))))()


def unpad(x: Array, shape: tuple[int, ...]) -> Array:
    """Cut an array to its leading part of this shape: the shape of the same result of ``jnp.fft``.

    Dimensions that shrink can't be sharded evenly any more, and become whole on every device.

    Raises
    ------
    UsageError
        If ``shape`` is no leading part of the shape of ``x``.
    """
    if len(shape) != x.ndim or any(not 0 <= n <= m for n, m in zip(shape, x.shape, strict=True)):
        raise UsageError(f"unpad: the shape {tuple(shape)} is no leading part of an array of shape {x.shape}")
    if tuple(shape) == x.shape:
        return x
    sharding = specs.sharding_of(x)
    if sharding is not None:
        names = [specs.axes_of(e) for e in sharding.spec] + [()] * (x.ndim - len(sharding.spec))
        axes = tuple(a if n == m else () for a, n, m in zip(names, shape, x.shape, strict=True))
        return _cut(x, tuple(shape), sharding.mesh, axes)
    return x[tuple(slice(n) for n in shape)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(x: Array, shape: tuple[int, ...], mesh: AnyMesh, axes: tuple[Axes, ...]) -> Array:
    return lay_out(lay_out(x, mesh, *axes)[tuple(slice(n) for n in shape)], mesh, *axes)
