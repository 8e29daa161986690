#!/opt/.venv/bin/python3
"""Print what a container finds of GPUs, NCCL, and InfiniBand: ``docker run --rm --gpus all IMAGE /opt/hardware.py``.

Every line says what is there or what to change. It ends with 0 whatever it finds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108
QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
DEVICES = "import jax; print(', '.join(f'{d.platform} {d.id} ({d.device_kind})' for d in jax.devices()))"


def gpus() -> Iterator[str]:
    """Yield the lines of the driver."""
    try:
        process = subprocess.run(QUERY, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        yield "no nvidia-smi; start with --gpus all, on a machine with NVIDIA's driver and container toolkit"
        return
    except subprocess.TimeoutExpired:
        yield "nvidia-smi does not answer; look at the driver's messages on the machine (dmesg)"
        return
    yield from process.stdout.splitlines() or [f"nvidia-smi fails: {(process.stderr or process.stdout).strip()}"]


def packages() -> Iterator[str]:
    """Yield the packages that JAX needs for GPUs."""
    versions = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    lines = [f"{name} {versions[name]}" for name in sorted(versions) if name.startswith(("jax", "nvidia-cudnn"))]
    yield ", ".join(lines) or "no JAX is installed for this Python"


def nccl() -> Iterator[str]:
    """Yield the version that NCCL itself says."""
    try:
        files = metadata.files("nvidia-nccl-cu12") or []
    except metadata.PackageNotFoundError:
        yield "not installed; an image with --accelerator cuda12 has it"
        return
    for file in files:
        if file.name.startswith("libnccl.so"):
            number = ctypes.c_int()
            ctypes.CDLL(str(file.locate())).ncclGetVersion(ctypes.byref(number))
            yield f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100} ({file.locate()})"


def verbs() -> Iterator[str]:
    """Yield whether the library loads by which NCCL reaches InfiniBand and RoCE, and its drivers."""
    for name in ("libibverbs.so.1", "librdmacm.so.1"):
        try:
            ctypes.CDLL(name)
            yield f"{name} loads"
        except OSError:
            yield f"no {name}; NCCL uses TCP between machines (Debian: ibverbs-providers, librdmacm1)"
    drivers = sorted(path.stem for path in Path("/etc/libibverbs.d").glob("*.driver"))
    yield f"drivers: {', '.join(drivers) or 'none'}"


def ucx() -> Iterator[str]:
    """Yield the version of UCX and the ways that it finds to other processes."""
    try:
        process = subprocess.run(["ucx_info", "-v", "-d"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        yield "not installed (Debian: libucx0, ucx-utils)"
        return
    version = re.search(r"version=(\S+)", process.stdout)
    if version is None:
        yield f"ucx_info fails: {(process.stderr or process.stdout).strip()}"
    else:
        yield f"{version[1]}: {', '.join(sorted(set(re.findall(r'Transport: (.+)', process.stdout))))}"


def ports() -> Iterator[str]:
    """Yield the state of each port."""
    folders = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    for port in folders:
        state, rate, layer = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        yield f"{port.parent.parent.name} port {port.name}: {state.partition(': ')[2]}, {rate}, {layer}"
    if not folders:
        yield "no device; NCCL uses TCP between machines"
    elif not list(Path("/dev/infiniband").glob("uverbs*")):
        yield "no /dev/infiniband/uverbs*; start the container with --device=/dev/infiniband"


def limits() -> Iterator[str]:
    """Yield the container's limits that NCCL needs."""
    size = shutil.disk_usage(SHM).total >> 20
    yield f"{SHM}: {size} MB" + ("; NCCL needs more between GPUs: --shm-size=1g, or --ipc=host" if size < 512 else "")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    yield "locked memory: " + ("unlimited" if unlimited else f"{locked >> 10} kB; InfiniBand needs --ulimit memlock=-1")
    path = os.environ.get("LD_LIBRARY_PATH", "")
    yield f"LD_LIBRARY_PATH: {path or 'empty'}"


def devices() -> Iterator[str]:
    """Yield the devices of JAX, asked in a process of its own: it takes the memory of the GPUs."""
    process = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True)
    yield process.stdout.strip() or (process.stderr.strip().splitlines() or ["nothing"])[-1]


def main() -> None:
    """Print all of it."""
    for title, look in (
        ("GPUs", gpus), ("packages", packages), ("NCCL", nccl), ("verbs", verbs), ("UCX", ucx),
        ("InfiniBand", ports), ("container", limits), ("JAX sees", devices),
    ):  # fmt: skip
        try:
            lines = list(look())
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            lines = [f"cannot be read: {error}"]
        for number, line in enumerate(lines):
            print(f"{title if not number else '':12}{line}", flush=True)


if __name__ == "__main__":
    main()
