"""The arguments of `initialize`, completed from the launcher and the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.processes.launchers import ADDRESS, LAUNCHERS


def complete(arguments: tuple[Any, ...], method: str | None, timeout: int) -> tuple[str, Sequence[Any]]:
    """Complete the coordinator's address, the number of processes, that of this one, and its devices.

    Returns the launcher, and these four.
    """
    address, *numbers, devices = arguments
    if devices is None and (listed := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(number) for number in listed.split(",")]
    if isinstance(devices, int):
        devices = [devices]
    arguments = (address or os.environ.get(ADDRESS), *numbers, devices)
    if method is None and (completed := _complete_by_variables(arguments)):
        return completed if None in arguments[:3] else ("arguments", completed[1])
    cluster, copies = _compat.launcher(method) if None in arguments and method != "deactivate" else None, 0
    if cluster is None and method is None and None in arguments[:3] and (copies := _count_copies()):
        cluster = _compat.launcher("mpi4py")
        if cluster is None:
            raise UsageError(
                f"{copies} copies of this program were started, and nothing says where process 0 is: set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT or install mpi4py, or give mm.distributed.initialize() "
                "coordinator_address, num_processes and process_id"
            )
    if cluster is None:
        if method not in (None, "deactivate"):
            raise UsageError(f"cluster_detection_method={method!r} finds nothing here; leave it out, or give arguments")
        return "arguments", arguments
    try:
        values = cluster.auto_detect_unset_distributed_params(*arguments, cluster.name, timeout)
    except (ImportError, RuntimeError) as error:  # JAX's own words say what this launcher lacks
        raise UsageError(
            f"nothing says where process 0 is: {str(error).rstrip('.')}; mend that, or set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT"
        ) from None
    if values[1] < copies:
        raise UsageError(
            f"{copies} copies of this program were started, and mpi4py finds {values[1]}: it uses another MPI than "
            "mpirun; choose its own (MPI4PY_MPIABI=mpich or openmpi), or the mpirun of its MPI"
        )
    name = next((launcher.name for launcher in LAUNCHERS if launcher.jax == cluster.name), cluster.name)
    return name if None in arguments[:3] else "arguments", values


def check(address: Any, count: Any, rank: Any) -> None:
    """Refuse arguments that no job has."""
    values = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    lacking = [name for name, value in values.items() if value is None]
    if lacking:
        pod = "set JAX_COORDINATOR_ADDRESS=HOST:PORT and MULTIMESH_PROCESSES in each pod"
        start = pod if "JOB_COMPLETION_INDEX" in os.environ else "start the processes with srun or mpirun"
        raise UsageError(f"mm.distributed.initialize() lacks {', '.join(lacking)}: {start}, or give all three")
    host, colon, port = str(address).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator_address is host:port of process 0, such as 'n1:61440'; got {address!r}")
    if not (isinstance(count, int) and isinstance(rank, int)) or not 0 <= rank < count:
        raise UsageError(f"process_id counts from 0 to num_processes - 1; got process_id={rank!r} of {count!r}")


def _complete_by_variables(arguments: Sequence[Any]) -> tuple[str, Sequence[Any]] | None:
    """The launcher and what its variables add, if the address is known; JAX asks mpi4py under most of them."""
    for launcher in (row for row in LAUNCHERS if row.address):
        names = (*launcher.size, *launcher.rank, *launcher.local)
        values = [int(value) for value in map(os.environ.get, names) if value is not None and value.isdigit()]
        if arguments[0] is not None and len(values) == len(names):
            count, rank, *local = values
            variables = (None, count, rank, local or None)
            return launcher.name, tuple(b if a is None else a for a, b in zip(arguments, variables, strict=True))
    return None


def _count_copies() -> int:
    """How many processes a launcher of MPI has started here, as its variables say; 0 if it is one or none."""
    names = (name for launcher in LAUNCHERS if launcher.mpi for name in (*launcher.size, *launcher.here))
    sizes = (os.environ.get(name, "") for name in names)
    return next((int(size) for size in sizes if size.isdigit() and int(size) > 1), 0)
