"""Private parts of JAX that make the runtime faster; without them, None or a public function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from multimesh.core._compat.versions import private

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


def _copy_shards(arrays: Any, devices: Any, layouts: Any) -> Any:
    return _copy(arrays, devices, layouts, [_REUSE] * len(layouts))


copy_shards = None if _copy is None or _REUSE is None else _copy_shards
"""Copy the shards of each array to its list of devices; takes arrays, lists of devices, layouts."""


def trace_context() -> Any:
    """All of JAX's configuration that a trace depends on (precision, x64, ambient mesh ...), hashable."""
    if _trace_context is not None:
        return _trace_context()
    return jax.sharding.get_abstract_mesh(), *(getattr(jax.config, k, v) for k, v in jax.config.values.items())
