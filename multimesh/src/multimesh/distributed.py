"""Several processes that run one plan: how they meet, whether they agree, and how small values reach all of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import os
import platform
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from multimesh.core import _compat
from multimesh.errors import LostProcessError, MissingPartError, MultiMeshError, UsageError
from multimesh.processes.watched import Watched, start

__all__ = [
    "Processes",
    "agree_on",
    "barrier",
    "fail",
    "gather",
    "initialize",
    "orbax_handler",
    "orbax_state_handler",
    "restore",
    "save",
]

WAIT = 600.0
"""Seconds that a process waits for the others to come to the same place."""

SMALL = 64 * 2**20
"""Bytes that `gather` brings at once."""

_LAUNCHERS = {"slurm": "Slurm", "ompi": "Open MPI", "k8s": "Kubernetes"}  # by JAX's names
_plans = itertools.count(1)
_gathers = itertools.count(1)
_watched: Watched | None = None
_XLA_FLAG = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")  # values may be in quotes
_LOCAL_FLAG = re.compile("address|cache|_dir|dump|log|mock|profile|timeout|visible|_to$")  # may differ by process


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, as `initialize` found them.

    Attributes
    ----------
    launcher
        What started them: "Slurm", "Open MPI", "mpi4py", "Kubernetes", or "arguments".
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
        """How devices belong to processes; the first use starts JAX's backends."""
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
    initialization_timeout: int = 60,
    heartbeat_timeout_seconds: int = 10,
    shutdown_timeout_seconds: int = 10,
    coordinator_bind_address: str | None = None,
    same_command: bool = True,
) -> Processes:
    """Make this process one of several, in place of ``jax.distributed.initialize``.

    What is not given is found as JAX does: from Slurm, Open MPI 4, Kubernetes, or mpi4py where that is the
    ``cluster_detection_method``. All processes meet and compare what they run before JAX starts. From then on each
    has a watcher: when a process fails, is killed, stopped or out of reach, all others end within seconds, with a line
    that names it and exit code 17 (that of the failed one where it has one). SIGTERM ends a process, unless the
    environment has ``JAX_ENABLE_PREEMPTION_SERVICE=1``.

    Parameters
    ----------
    coordinator_address
        Host and port of process 0, ``"n1:61440"``, which all processes reach.
    initialization_timeout
        Seconds in which all processes must have started.
    heartbeat_timeout_seconds
        Seconds of silence after which JAX gives a process up. Watchers name it in half of that time.
    shutdown_timeout_seconds
        Seconds that JAX's barrier at exit may take; all processes have come to their end before it.
    same_command
        Whether command lines that differ are refused. The number and the host of a process may always differ.

    Raises
    ------
    UsageError
        In every process: where one did not start, or process 0 can't be reached; where two have one number; where
        versions, XLA_FLAGS, flags of JAX, or command lines differ. Where JAX has been used before.

    Examples
    --------
    >>> mm.distributed.initialize("localhost:6000", num_processes=2, process_id=rank)  # doctest: +SKIP
    """
    global _watched
    if _watched is not None or jax.distributed.is_initialized():
        raise UsageError("processes are initialized already; call mm.distributed.initialize() once, and only that")
    if _compat.backends_started():
        raise UsageError(
            "mm.distributed.initialize() must come before anything that uses a device of JAX: jax.devices(), an array"
        )
    if isinstance(local_device_ids, int):
        local_device_ids = [local_device_ids]
    given = (coordinator_address, num_processes, process_id, local_device_ids)
    launcher, (address, count, rank, devices) = _complete(given, cluster_detection_method, initialization_timeout)
    _check(address, count, rank)
    bind = coordinator_bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    bind = bind or f"[::]:{address.rpartition(':')[2]}"
    own = {"rank": rank, "count": count, "host": socket.gethostname(), "pid": os.getpid(), "facts": _facts()}
    if not same_command:
        del own["facts"]["command line"]
    _watched, members = start(own, address, bind, initialization_timeout, heartbeat_timeout_seconds)
    preemptible = os.environ.get("JAX_ENABLE_PREEMPTION_SERVICE", "").lower() in ("1", "true", "yes", "on")
    jax.config.update("jax_enable_preemption_service", preemptible)  # by default it swallows SIGTERM
    jax.config.update("jax_enable_recoverability", False)
    jax.distributed.initialize(
        address,
        count,
        rank,
        devices,
        cluster_detection_method="deactivate",
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
        coordinator_bind_address=bind,
    )
    return Processes(launcher, rank, tuple(member["host"] for member in members))


def _complete(given: Sequence[Any], method: str | None, timeout: int) -> tuple[str, Sequence[Any]]:
    """What launched the processes; coordinator's address, number of processes, this one's, and its devices."""
    address, *rest, devices = given
    if devices is None and (listed := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(number) for number in listed.split(",")]
    if isinstance(devices, int):
        devices = [devices]
    given = (address or os.environ.get("JAX_COORDINATOR_ADDRESS"), *rest, devices)
    found = _compat.launcher(method) if None in given and method != "deactivate" else None
    if found is None:
        if method not in (None, "deactivate"):
            raise UsageError(f"cluster_detection_method={method!r} finds nothing here; leave it out, or give arguments")
        return "arguments", given
    complete = found.auto_detect_unset_distributed_params(*given, found.name, timeout)
    return _LAUNCHERS.get(found.name, found.name) if None in given[:3] else "arguments", complete


def _check(address: Any, count: Any, rank: Any) -> None:
    values = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    lacking = [name for name, value in values.items() if value is None]
    if lacking:
        raise UsageError(
            f"mm.distributed.initialize() lacks {', '.join(lacking)}: start the processes with srun or mpirun, or give "
            "all three"
        )
    host, colon, port = str(address).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator_address is host:port of process 0, such as 'n1:61440'; got {address!r}")
    whole = isinstance(count, int) and isinstance(rank, int)
    if not whole or not 0 <= rank < count:
        raise UsageError(f"process_id counts from 0 to num_processes - 1; got process_id={rank!r} of {count!r}")


def _facts() -> dict[str, list[str]]:
    """What must be alike in all processes, in words."""
    given = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    facts = {"command line": sys.argv, "XLA_FLAGS": [flag for flag in given if not flag.startswith("--xla_dump_to=")]}
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


def count_step() -> None:
    """Note that this process made a step, so that a message about it can say how many."""
    if _watched is not None:
        _watched.count_step()


def fail(error: BaseException) -> NoReturn:
    """End this process with ``error``, and all others: for a program that catches what it doesn't know how to mend.

    An error that nobody catches does the same. Without `initialize` the error is raised.
    """
    if _watched is None:
        raise error
    sys.excepthook(type(error), error, error.__traceback__)
    raise AssertionError  # the hook of `Watched` leaves


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def barrier(name: str, timeout: float = WAIT) -> None:
    """Wait until every process is here; ``name`` is used once."""
    _compat.key_value_store().wait_at_barrier(f"multimesh/{name}", int(1000 * timeout))


def agree_on(name: str, lines: Iterable[str], timeout: float = WAIT) -> None:
    """Compare lines with all other processes; ``name`` is used once.

    Raises
    ------
    UsageError
        In every process, where they are not the same: which process differs, and in which line first.
    LostProcessError
        Where a process has not come here in time.
    """
    me, count = jax.process_index(), jax.process_count()
    lines = list(lines)
    text = "\n".join(lines).encode()
    key = functools.partial("multimesh/agree/{}/{}".format, name)
    _put(key(me), sha256(text).digest())
    if me == 0:
        said = [_get(key(rank), name, rank, timeout) for rank in range(count)]
        usual = max(said, key=said.count)  # of two that are as frequent, the first: that of process 0
        odd = [rank for rank in range(count) if said[rank] != usual]
        _put(key("verdict"), f"{said.index(usual)} {' '.join(map(str, odd))}".encode())
    usually, *odd = map(int, _get(key("verdict"), name, 0, timeout + 10).split())
    if not odd:
        return
    if me == usually:
        _put(key("text"), zlib.compress(text))
    if me == odd[0]:
        theirs = zlib.decompress(_get(key("text"), name, usually, timeout)).decode().split("\n")
        odd_ones = f"process {', '.join(map(str, odd))} of {count}"
        _put(key("message"), f"{odd_ones} differs from process {usually}, {_parting(lines, theirs)}".encode())
    message = _get(key("message"), name, odd[0], timeout).decode()
    raise UsageError(f"{name}: {message}; start all processes with the same code, data and flags")


def _parting(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Where the lines of an odd process part from the usual ones."""
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing more")
    where, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    from_ = max(0, same - 60)
    a, b = (f"{'...' * (from_ > 0)}{line[from_ : from_ + 160]}" for line in (a, b))
    return f"first in line {where + 1}, which is {a!r} in place of {b!r}"


def agree_on_plan(name: str, lines: Iterable[str]) -> int:
    """Compare the lines of a plan's fingerprint with all other processes; the number of the plan, alike in all."""
    number = next(_plans)
    agree_on(f"plan {number} ({name})", lines)
    return number


def exchanged(name: str, mine: bytes, timeout: float = WAIT) -> list[bytes]:
    """What every process says, in all processes; ``name`` is used once."""
    key = f"exchanged/{name}"
    _put(f"multimesh/{key}/{jax.process_index()}", zlib.compress(mine))
    said = (_get(f"multimesh/{key}/{rank}", name, rank, timeout) for rank in range(jax.process_count()))
    every = [zlib.decompress(text) for text in said]
    forget(key, timeout)
    return every


def forget(name: str, timeout: float = WAIT) -> None:
    """Wait until every process has read what stands under ``multimesh/name/``, then delete it."""
    barrier(f"{name}/read", timeout)
    if jax.process_index() == 0:
        _compat.key_value_store().key_value_delete(f"multimesh/{name}/")


def gather(tree: Any, timeout: float = WAIT) -> Any:
    """Bring a small tree to every process; all processes call it, in the same order.

    Parameters
    ----------
    tree
        A pytree. Committed arrays may lie on any devices, also with no shard in this process; all else, as NumPy
        arrays and numbers, is taken to be the same in all processes.

    Returns
    -------
    The tree with a NumPy array in place of each array, and keys of ``jax.random.key`` as such.

    Raises
    ------
    UsageError
        Where the arrays that processes lack have more than 64 MiB together.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = {i: x for i, x in enumerate(leaves) if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)}
    plain = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
    whole = _gathered(plain, timeout)
    for i, x in keys.items():
        whole[i] = jax.random.wrap_key_data(whole[i], impl=jax.random.key_impl(x))
    return jax.tree.unflatten(structure, whole)


def _gathered(leaves: list[Any], timeout: float) -> list[Any]:
    far = {i: x for i, x in enumerate(leaves) if several() and isinstance(x, jax.Array) and x.committed}
    size = sum(x.nbytes for x in far.values())
    if size > SMALL:
        largest = max(far.values(), key=lambda x: x.nbytes)
        raise UsageError(
            f"mm.distributed.gather is for small trees: {size:,} bytes in all, of which {largest.nbytes:,} in a "
            f"{largest.dtype} array of shape {largest.shape}; reduce arrays on their devices first, or save them"
        )
    me, number = jax.process_index(), next(_gathers) if far else 0
    whole = [np.asarray(x) if isinstance(x, jax.Array) and i not in far else x for i, x in enumerate(leaves)]
    wanted: list[tuple[int, Any, str, int]] = []
    for i, x in far.items():
        bounds = functools.partial(_bounds, shape=x.shape)
        owners: dict[Any, int] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            owners[bounds(index)] = min(owners.get(bounds(index), device.process_index), device.process_index)
        held = {bounds(shard.index): shard.data for shard in x.addressable_shards}
        whole[i] = np.empty(x.shape, x.dtype)
        for n, (corner, owner) in enumerate(sorted(owners.items())):
            index, key = tuple(slice(*ends) for ends in corner), f"multimesh/gather/{number}/{i}/{n}"
            if corner in held:
                whole[i][index] = held[corner]
                if owner == me:
                    _put(key, whole[i][index].tobytes())
            else:
                wanted.append((i, index, key, owner))
    for i, index, key, owner in wanted:
        part, found = whole[i][index], _get(key, "mm.distributed.gather", owner, timeout)
        whole[i][index] = np.frombuffer(found, part.dtype).reshape(part.shape)
    if far:
        forget(f"gather/{number}", timeout)
    return whole


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree to a new folder; all processes call it, in the same order, and wait until it is whole.

    Each process writes the shards that it holds, each shard once. The folder appears under its name when all is
    written: whenever a process is killed, it is there whole or not at all, and what was saved before stays as it is.

    Parameters
    ----------
    path
        A folder that does not exist yet, on a file system of all processes: one for each checkpoint, ``"ck/100"``.
    tree
        A pytree of arrays of any dtype, keys of ``jax.random.key``, numbers, and None. Committed arrays may lie on any
        devices, also with no shard in this process; all else is taken to be the same in all processes.

    Raises
    ------
    UsageError
        Where there is something at ``path``, or a leaf can't be saved; where the trees of the processes differ.
    MultiMeshError
        In every process, where one can't write.
    MissingPartError
        Without the package orbax-checkpoint.
    """
    with _compat.without_mesh():
        _checkpoints("save").save(Path(path).absolute(), tree)


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a tree that `save` wrote; all processes call it.

    There may be other processes than those that saved it, and other layouts: each reads what it is to hold.

    Parameters
    ----------
    like
        A tree as the one saved, of arrays or of ``jax.ShapeDtypeStruct``: it says where each array is to lie. What has
        no sharding, or is not committed, is read by every process.

    Returns
    -------
    The tree, with a NumPy array or a Python number in the place of each such.

    Raises
    ------
    UsageError
        Where there is no whole checkpoint, or its names, shapes or dtypes are others: the first difference.
    MissingPartError
        Without the package orbax-checkpoint.
    """
    with _compat.without_mesh():
        return _checkpoints("restore").restore(Path(path).absolute(), like)


def orbax_handler() -> Any:
    """Orbax's handler of ``jax.Array``, for arrays of which a process holds all shards or none.

    With it Orbax's own checkpointers and managers save and restore such arrays, which they refuse else.

    Examples
    --------
    >>> ocp.type_handlers.register_type_handler(  # doctest: +SKIP
    ...     jax.Array, mm.distributed.orbax_handler(), override=True
    ... )
    """
    return _checkpoints("orbax_handler").ArrayHandler()


def orbax_state_handler() -> type:
    """Class of a handler for Orbax's new checkpointer (``orbax.checkpoint.v1``): nested dictionaries of such arrays."""
    state: type = _checkpoints("orbax_state_handler", "orbax_state").StateHandler
    return state


def _checkpoints(name: str, module: str = "checkpoints") -> Any:
    try:
        return importlib.import_module(f"multimesh.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("multimesh"):
            raise
        raise MissingPartError(f"mm.distributed.{name} needs a package: pip install orbax-checkpoint") from error


def settle(name: str, error: MultiMeshError | None, timeout: float = WAIT) -> None:
    """Wait for all processes; where one has an error all raise it; ``name`` is used once."""
    if several():
        me, count = jax.process_index(), jax.process_count()
        key = functools.partial("multimesh/settle/{}/{}".format, name)
        _put(key(me), json.dumps(error and [type(error).__name__, str(error)]).encode())
        if me == 0:
            said = [json.loads(_get(key(rank), name, rank, timeout)) for rank in range(count)]
            _put(key("verdict"), json.dumps(next(filter(None, said), None)).encode())
        wrong = json.loads(_get(key("verdict"), name, 0, timeout + 10))
        error = wrong and (UsageError if wrong[0] == "UsageError" else MultiMeshError)(wrong[1])
    if error:
        raise error


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where a shard starts and ends along each axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _put(key: str, value: bytes) -> None:
    _compat.key_value_store().key_value_set_bytes(key, value)


def _get(key: str, what: str, rank: int, timeout: float) -> bytes:
    """What process ``rank`` says under ``key``, when it says it."""
    store, deadline = _compat.key_value_store(), time.monotonic() + timeout
    while True:
        left = min(max(deadline - time.monotonic(), 0.001), 5)  # not all at once, so that Ctrl-C works
        try:
            found: bytes = store.blocking_key_value_get_bytes(key, int(1000 * left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"{what}: process {rank} of {jax.process_count()} has not come here within {timeout:.0f} s; do all "
                    "processes call the same functions in the same order?"
                ) from None
        else:
            return found
