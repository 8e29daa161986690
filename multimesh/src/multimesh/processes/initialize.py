"""``initialize``: find the processes of a job, let them meet and compare themselves; `fail` ends them all."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import TracebackType
from typing import Any, NoReturn

import jax

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.hardware import known_faults
from multimesh.processes import timeouts
from multimesh.processes.launchers import ADDRESS, LAUNCHERS
from multimesh.processes.watching.leaving import Leaving, leave
from multimesh.processes.watching.meeting import meet
from multimesh.processes.watching.members import machine
from multimesh.processes.watching.watch import GRACE, Watch

TRANSPORT = "MULTIMESH_TRANSPORT"
"""Environment variable with the transport of arrays between processes, where no context says one."""

_watch: Watch | None = None
_hosts: Sequence[str] = ()
_OURS = {"coordinator_address", "num_processes", "process_id", "local_device_ids", "cluster_detection_method"}
_OURS |= {"initialization_timeout", "heartbeat_timeout_seconds", "coordinator_bind_address"}
_XLA_FLAG = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")  # values may be in quotes
_LOCAL_FLAG = re.compile("address|cache|_dir|dump|log|mock|profile|timeout|visible|_to$")  # may differ by process


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, as `initialize` found them.

    Attributes
    ----------
    launcher
        The program that started them: a name of `LAUNCHERS`, "mpi4py", "arguments", or "nobody".
    rank
        Number of this process.
    hosts
        The machine of each process.
    """

    launcher: str
    rank: int
    hosts: tuple[str, ...]

    @property
    def mode(self) -> str:
        """How processes share the devices. The first use starts JAX's backends."""
        if jax.device_count() == len(self.hosts):
            return "one process per device"
        return "one process per host" if len(set(self.hosts)) == len(self.hosts) else "several devices per process"

    def __str__(self) -> str:
        count, hosts = len(self.hosts), len(set(self.hosts))
        where = f"{hosts} hosts" if hosts > 1 else self.hosts[0]
        return f"process {self.rank} of {count} on {where}, found by {self.launcher}: {self.mode}"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    cluster_detection_method: str | None = None,
    initialization_timeout: float | None = None,
    silence_timeout: float | None = None,
    compile_timeout: float | None = None,
    transfer_timeout: float | None = None,
    stall_timeout: float | None = None,
    coordinator_bind_address: str | None = None,
    same_command: bool = True,
    alone: bool = False,
    jax_options: Mapping[str, Any] | None = None,
) -> Processes:
    """Make this process one of several, in place of ``jax.distributed.initialize``.

    Arguments that are not given are found as JAX finds them: from Slurm, Open MPI 4 or Kubernetes. Open MPI 5, MPICH
    and Intel MPI say all but the coordinator's address, which ``JAX_COORDINATOR_ADDRESS`` has; without it mpi4py is
    asked, if it is installed. A pod of an indexed Job or JobSet knows its number; with that variable and the number of
    pods in ``MULTIMESH_PROCESSES`` Kubernetes need not be asked. All processes meet and compare themselves before JAX
    starts. From then on JAX's coordination service tells who lives; it is started with ``jax_enable_recoverability``.
    When a process fails, is killed, stopped or out of reach, all others end within seconds: with a line that names it,
    and its exit code if it has one, else 17. SIGTERM ends a process, unless the environment has
    ``JAX_ENABLE_PREEMPTION_SERVICE=1``.

    Parameters
    ----------
    coordinator_address
        Host and port of process 0, ``"n1:61440"``, which all processes reach.
    num_processes, process_id
        The number of processes, and the number of this one, from 0.
    local_device_ids
        Ids of the devices of this process; by default all that it sees.
    cluster_detection_method
        As for ``jax.distributed.initialize``.
    initialization_timeout
        Seconds in which all processes must have started: 60, or ``MULTIMESH_START_TIMEOUT`` in the environment.
    silence_timeout
        Seconds without a heartbeat after which JAX gives a process up: 8, or ``MULTIMESH_SILENCE_TIMEOUT``. Half of
        them a process may be stopped, or the network be down. A death on the same machine is noticed at once.
    compile_timeout
        Seconds that processes wait for each other to compile, to save, to gather: 3600, or
        ``MULTIMESH_COMPILE_TIMEOUT``. After a minute process 0 says for whom it waits.
    transfer_timeout
        Seconds in which the first transfer between two processes must have arrived: 300, or
        ``MULTIMESH_TRANSFER_TIMEOUT``. They count when all processes have compiled. Then the job ends, with a line.
    stall_timeout
        Seconds after which a process ends the job if it holds up the others in training: by default, and with 0, never,
        or ``MULTIMESH_STALL_TIMEOUT``. After two minutes process 0 names it anyway, with its Python stack.
    coordinator_bind_address
        Address at which process 0 listens; by default all of its addresses.
    same_command
        Whether command lines that differ are refused. The number and the host of a process may always differ.
    alone
        Whether a program that no launcher started runs as the only process. So one script runs by itself, under
        ``srun`` and under ``mpirun``, and never as copies that do not know of each other.
    jax_options
        Further arguments of ``jax.distributed.initialize``, such as ``mtls_cert_file`` from jax 0.12 on.

    Returns
    -------
    Processes
        The processes of the job.

    Raises
    ------
    UsageError
        In every process, if one did not start or can't reach process 0, if two have the same number, or if versions,
        XLA_FLAGS, flags of JAX, or command lines differ. Also if JAX has been used before.

    Examples
    --------
    >>> mm.distributed.initialize("localhost:6000", num_processes=2, process_id=rank)  # doctest: +SKIP
    """
    try:
        return _initialize(
            (coordinator_address, num_processes, process_id, local_device_ids),
            cluster_detection_method,
            timeouts.choose(
                {
                    "start": initialization_timeout,
                    "silence": silence_timeout,
                    "compile": compile_timeout,
                    "transfer": transfer_timeout,
                    "stall": stall_timeout,
                }
            ),
            coordinator_bind_address,
            same_command,
            alone,
            jax_options or {},
        )
    except UsageError as error:
        _leave_in_one_line(error)
        raise


def _leave_in_one_line(error: UsageError) -> None:
    """If nobody catches this error, end with its exit code and one line; where process 0 says it, without a line."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is not error:
            usual(kind, raised, traceback)
            return
        if not getattr(error, "told", False):
            sys.stderr.write(f"multimesh: {error}\n")
        raise SystemExit(error.exit_code)  # of a hook Python takes the code

    sys.excepthook = hook


def _initialize(
    given: tuple[Any, ...],
    method: str | None,
    waits: timeouts.Timeouts,
    bind: str | None,
    same_command: bool,
    alone: bool,
    options: Mapping[str, Any],
) -> Processes:
    global _watch, _hosts
    if jax.distributed.is_initialized():
        raise UsageError(
            "processes are initialized already; call mm.distributed.initialize() once, and in place of "
            "jax.distributed.initialize(): it sets jax_enable_recoverability, so that a lost process is named"
        )
    if _compat.has_backends():
        raise UsageError(
            "mm.distributed.initialize() must come before anything that uses a device of JAX: jax.devices(), an array"
        )
    _check_options(options)
    launcher, (address, count, rank, devices) = _complete(given, method, math.ceil(waits.start))
    if alone and address is count is rank is None:
        return Processes("nobody", 0, (socket.gethostname(),))
    _check(address, count, rank)
    bind = bind or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    bind = bind or f"[::]:{address.rpartition(':')[2]}"
    own = {"rank": rank, "count": count, "host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
    facts = _facts() | {"jax_options": sorted(options)}
    if not same_command:
        del facts["command line"]
    _hosts, known = meet(own | {"facts": facts}, address, bind, waits.start)
    timeouts.use(waits)
    if not rank and count > 1:
        for said in known_faults.find_overrides(os.environ):
            sys.stderr.write(f"multimesh: {said}\n")
    preemptible = os.environ.get("JAX_ENABLE_PREEMPTION_SERVICE", "").lower() in ("1", "true", "yes", "on")
    jax.config.update("jax_enable_preemption_service", preemptible)  # by default it swallows SIGTERM
    jax.config.update("jax_enable_recoverability", True)  # else JAX ends all others before they can say a word
    with _compat.quiet_service():
        jax.distributed.initialize(
            address,
            count,
            rank,
            devices,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(waits.start),
            heartbeat_timeout_seconds=math.ceil(waits.silence),
            coordinator_bind_address=bind,
            **options,
        )
    _watch = Watch(own, known, waits)
    Leaving(_watch)
    _watch.start(leave)
    return Processes(launcher, rank, tuple(_hosts))


def _check_options(options: Mapping[str, Any]) -> None:
    known = inspect.signature(jax.distributed.initialize).parameters.keys() - _OURS
    if strange := sorted(options.keys() - known):
        raise UsageError(
            f"jax_options: {', '.join(strange)}: jax.distributed.initialize() of jax {jax.__version__} has no such "
            f"argument besides those of mm.distributed.initialize(); it has {', '.join(sorted(known))}"
        )


def _complete(given: Sequence[Any], method: str | None, timeout: int) -> tuple[str, Sequence[Any]]:
    """Complete the arguments of `initialize` from the environment and the launcher.

    Returns the launcher; then the coordinator's address, the number of processes, that of this one, and its devices.
    """
    address, *rest, devices = given
    if devices is None and (listed := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(number) for number in listed.split(",")]
    if isinstance(devices, int):
        devices = [devices]
    given = (address or os.environ.get(ADDRESS), *rest, devices)
    if method is None and (told := _by_variables(given)):
        return told if None in given[:3] else ("arguments", told[1])
    found, copies = _compat.launcher(method) if None in given and method != "deactivate" else None, 0
    if found is None and method is None and None in given[:3] and (copies := _copies()):
        found = _compat.launcher("mpi4py")
        if found is None:
            raise UsageError(
                f"{copies} copies of this program were started, and nothing says where process 0 is: set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT or install mpi4py, or give mm.distributed.initialize() "
                "coordinator_address, num_processes and process_id"
            )
    if found is None:
        if method not in (None, "deactivate"):
            raise UsageError(f"cluster_detection_method={method!r} finds nothing here; leave it out, or give arguments")
        return "arguments", given
    try:
        complete = found.auto_detect_unset_distributed_params(*given, found.name, timeout)
    except ImportError as error:
        raise UsageError(f"mpi4py can't be loaded, so nothing says where process 0 is: {error}") from None
    except RuntimeError as error:  # JAX's own words say what this launcher lacks
        raise UsageError(
            f"nothing says where process 0 is: {str(error).rstrip('.')}; mend that, or set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT"
        ) from None
    if complete[1] < copies:
        raise UsageError(
            f"{copies} copies of this program were started, and mpi4py finds {complete[1]}: it uses another MPI than "
            "mpirun; choose its own (MPI4PY_MPIABI=mpich or openmpi), or the mpirun of its MPI"
        )
    name = next((each.name for each in LAUNCHERS if each.jax == found.name), found.name)
    return name if None in given[:3] else "arguments", complete


def _by_variables(given: Sequence[Any]) -> tuple[str, Sequence[Any]] | None:
    """The launcher and what its variables add, if the address is known; JAX asks mpi4py under most of them."""
    for launcher in (each for each in LAUNCHERS if each.address):
        names = (*launcher.size, *launcher.rank, *launcher.local)
        values = [int(value) for value in map(os.environ.get, names) if value is not None and value.isdigit()]
        if given[0] is not None and len(values) == len(names):
            count, rank, *local = values
            told = (None, count, rank, local or None)
            return launcher.name, tuple(own if each is None else each for each, own in zip(given, told, strict=True))
    return None


def _copies() -> int:
    """How many processes a launcher of MPI has started here, as its variables say; 0 if it is one or none."""
    names = (name for each in LAUNCHERS if each.mpi for name in (*each.size, *each.here))
    sizes = (os.environ.get(name, "") for name in names)
    return next((int(size) for size in sizes if size.isdigit() and int(size) > 1), 0)


def _check(address: Any, count: Any, rank: Any) -> None:
    values = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    lacking = [name for name, value in values.items() if value is None]
    if lacking:
        pod = "set JAX_COORDINATOR_ADDRESS=HOST:PORT and MULTIMESH_PROCESSES in each pod"
        start = pod if "JOB_COMPLETION_INDEX" in os.environ else "start the processes with srun or mpirun"
        raise UsageError(f"mm.distributed.initialize() lacks {', '.join(lacking)}: {start}, or give all three")
    host, colon, port = str(address).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator_address is host:port of process 0, such as 'n1:61440'; got {address!r}")
    whole = isinstance(count, int) and isinstance(rank, int)
    if not whole or not 0 <= rank < count:
        raise UsageError(f"process_id counts from 0 to num_processes - 1; got process_id={rank!r} of {count!r}")


def _facts() -> dict[str, list[str]]:
    """The facts that must be alike in all processes, as words."""
    given = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    facts = {"command line": sys.argv, "XLA_FLAGS": [flag for flag in given if not flag.startswith("--xla_dump_to=")]}
    facts[TRANSPORT] = os.environ.get(TRANSPORT, "").split()
    facts["python"] = [".".join(platform.python_version_tuple()[:2])]
    for name in ("jax", "jaxlib", "multimesh-jax", "numpy"):
        try:
            facts[name] = [metadata.version(name)]
        except metadata.PackageNotFoundError:
            facts[name] = ["unknown"]
    facts["flags of JAX"] = [
        f"{name}={value}" for name, value in sorted(jax.config.values.items()) if not _LOCAL_FLAG.search(name)
    ]
    return facts


def name_process(rank: int) -> str:
    """Name a process, with its host where `initialize` has found it."""
    return f"process {rank} of {jax.process_count()}" + (f" ({_hosts[rank]})" if _hosts else "")


def begin_step() -> None:
    """Note that a call of a plan begins. A process that others wait for is thus told from those that wait."""
    if _watch is not None:
        _watch.at[1] = _watch.at[0] + 1


def count_step() -> None:
    """Count a call of a plan. Messages about this process say how many it made."""
    if _watch is not None:
        _watch.at[:] = [_watch.at[0] + 1] * 2


def tell_at_loss(tell: Callable[[str, int], None]) -> None:
    """Let ``tell`` have the line and the exit code with which this process ends because of another one."""
    if _watch is not None:
        _watch.tell_at_loss = tell


def end_together(code: int) -> NoReturn:
    """Wait until all processes are done, and leave with a code that all have."""
    if _watch is not None:
        _watch.finish()
        jax.distributed.shutdown()  # else process 0 waits for the heartbeats of the others, which have left
    leave(code)


def end_others(why: str, code: int) -> NoReturn:
    """Leave although another process may not answer any more, and end that, too."""
    if _watch is not None and _watch.rank:
        time.sleep(2 * GRACE)  # process 0 says why
    elif _watch is not None:
        _watch.fail(f"failed: {why}", code)
    leave(code)


def fail(error: BaseException) -> NoReturn:
    """End this process with ``error``, and all others.

    It is for code that catches errors it does not know. An uncaught error does the same. Without `initialize` the error
    is raised.
    """
    if _watch is None:
        raise error
    sys.excepthook(type(error), error, error.__traceback__)
    raise AssertionError  # the hook of `Leaving` leaves
