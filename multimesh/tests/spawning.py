"""Real processes on this machine that meet through ``jax.distributed``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
CLEAN = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC", "JAX_NUM_CPU_DEVICES")}
"""The environment without what makes virtual devices; `ON_CPU` keeps to CPUs."""

ON_CPU = CLEAN | {"JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Ending:
    code: int
    out: str
    err: str


def environment(rank: int, count: int, devices: int, port: int, timeout: float = 300.0) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    variables = {"PROCESS": str(rank), "PROCESSES": str(count), "COORDINATOR": f"127.0.0.1:{port}"}
    variables["PATIENCE"] = str(timeout - 10)  # then it says where it waits, before it is killed
    fixed = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16", "OPENBLAS_NUM_THREADS": "1"}
    return os.environ | fixed | variables | {"PYTHONPATH": path, "PYTHONHASHSEED": str(rank)}


def run(count: int, devices: int, script: Path, *args: str, timeout: float = 300.0) -> list[Ending]:
    """Run a script in ``count`` processes of ``devices`` each; the first that fails ends all."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(count)]
        try:
            for rank, (out, err) in enumerate(files):
                env = environment(rank, count, devices, port, timeout)
                command: Sequence[str] = [sys.executable, str(script), *args]
                processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=err, text=True))
            deadline = time.monotonic() + timeout
            while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
                if any(p.returncode for p in processes):
                    time.sleep(1)  # what the others have to say of it
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        for pair in files:
            for file in pair:
                file.seek(0)
        return [Ending(p.returncode, *(file.read() for file in pair)) for p, pair in zip(processes, files, strict=True)]


def certificates(folder: Path) -> dict[str, str]:
    """A certificate for this machine and the authority that signed it."""
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ours -days 2",
        "req -newkey rsa:2048 -nodes -keyout node.key -out node.csr -subj /CN=localhost",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    names = {"cert_file": "node.pem", "key_file": "node.key", "ca_file": "ca.pem"}
    return {f"mtls_{name}": str(folder / file) for name, file in names.items()}
