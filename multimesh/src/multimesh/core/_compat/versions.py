"""Versions of JAX: which are supported, which private parts a version has, and those that make the runtime faster.

Without one of these, it is None or a public function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from multimesh.errors import MultiMeshError, UsageError

SUPPORTED = "jax>=0.10"  # as in pyproject.toml
NEWEST_TRIED = (0, 12)
NEWER = jax.__version_info__[:2] > NEWEST_TRIED
_TRIED = ".".join(map(str, NEWEST_TRIED))

if jax.__version_info__ < (0, 10):
    raise MultiMeshError(f"MultiMesh needs {SUPPORTED}, found {jax.__version__}: pip install '{SUPPORTED}'")

_missing: list[str] = []


def private(path: str, *, irreplaceable: bool = False) -> Any:
    """Return the object at a dotted path under ``jax._src``; None if its public fallback is to be used.

    That is so under ``MULTIMESH_PUBLIC_JAX=1``, if nothing is at the path, and for a JAX that was never tried. For the
    last it is not if the part is ``irreplaceable``.
    """
    if os.environ.get("MULTIMESH_PUBLIC_JAX") == "1":
        return None
    module, *names = path.split(".")
    try:
        part = functools.reduce(getattr, names, importlib.import_module(f"jax._src.{module}"))
    except (AttributeError, ImportError):
        _missing.append(path)
        return None
    return None if NEWER and not irreplaceable else part


def tell() -> None:
    """Warn of a JAX that was never tried, and of private parts that it lacks; call it after the last `private`."""
    text = f"jax {jax.__version__} has no {', '.join(f'jax._src.{path}' for path in _missing)}"
    if NEWER:
        also = f"; {text}" if _missing else ""
        warnings.warn(
            f"jax {jax.__version__} is newer than this MultiMesh, which was tried with jax up to {_TRIED}: it goes on "
            f"with JAX's public functions, which takes longer{also}",
            stacklevel=2,
        )
    elif _missing:
        warnings.warn(f"{text}: public functions take their place, which takes longer", stacklevel=2)


@functools.cache
def tell_change(error: str) -> None:
    """Warn, once, that JAX has moved something inside of an object."""
    warnings.warn(
        f"jax {jax.__version__}: {error}: public functions take its place, which takes longer",
        stacklevel=3,
    )


@contextlib.contextmanager
def check_version() -> Iterator[None]:
    """Raise an error that names the versions if a JAX that was never tried lacks something."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if not NEWER:
            raise
        raise MultiMeshError(
            f"this version of MultiMesh does not work with jax {jax.__version__} ({error}), with which it was never "
            f"tried: upgrade multimesh-jax, or pip install 'jax<{NEWEST_TRIED[0]}.{NEWEST_TRIED[1] + 1}'"
        ) from error


DeviceList: Callable[..., Any] | None = private("lib.xla_client.DeviceList")
"""A list of devices to load an executable for."""

explicit_transfers: Callable[[], contextlib.AbstractContextManager[None]] = (
    private("config.explicit_device_put_scope") or contextlib.nullcontext
)
"""In this scope `copy_shards` passes a ``jax.transfer_guard``, as ``jax.device_put`` does by itself."""

forget_pruned: Callable[[], None] = private("interpreters.pxla._dce_jaxpr.cache_clear") or (lambda: None)
"""Drop the jaxprs with unused inputs that JAX (from 0.11 on) caches, and their executables."""

_copy = private("lib.xla_client.batched_copy_array_to_devices_with_sharding")
_REUSE = private("lib.xla_client.ArrayCopySemantics.REUSE_INPUT")
_trace_context = private("config.trace_context")


copy_shards: Callable[..., Any] | None = (
    None if _copy is None or _REUSE is None else lambda xs, devices, to: _copy(xs, devices, to, [_REUSE] * len(to))
)
"""Copy the shards of each array to its list of devices; takes arrays, lists of devices, layouts."""

array_of_shards: Callable[..., Any] | None = private("array.ArrayImpl")
"""Make an array of shards, with its type; unlike the public function it can leave out the checks."""


_device_sharding = private("sharding_impls.GSPMDSharding")


def without_type(x: Any) -> Any:
    """Return an array that lies as before, but whose type has no layout; keys stay as they are."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    if _device_sharding is None or array_of_shards is None:
        raise UsageError(
            "jax.grad, jax.vjp or jax.jvp of multimesh.jit beside Explicit axes needs private parts of JAX, which are "
            "not used here; transform inside: multimesh.jit(jax.grad(f))"
        )
    devices, kind = x.sharding._internal_device_list, x.sharding.memory_kind
    layout = _device_sharding(devices, x.sharding._to_xla_hlo_sharding(x.ndim), memory_kind=kind)
    aval = jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    return array_of_shards(aval, layout, [shard.data for shard in x.addressable_shards], committed=True)


def trace_context() -> Any:
    """Return all of JAX's configuration that a trace depends on (precision, x64, ambient mesh ...), hashable."""
    if _trace_context is not None:
        return _trace_context()
    return jax.sharding.get_abstract_mesh(), *(getattr(jax.config, k, v) for k, v in jax.config.values.items())
