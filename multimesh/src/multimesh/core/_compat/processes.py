"""Processes: what launched them, where they meet, and the addresses that they have."""

from __future__ import annotations

import socket
from typing import Any

import jax

from multimesh.core._compat.versions import SUPPORTED, private
from multimesh.errors import MultiMeshError

_state = private("distributed.global_state", irreplaceable=True)
_launchers = private("clusters.ClusterEnv._cluster_types", irreplaceable=True) or ()
_started = private("xla_bridge.backends_are_initialized", irreplaceable=True)
_device_put_flag = private("xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS", irreplaceable=True)


def launcher(method: str | None) -> Any:
    """JAX's knowledge of what launched this process; None where that is nothing it knows, or where it is not used."""
    asked = (env for env in _launchers if (not env.opt_in_only_method if method is None else env.name == method))
    return next((env for env in asked if env.is_env_present()), None)


def backends_started() -> bool:
    """Whether JAX knows its devices already; without its own answer, no."""
    return _started is not None and _started()


def key_value_store() -> Any:
    """Where the processes of ``jax.distributed`` leave each other messages; ``jax.process_count()`` is more than one.

    Raises
    ------
    MultiMeshError
        Where JAX does not give it.
    """
    client = getattr(_state, "client", None)
    if client is None:
        raise MultiMeshError(
            f"several processes need the key-value store of jax.distributed, which jax {jax.__version__} does not give "
            f"here: call jax.distributed.initialize() first, with {SUPPORTED} and without MULTIMESH_PUBLIC_JAX"
        )
    return client


def own_address() -> str:
    """Address of this machine as the coordinator of ``jax.distributed``, and so every other process, reaches it."""
    host, _, port = _state.coordinator_address.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        found: str = probe.getsockname()[0]
    return f"[{found}]" if ":" in found else found


def device_put_address() -> str:
    """Where this process listens for ``jax.device_put`` from others; empty where it does not."""
    return "" if _device_put_flag is None else _device_put_flag.value
