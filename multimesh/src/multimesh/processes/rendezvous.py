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
from typing import Any

import jax

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.processes import timeouts

TRANSPORT = "MULTIMESH_TRANSPORT"
"""Environment variable with the transport of arrays between processes, where no context says one."""

Member = dict[str, Any]  # name and host of a process; and facts, which must be alike: name to a list of words

_XLA_FLAG = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")  # values may be in quotes
_LOCAL_FLAG = re.compile("address|cache|_dir|dump|log|mock|profile|timeout|visible|_to$")  # may differ by process


def start_jax(
    name: str, address: str, count: int, rank: int, devices: Any, bind: str, options: Mapping[str, Any]
) -> None:
    """Start JAX as one of several processes; raise ``UsageError`` if they do not become a job."""
    start = math.ceil(timeouts.seconds("start"))
    try:
        if rank == 0:
            _probe(bind)
        with _compat.limit_start(start):
            jax.distributed.initialize(
                address,
                count,
                rank,
                devices,
                cluster_detection_method="deactivate",
                initialization_timeout=start,
                heartbeat_timeout_seconds=math.ceil(timeouts.seconds("silence")),
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
        raise UsageError(f"{name}{text}") from None


def _probe(bind: str) -> None:
    """Raise ``OSError`` if a program listens there: JAX's service would share the port with that of another job."""
    host, _, port = bind.rpartition(":")
    host = "" if host in ("", "[::]") else host.strip("[]")
    socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()


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
            odd = [(a, b) for a, b in pairs if a != b and _neutral(a, 0, first) != _neutral(b, rank, other)]
            if odd:
                a, b = (repr(word[:300]) if word else "nothing" for word in odd[0])
                texts.append(f"{fact}: {first['name']} has {a} where {other['name']} has {b}")
                break
    if texts:
        raise UsageError(f"the processes do not run the same; {'; '.join(texts)}. Start all of them alike")
    return [(member["name"], member["host"]) for member in members]


def _neutral(word: str, rank: int, member: Member) -> str:
    return re.sub(rf"(?<!\d){rank}(?!\d)", "<rank>", word).replace(member["host"], "<host>")
