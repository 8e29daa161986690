"""``initialize``: find the processes of a job, start JAX, compare what they run; `fail` ends them all."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from multimesh.core import _compat, known_faults
from multimesh.errors import UsageError
from multimesh.processes import agree, launchers
from multimesh.processes.liveness import GRACE, call_at_loss, leave, see_uncaught_errors, watch

TRANSPORT = "MULTIMESH_TRANSPORT"
"""Environment variable with the transport of arrays between processes, where no context says one."""

Member = dict[str, Any]  # name and host of a process; and facts, which must be alike: name to a list of words

_XLA_FLAG = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")  # values may be in quotes
_LOCAL_FLAG = re.compile("address|cache|_dir|dump|log|mock|profile|timeout|visible|_to$")  # may differ by process


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job: the launcher that `initialize` found, this one's number, and the machine of each.

    The launcher is a name of `LAUNCHERS`, "mpi4py", "arguments", or "nobody".
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
    preemptible: bool | None = None,
    jax_options: Mapping[str, Any] | None = None,
) -> Processes:
    """Make this process one of several, in place of ``jax.distributed.initialize``.

    Arguments that are not given come from the launcher, as JAX finds them, and from ``JAX_COORDINATOR_ADDRESS`` and
    ``MULTIMESH_PROCESSES``. When JAX has started, all processes compare what they run. When one fails, is killed,
    stopped or out of reach, all others end within seconds: with a line that names it, and its exit code if it told one,
    else 17. JAX's coordination service, with ``jax_enable_recoverability``, tells who lives.

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
        Seconds in which all processes must have started: 60. This and the other times are also read from the
        environment, ``MULTIMESH_START_TIMEOUT``, ``MULTIMESH_SILENCE_TIMEOUT`` and so on.
    silence_timeout
        Seconds without a heartbeat after which JAX gives a process up: 8. Half of them a process may be stopped, or the
        network be down.
    compile_timeout
        Seconds that processes wait for each other to compile, to save, to gather: 3600. After a minute process 0 says
        for whom it waits.
    transfer_timeout
        Seconds in which the first transfer between two processes must have arrived: 300. They count when all processes
        have compiled. Then the job ends, with a line.
    stall_timeout
        Seconds after which a process ends the job if it holds up the others in training: by default, and with 0, never.
        After two minutes a line names it anyway; a process that is ended so prints its Python stack.
    coordinator_bind_address
        Address at which process 0 listens; by default all of its addresses.
    same_command
        Whether command lines that differ are refused. The number and the host of a process may always differ.
    alone
        Whether a program that no launcher started runs as the only process.
    preemptible
        Whether JAX's preemption service takes SIGTERM as a notice, for Orbax's ``CheckpointManager`` and
        ``multihost_utils.reached_preemption_sync_point``; else it ends the process. By default only where the
        environment has ``JAX_ENABLE_PREEMPTION_SERVICE=1``.
    jax_options
        Further arguments of ``jax.distributed.initialize``, such as ``mtls_cert_file`` from jax 0.12 on.

    Raises
    ------
    UsageError
        In every process, if one did not start or can't reach process 0, if two have the same number, or if versions,
        XLA_FLAGS, flags of JAX, or command lines differ. Also if JAX has been used before.

    Examples
    --------
    >>> mm.distributed.initialize("localhost:6000", num_processes=2, process_id=rank)  # doctest: +SKIP
    """
    options = jax_options or {}
    see_uncaught_errors()
    watch.starting = True
    if jax.distributed.is_initialized():
        raise UsageError(
            "processes are initialized already; call mm.distributed.initialize() once, and in place of "
            "jax.distributed.initialize(): it sets jax_enable_recoverability, so that a lost process is named"
        )
    if _compat.has_backends():
        raise UsageError(
            "mm.distributed.initialize() must come before anything that uses a device of JAX: jax.devices(), an array"
        )
    seconds = {"start": initialization_timeout, "silence": silence_timeout, "compile": compile_timeout}
    agree.choose_timeouts(seconds | {"transfer": transfer_timeout, "stall": stall_timeout})
    start = math.ceil(agree.seconds_of("start"))
    arguments = coordinator_address, num_processes, process_id, local_device_ids
    launcher, (address, count, rank, devices) = launchers.complete(arguments, cluster_detection_method, start)
    host = socket.gethostname()
    if alone and address is count is rank is None:
        watch.starting = False
        return Processes("nobody", 0, (host,))
    launchers.check(address, count, rank)
    bind = coordinator_bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    bind = bind or f"[::]:{address.rpartition(':')[2]}"
    jax.config.update("jax_enable_recoverability", True)  # else JAX ends all others before they can say a word
    if preemptible is None:
        preemptible = os.environ.get("JAX_ENABLE_PREEMPTION_SERVICE", "").lower() in ("1", "true", "yes", "on")
    # else JAX takes SIGTERM as a notice, which few scripts look for
    jax.config.update("jax_enable_preemption_service", preemptible)
    watch.rank, watch.name = rank, f"process {rank} of {count} ({host}, pid {os.getpid()})"
    if rank:
        call_at_loss(watch.end_without_first)
    _start_jax(address, count, rank, devices, bind, options)
    try:
        members = agree.run_in_all("the start", lambda: describe(watch.name, options, same_command), compare, start)
    except jax.errors.JaxRuntimeError:
        if rank:
            time.sleep(GRACE)  # process 0 is gone, and another thread says so
        raise
    except UsageError as error:
        error.told = rank > 0  # type: ignore[attr-defined]
        raise
    if not rank and count > 1:
        for fault in known_faults.find_overrides(os.environ):
            sys.stderr.write(f"multimesh: {fault}\n")
    names, hosts = zip(*members, strict=True)
    watch.start(names)
    return Processes(launcher, rank, hosts)


def tell_at_loss(tell: Callable[[str, int], None]) -> None:
    """Let ``tell`` have the line and the exit code with which this process ends because of another one.

    A thread calls ``tell`` before the process ends; handlers of ``atexit`` do not run then.
    """
    watch.tell_at_loss = tell


def end_others(why: str, code: int) -> NoReturn:
    """Leave although another process may not answer any more, and end that, too."""
    if watch.rank:
        time.sleep(2 * GRACE)  # process 0 says why
    elif watch.names:
        watch.fail(why, code)
    leave(code)


def fail(error: BaseException) -> NoReturn:
    """End this process with ``error``, and all others.

    It is for code that catches errors it does not know. An uncaught error does the same. Without `initialize` the error
    is raised.
    """
    if not watch.names:
        raise error
    sys.excepthook(type(error), error, error.__traceback__)
    raise AssertionError  # the hook leaves


def _start_jax(address: str, count: int, rank: int, devices: Any, bind: str, options: Mapping[str, Any]) -> None:
    """Start JAX as one of several processes; raise ``UsageError`` if they do not become a job."""
    start = math.ceil(agree.seconds_of("start"))
    try:
        if rank == 0:  # JAX's service would share the port with that of another job
            host, _, port = bind.rpartition(":")
            host = "" if host in ("", "[::]") else host.strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, int(port)), family=family).close()
        with _compat.limit_start(start):
            jax.distributed.initialize(
                address,
                count,
                rank,
                devices,
                cluster_detection_method="deactivate",
                initialization_timeout=start,
                heartbeat_timeout_seconds=math.ceil(agree.seconds_of("silence")),
                coordinator_bind_address=bind,
                **options,
            )
    except TypeError as error:
        raise UsageError(f"jax_options: {error}, of jax {jax.__version__}; leave it out") from None
    except Exception as error:  # noqa: BLE001 - of several kinds; JAX raises RuntimeError of several kinds, without the cause
        line = str(getattr(error, "strerror", None) or error).splitlines()[0]
        if rank == 0 and not jax.distributed.is_initialized():
            text = f" cannot listen at {bind}: {line}; if another job has that port, choose another coordinator_address"
        elif "bad_cast" not in str(error):
            text = f" cannot join the job at {address}: {line}; has another its process_id?"
        else:
            text = (
                f": not all {count} processes have started and reached process 0 at {address} within {start} s; if "
                "process 0 runs, and that is its address, JAX's lines above in its output have the numbers of those "
                "that did not come: see what the launcher says, or give a longer initialization_timeout"
            )
        raise UsageError(f"{watch.name}{text}") from None


def describe(name: str, options: Mapping[str, Any], same_command: bool) -> Member:
    """Return what this process tells of itself."""
    flags = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    facts = {"command line": sys.argv} if same_command else {}
    facts["XLA_FLAGS"] = [flag for flag in flags if not flag.startswith("--xla_dump_to=")]
    facts[TRANSPORT] = os.environ.get(TRANSPORT, "").split()
    facts["python"] = [".".join(platform.python_version_tuple()[:2])]
    facts |= {package: [sys.modules[package].__version__] for package in ("jax", "jaxlib", "multimesh", "numpy")}
    values = sorted(jax.config.values.items())
    facts["flags of JAX"] = [f"{flag}={value}" for flag, value in values if not _LOCAL_FLAG.search(flag)]
    facts["jax_options"] = sorted(options)
    return {"name": name, "host": socket.gethostname(), "facts": facts}


def compare(members: Sequence[Member]) -> list[tuple[str, str]]:
    """Return the name and the host of each process; raise ``UsageError`` if they do not run the same.

    A word may differ if it holds the process's own number or host, as in ``train.py 3`` and ``--log=/tmp/3.log``.
    """
    first, texts = members[0], []
    for fact, words in first["facts"].items():
        for rank, other in enumerate(members[1:], 1):
            pairs = itertools.zip_longest(words, other["facts"].get(fact, []), fillvalue="")
            differences = [(a, b) for a, b in pairs if a != b and _neutral(a, 0, first) != _neutral(b, rank, other)]
            if differences:
                a, b = (repr(word[:300]) if word else "nothing" for word in differences[0])
                texts.append(f"{fact}: {first['name']} has {a} where {other['name']} has {b}")
                break
    if texts:
        raise UsageError(f"the processes do not run the same; {'; '.join(texts)}. Start all of them alike")
    return [(member["name"], member["host"]) for member in members]


def _neutral(word: str, rank: int, member: Member) -> str:
    return re.sub(rf"(?<!\d){rank}(?!\d)", "<rank>", word).replace(member["host"], "<host>")
