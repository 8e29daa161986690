"""Processes: their launcher, where they meet, and their addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
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
_device_put_flag = private("xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS", irreplaceable=True)


def launcher(method: str | None) -> Any:
    """Return JAX's description of this process's launcher; None if JAX knows no such, or it is not used."""
    asked = (env for env in _launchers if (not env.opt_in_only_method if method is None else env.name == method))
    return next((env for env in asked if env.is_env_present()), None)


def has_backends() -> bool:
    """Return whether JAX knows its devices already; False if JAX does not tell."""
    return _started is not None and _started()


def key_value_store() -> Any:
    """Return the store in which the processes of ``jax.distributed`` leave each other messages.

    Raises an error if JAX has none.
    """
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
def quiet_service() -> Iterator[None]:
    """Start JAX's service without its line on recoverable tasks, which tells a user nothing to do."""
    start = getattr(_engine, "get_distributed_runtime_service", None)
    if start is None:
        yield
        return

    def started(*args: Any, **options: Any) -> Any:
        with tempfile.TemporaryFile() as said:
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                return start(*args, **options)
            finally:
                os.dup2(kept, 2)
                os.close(kept)
                said.seek(0)
                os.write(2, b"".join(line for line in said if b"recoverable task feature" not in line))

    _engine.get_distributed_runtime_service = started
    try:
        yield
    finally:
        _engine.get_distributed_runtime_service = start


def own_address() -> str:
    """Return the address at which the coordinator of ``jax.distributed``, and so every process, reaches us."""
    host, _, port = _state.coordinator_address.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        found: str = probe.getsockname()[0]
    return f"[{found}]" if ":" in found else found


def offerer(server: Any) -> Callable[[int, list[Any]], None]:
    """Return ``server.await_pull`` for a list of arrays, without the search for a tree."""
    found: Callable[[int, list[Any]], None] = server.await_pull if _offer is None else server._await_pull_flat
    return found


def puller(connection: Any, client: Any) -> Callable[[int, list[Any]], list[Any]]:
    """Return ``connection.pull`` for a list of types, all on devices of one client, without the search for either."""
    if _pull is None:
        found: Callable[[int, list[Any]], list[Any]] = connection.pull
        return found
    flat = connection._pull_flat
    return lambda number, wanted: flat(number, client, wanted)


def is_compile_only(device: jax.Device) -> bool:
    """Return whether a device is one of a topology, for which programs can be compiled and not run."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def device_put_address() -> str:
    """Return the address at which this process receives ``jax.device_put`` from others; empty if it does not."""
    return "" if _device_put_flag is None else _device_put_flag.value
