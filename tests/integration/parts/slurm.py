"""A real Slurm on one machine: munge, a controller and two nodes, started for the test run."""

from __future__ import annotations

import functools
import os
import pwd
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.integration.parts import packages, processes

NODES = ("n1", "n2")
KILL_WAIT_S = 20  # so long a process may take to end by the signal that tells it to
SMALL = "CPUs=4 RealMemory=1000"
CLAIMS_GPUS = "CPUs=128 RealMemory=1000 Feature=gpu,hbm80g Gres=gpu:8"
"""A node that claims what batch scripts of clusters with GPUs ask for, so that they are taken as they are."""

# JAX takes the port of a job from its number, so the first number of each cluster is another one.
_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=10
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait={patience}
FirstJobId={controller}
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def running(place: Path, node: str = SMALL) -> Iterator[dict[str, str]]:
    """Have a cluster of two such nodes for the length of a block; gives what clients need to find it."""
    munged = packages.need("munged", "slurm-wlm", "slurm-client", "slurm-wlm-basic-plugins", "munge")
    for folder in ("state", *(f"spool-{name}" for name in NODES)):
        (place / folder).mkdir(parents=True)
    conf, socket = place / "slurm.conf", place / "munge" / "socket"
    ports = [processes.free_port() for _ in range(3)]
    nodes = [
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {node} State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    for number in range(8):
        (place / f"gpu{number}").touch()
    (place / "gres.conf").write_text(f"Name=gpu File={place}/gpu[0-7]\n")
    names = {"place": place, "socket": socket, "controller": ports[0], "patience": KILL_WAIT_S}
    conf.write_text(_CONFIG.format(nodes="\n".join(nodes), **names))
    env = {"SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        stack.enter_context(_munge(munged, place / "munge", socket))
        daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)]
        for (program, *options), port in zip(daemons, ports, strict=True):
            argv = packages.as_root(packages.need(program, "slurm-wlm"), *options, "-f", conf, env=env)
            log, healthy = f"{'-'.join([program, *options[2:]])}.log", functools.partial(processes.listens, port)
            stack.enter_context(processes.server(argv, place / log, healthy=healthy))
        processes.wait_for(lambda: _idle(env), "both nodes are idle", log=place / "slurmctld.log")
        yield env


@contextmanager
def _munge(program: str, folder: Path, socket: Path) -> Iterator[None]:
    """Run munge with a key of its own, as its own user, who must own all that it reads."""
    user = pwd.getpwnam("munge")
    folder.mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o600)
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o111)
    subprocess.run(packages.as_root("chown", "-R", f"{user.pw_uid}:{user.pw_gid}", folder), check=True)
    files = {"socket": socket, "key-file": folder / "key", "pid-file": folder / "pid", "seed-file": folder / "seed"}
    argv = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", program, "--foreground", "--force"]
    argv += [f"--{name}={path}" for name, path in files.items()] + [f"--log-file={folder / 'munged.log'}"]
    with processes.server(packages.as_root(*argv), folder.with_suffix(".log"), healthy=socket.exists):
        yield


def _idle(env: dict[str, str]) -> bool:
    ask = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    output = subprocess.run(ask, env=os.environ | env, capture_output=True, text=True)
    return output.stdout.split("\n")[:2] == [f"{name} idle" for name in NODES]


_ENDED = r" JobState=(?:COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)\b.* ExitCode=(\d+):(\d+)"


def show(job: str) -> str:
    """Return what the Slurm that the environment names says of a job."""
    return subprocess.run(["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True).stdout


def wait(job: str, log: Path, patience_s: float = 600.0) -> int:
    """Wait for the end of a batch job; return its exit code, negative for a signal."""
    until = time.monotonic() + patience_s
    while not (match := re.search(_ENDED, show(job))):
        assert time.monotonic() < until, log.exists() and log.read_text(errors="replace")
        time.sleep(0.5)
    return int(match[1]) or -int(match[2])
