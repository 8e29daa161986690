"""How the processes of a job start JAX, and compare in its store what they run.

JAX's service waits until all have come, and names in its log those that have not.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.errors import UsageError

TRANSPORT = "MULTIMESH_TRANSPORT"
"""Environment variable with the transport of arrays between processes, where no context says one."""

Member = dict[str, Any]  # rank, count, host, pid; and facts, which must be alike: name to a list of words

_XLA_FLAG = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")  # values may be in quotes
_LOCAL_FLAG = re.compile("address|cache|_dir|dump|log|mock|profile|timeout|visible|_to$")  # may differ by process


def start_jax(
    address: str, count: int, rank: int, devices: Any, bind: str, start: float, silence: float, options: Any
) -> None:
    """Start JAX as one of several processes; raise ``UsageError`` if they do not become a job."""
    try:
        if rank == 0:
            _probe(bind)
        with _compat.limit_start(math.ceil(start)):
            jax.distributed.initialize(
                address,
                count,
                rank,
                devices,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(start),
                heartbeat_timeout_seconds=math.ceil(silence),
                coordinator_bind_address=bind,
                **options,
            )
    except TypeError as error:
        raise UsageError(f"jax_options: {error}, of jax {jax.__version__}; leave it out") from None
    except Exception as error:  # noqa: BLE001 - of several kinds; JAX raises RuntimeError of several kinds, without the cause
        raise UsageError(_explain(error, address, count, rank, bind, start)) from None


def _probe(bind: str) -> None:
    """Raise ``OSError`` if a program listens there: JAX's service would share the port with that of another job."""
    host, _, port = bind.rpartition(":")
    host = "" if host in ("", "[::]") else host.strip("[]")
    socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()


def _explain(error: Exception, address: str, count: int, rank: int, bind: str, start: float) -> str:
    who = f"process {rank} of {count} ({socket.gethostname()}, pid {os.getpid()})"
    if rank == 0 and not jax.distributed.is_initialized():
        return (
            f"{who} cannot listen at {bind}: {str(getattr(error, 'strerror', None) or error).splitlines()[0]}; if "
            "another job has that port, choose another coordinator_address"
        )
    if "bad_cast" not in str(error):
        return f"{who} cannot join the job at {address}: {str(error).splitlines()[0]}; has another its process_id?"
    return (
        f"{who}: not all {count} processes have started and reached process 0 at {address} within {start:.0f} s; if "
        "process 0 runs, and that is its address, JAX's lines above in its output have the numbers of those that did "
        "not come: see what the launcher says, or give a longer initialization_timeout"
    )


def describe(rank: int, count: int, options: Mapping[str, Any], same_command: bool) -> Member:
    """Return what this process tells of itself."""
    flags = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    facts = {"command line": sys.argv} if same_command else {}
    facts["XLA_FLAGS"] = [flag for flag in flags if not flag.startswith("--xla_dump_to=")]
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
    facts["jax_options"] = sorted(options)
    return {"rank": rank, "count": count, "host": socket.gethostname(), "pid": os.getpid(), "facts": facts}


def compare(members: Sequence[Member]) -> list[Member]:
    """Return all processes without their facts; raise ``UsageError`` if they do not run the same."""
    if differs := _describe_differences(members):
        raise UsageError(f"the processes do not run the same; {differs}. Start all of them alike")
    return [{key: value for key, value in member.items() if key != "facts"} for member in members]


def name_of(member: Mapping[str, Any]) -> str:
    """Name a process, as in all messages."""
    return f"process {member['rank']} of {member['count']} ({member['host']}, pid {member['pid']})"


def _describe_differences(members: Sequence[Member]) -> str:
    """Say in which facts processes differ, and which processes; empty if they do not.

    A word may differ if it holds the process's own number or host, as in ``train.py 3`` and ``--log=/tmp/3.log``.
    """
    first, *others = members
    texts = []
    for fact, words in first["facts"].items():
        for other in others:
            pairs = itertools.zip_longest(words, other["facts"].get(fact, []), fillvalue="")
            odd = [(a, b) for a, b in pairs if a != b and _neutral(a, first) != _neutral(b, other)]
            if odd:
                a, b = (repr(word[:300]) if word else "nothing" for word in odd[0])
                texts.append(f"{fact}: {name_of(first)} has {a} where {name_of(other)} has {b}")
                break
    return "; ".join(texts)


def _neutral(word: str, member: Member) -> str:
    return re.sub(rf"(?<!\d){member['rank']}(?!\d)", "<rank>", word).replace(member["host"], "<host>")
