"""The programs that start the processes of a job, and the variables by which they tell each its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multimesh.errors import UsageError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""Environment variable with HOST:PORT of process 0."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts processes, and tells each its place by variables.

    ``rank``, ``size`` and ``local`` are variables with the number of this process, that of all, and this one's on its
    machine, which is the device that it takes; without it, it takes all. Of several names the first that is set counts.
    """

    name: str
    mark: str = ""  # a variable that only its processes have
    rank: tuple[str, ...] = ()
    size: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    here: tuple[str, ...] = ()  # with the number of its processes on this machine
    address: str = ""  # by which JAX finds process 0; not set: the user tells; empty: JAX finds it anyway
    jax: str = ""  # the name that JAX has for it, if it knows it
    mpi: bool = False  # whether it is an MPI


LAUNCHERS = (
    Launcher(
        "spawn",  # `multimesh.launch`
        mark="MULTIMESH_PROCESS",
        rank=("MULTIMESH_PROCESS",),
        size=("MULTIMESH_PROCESSES",),
        local=("MULTIMESH_PROCESS",),
        address=ADDRESS,
    ),
    Launcher(
        "Open MPI",
        mark="OMPI_COMM_WORLD_RANK",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local=("OMPI_COMM_WORLD_LOCAL_RANK",),
        here=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        address="OMPI_MCA_orte_hnp_uri",
        jax="ompi",
        mpi=True,
    ),
    Launcher(
        "MPICH",  # and other MPIs with Hydra, such as Intel's
        mark="MPI_LOCALRANKID",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local=("MPI_LOCALRANKID",),
        here=("MPI_LOCALNRANKS",),
        address=ADDRESS,
        mpi=True,
    ),
    Launcher(
        "Slurm",
        mark="SLURM_STEP_NODELIST",
        rank=("SLURM_PROCID",),
        # In a shell on the nodes of an allocation, SLURM_NTASKS may be the number of its tasks.
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local=("SLURM_LOCALID",),
        here=("SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),  # for one node, or with --ntasks-per-node
        jax="slurm",
    ),
    Launcher(
        "Kubernetes",  # an indexed Job or JobSet; it tells no process how many there are
        mark="MULTIMESH_PROCESSES",
        rank=("JOB_COMPLETION_INDEX",),
        size=("MULTIMESH_PROCESSES",),
        address=ADDRESS,
        jax="k8s",
    ),
)
"""Every launcher that MultiMesh knows. The launcher of a process comes before the launchers of its launcher."""


def complete(arguments: tuple[Any, ...], method: str | None, timeout: int) -> tuple[str, Sequence[Any]]:
    """Complete the coordinator's address, the number of processes, that of this one, and its devices.

    Returns the launcher, and these four.
    """
    address, *numbers, devices = arguments
    if devices is None and (text := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(number) for number in text.split(",")]
    arguments = (address or os.environ.get(ADDRESS), *numbers, devices)
    lacking = None in arguments[:3]
    if None not in arguments or method == "deactivate":
        return "arguments", arguments
    for launcher in LAUNCHERS if method is None and arguments[0] else ():  # JAX asks mpi4py under most of them
        names = (*launcher.size, *launcher.rank, *launcher.local) if launcher.address else ()
        values = [int(value) for value in map(os.environ.get, names) if value is not None and value.isdigit()]
        if names and len(values) == len(names):
            count, rank, *local = values
            variables = (None, count, rank, local or None)
            arguments = tuple(b if a is None else a for a, b in zip(arguments, variables, strict=True))
            return launcher.name if lacking else "arguments", arguments
    from multimesh.core import _compat

    cluster = _compat.launcher(method)
    if cluster is None and method is not None:
        raise UsageError(f"cluster_detection_method={method!r} finds nothing here; leave it out, or give arguments")
    copies = _count_copies() if cluster is None and lacking else 0
    if copies and (cluster := _compat.launcher("mpi4py")) is None:
        raise UsageError(
            f"{copies} copies of this program were started, and nothing says where process 0 is: set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT or install mpi4py, or give mm.distributed.initialize() "
            "coordinator_address, num_processes and process_id"
        )
    if cluster is None:
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
    return name if lacking else "arguments", values


def check(address: Any, count: Any, rank: Any) -> None:
    """Refuse arguments that no job has."""
    values = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    if lacking := [name for name, value in values.items() if value is None]:
        pod = "set JAX_COORDINATOR_ADDRESS=HOST:PORT and MULTIMESH_PROCESSES in each pod"
        start = pod if "JOB_COMPLETION_INDEX" in os.environ else "start the processes with srun or mpirun"
        raise UsageError(f"mm.distributed.initialize() lacks {', '.join(lacking)}: {start}, or give all three")
    host, _, port = str(address).rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator_address is host:port of process 0, such as 'n1:61440'; got {address!r}")
    if not (isinstance(count, int) and isinstance(rank, int)) or not 0 <= rank < count:
        raise UsageError(f"process_id counts from 0 to num_processes - 1; got process_id={rank!r} of {count!r}")


def _count_copies() -> int:
    """How many processes a launcher of MPI has started here, as its variables say; 0 if it is one or none."""
    names = (name for launcher in LAUNCHERS if launcher.mpi for name in (*launcher.size, *launcher.here))
    sizes = (os.environ.get(name, "") for name in names)
    return next((int(size) for size in sizes if size.isdigit() and int(size) > 1), 0)
