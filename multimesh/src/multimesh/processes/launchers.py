"""The programs that start the processes of a job, and the variables by which they tell each its place."""

from __future__ import annotations

from dataclasses import dataclass

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
