"""Processes: their launcher, where they meet, and their addresses."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import jax

from multimesh.core._compat.versions import SUPPORTED, private
from multimesh.errors import MultiMeshError

_state = private("distributed.global_state", irreplaceable=True)
_engine = private("distributed._jax", irreplaceable=True)
_launchers = private("clusters.ClusterEnv._cluster_types", irreplaceable=True) or ()
_started = private("xla_bridge.backends_are_initialized", irreplaceable=True)
_offer = private("lib._jax.TransferServer._await_pull_flat")
_pull = private("lib._jax.TransferConnection._pull_flat")
_set_log_level = private("lib.utils.absl_set_min_log_level")
_device_put_flag = private("xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS", irreplaceable=True)


def launcher(method: str | None) -> Any:
    """Return JAX's description of this process's launcher; None if JAX knows no such, or it is not used."""
    environments = (env for env in _launchers if (not env.opt_in_only_method if method is None else env.name == method))
    return next((env for env in environments if env.is_env_present()), None)


def has_backends() -> bool:
    """Return whether JAX knows its devices already; False if JAX does not tell."""
    return _started is not None and _started()


def key_value_store() -> Any:
    """Return the store in which the processes of ``jax.distributed`` leave each other messages; raise without one."""
    client = getattr(_state, "client", None)
    if client is None:
        raise MultiMeshError(
            f"several processes need the key-value store of jax.distributed, which jax {jax.__version__} does not give "
            f"here: call jax.distributed.initialize() first, with {SUPPORTED} and without MULTIMESH_PUBLIC_JAX"
        )
    return client


def process_count() -> int:
    """Return the number of processes. It does not start JAX's backends where ``jax.distributed`` knows it."""
    return jax.process_count() if getattr(_state, "client", None) is None else int(_state.num_processes)


def process_index() -> int:
    """Return the number of this process. It does not start JAX's backends where ``jax.distributed`` knows it."""
    return jax.process_index() if getattr(_state, "client", None) is None else int(_state.process_id)


@contextlib.contextmanager
def limit_start(seconds: int) -> Iterator[None]:
    """Let JAX's service wait so long for all processes, and then name those that have not come, without warnings.

    Its client then raises ``std::bad_cast`` here. Without a callback it would end this process.
    """
    options: dict[str, dict[str, Any]] = {
        "get_distributed_runtime_service": {"cluster_register_timeout": seconds},
        "get_distributed_runtime_client": {"missed_heartbeat_callback": str},
    }
    defaults = {name: getattr(_engine, name) for name in options if hasattr(_engine, name)}
    for name, start in defaults.items():
        setattr(_engine, name, functools.partial(start, **options[name]))
    level = int(os.environ.get("TF_CPP_MIN_LOG_LEVEL") or 1)  # that of JAX
    set_level = _set_log_level if jax.config.jax_logging_level == "NOTSET" else None
    if set_level:
        set_level(max(level, 2))
    try:
        yield
    finally:
        if set_level:
            set_level(level)
        for name, start in defaults.items():
            setattr(_engine, name, start)


def own_address() -> str:
    """Return the address at which the coordinator of ``jax.distributed``, and so every process, reaches us."""
    name, _, port = _state.coordinator_address.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        host: str = probe.getsockname()[0]
    return f"[{host}]" if ":" in host else host


def offerer(server: Any) -> Callable[[int, list[Any]], None]:
    """Return ``server.await_pull`` for a list of arrays, without the search for a tree."""
    return server.await_pull if _offer is None else server._await_pull_flat


def puller(connection: Any, client: Any) -> Callable[[int, list[Any]], list[Any]]:
    """Return ``connection.pull`` for a list of types, all on devices of one client, without the search for either."""
    if _pull is None:
        pull: Callable[[int, list[Any]], list[Any]] = connection.pull
        return pull
    flat = connection._pull_flat
    return lambda number, types: flat(number, client, types)


def is_compile_only(device: jax.Device) -> bool:
    """Return whether a device is one of a topology, for which programs can be compiled and not run."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def device_put_address() -> str:
    """Return the address at which this process receives ``jax.device_put`` from others; empty if it does not."""
    return "" if _device_put_flag is None else _device_put_flag.value
