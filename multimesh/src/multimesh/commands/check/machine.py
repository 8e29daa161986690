"""Versions, devices, the state of GPUs as ``nvidia-smi`` tells it, and the folder that processes share."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.commands.check.steps import ABSENT, FAILED, OK, Bench, Row
from multimesh.core import known_faults
from multimesh.errors import MissingPartError, UsageError
from multimesh.processes import agree
from multimesh.processes.liveness import name_process

_PACKAGES = re.compile(r"jax|jaxlib|multimesh-jax|numpy|flax|nvidia-nccl-cu\d+|jax-(cuda|rocm)\w*-(plugin|pjrt)")
_QUERY = (
    *("index", "pstate", "memory.free", "memory.total", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.active", "temperature.gpu"),
)
_IDLE = 0x1 | 0x4  # reasons to throttle that are none: nothing to do; a limit of power that is usual under load
_LEAST_FREE = 0.8  # share of a device's memory that nobody else should have
_APPEARS = 5.0  # seconds in which a file of another host must appear; NFS keeps what it knows of a folder for some


def read_versions(bench: Bench) -> dict[str, str]:
    """Return versions by component, and the variables on which pipelines depend."""
    names = ((package.name or "").lower().replace("_", "-") for package in metadata.distributions())
    components = {name: metadata.version(name) for name in names if _PACKAGES.fullmatch(name)}
    driver = Path("/proc/driver/nvidia/version")
    kernel = re.search(r"Kernel Module\D*([\d.]+)", driver.read_text()) if driver.exists() else None
    cuda = re.search(r"cuda\s+(\d+)", jax.devices()[0].client.platform_version)
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    components |= {"Python": platform.python_version(), "NCCL": nccl_version()} | variables
    components |= {"driver": kernel[1] if kernel else "", "CUDA": cuda[1] if cuda else ""}
    return components | {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


def nccl_version(names: Sequence[str] = ("libnccl.so.2", "libnccl.so")) -> str:
    """Return the version of the NCCL that this process loads, as its own `ncclGetVersion` says; empty if none."""
    wheels = Path(np.__file__).parents[1].glob("nvidia/nccl*/lib/libnccl.so.2")
    for name in (*names, *map(str, wheels)):
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""


def judge_versions(bench: Bench, every: Sequence[Mapping[str, str]]) -> Row:
    """Compare versions with process 0, and with those that are known to hang pipelines."""
    first = every[0]
    for rank, other in enumerate(every):
        for name in sorted(first.keys() | other.keys()):
            version, other_version = first.get(name, ""), other.get(name, "")
            if version != other_version:
                difference = f"{name}: {name_process(0)} has {version!r}, {name_process(rank)} has {other_version!r}"
                return Row(FAILED, difference, "start all processes from one image or folder", UsageError.exit_code)
    for fault in (*known_faults.find_bad_versions(first), *known_faults.find_overrides(first)):
        measured, _, remedy = fault.partition(": ")
        return Row(FAILED, measured, remedy, MissingPartError.exit_code)
    names = ("jax", "jaxlib", "NCCL", "CUDA", "driver")
    text = ", ".join(f"{name} {first[name]}" for name in names if first.get(name))
    return Row(OK, f"{text} (the same in all processes)")


def find_devices(bench: Bench) -> list[str]:
    """Find the devices of all processes, lay the grid, and return the kinds of those of this process."""
    bench.doing = "waiting until all processes have found their devices"
    every = jax.devices()
    default = bench.processes if bench.processes > 1 else min(2, len(every))
    stages = bench.stages or (len(every) // bench.per_stage if bench.per_stage else default)
    size = bench.per_stage or max(1, len(every) // max(1, stages))
    if stages < 1 or stages * size > len(every):
        raise MissingPartError(
            f"{stages} stages of {size} devices need {stages * size}, and JAX finds {len(every)}; give other --stages "
            "or --gpus-per-stage, or see why devices are missing"
        )
    bench.stages, bench.per_stage = stages, size
    bench.meshes = tuple(Mesh(np.array(every[n * size : (n + 1) * size]), ("data",)) for n in range(stages))
    return [device.device_kind for device in jax.local_devices()]


def judge_devices(bench: Bench, every: Sequence[Sequence[str]]) -> Row:
    """Compare kinds and numbers of devices."""
    words = [", ".join(f"{n} {kind}" for kind, n in collections.Counter(kinds).items()) for kinds in every]
    common = collections.Counter(words).most_common(1)[0][0]
    for rank, devices in enumerate(words):
        if devices != common:
            text = f"{name_process(rank)} sees {devices or 'nothing'}, most see {common}"
            return Row(FAILED, text, "give each process as many devices of one kind", UsageError.exit_code, [rank])
    return Row(OK, f"{len(every)} x {common}; a grid of {bench.stages} stages x {bench.per_stage}")


def look_at_gpus(bench: Bench | None = None) -> list[tuple[str, str]]:
    """Return faults of the GPUs of this machine, each with its remedy; one without words if all are well."""
    text = _smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    lines = [line.split(", ") for line in text.splitlines() if line.count(", ") == len(_QUERY) - 1]
    faults = [fault for line in lines for fault in _find_faults(dict(zip(_QUERY, line, strict=True)))]
    gpu = ""
    for line in _smi("nvlink", "--status").splitlines():
        gpu = (re.findall(r"^GPU \d+", line) or [gpu])[0]
        if "inactive" in line.lower():
            faults.append((f"{gpu}, {line.strip()} is down", "drain the node; dcgmi diag -r 3 says more"))
    return faults or [("", "")] * bool(lines)


def _smi(*argv: str) -> str:
    program = shutil.which("nvidia-smi")
    try:
        process = subprocess.run([program or "false", *argv], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout


def _find_faults(gpu: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a GPU, and the remedy."""

    def number(name: str) -> float:
        return float(gpu[name]) if gpu[name].replace(".", "").isdigit() else 0.0  # [N/A]

    name = f"GPU {gpu['index']}"
    if errors := number("ecc.errors.uncorrected.volatile.total"):
        text = f"{name} has {errors:.0f} errors in memory that could not be corrected"
        yield text, "drain the node and reset the GPU"
    bits = re.search(r"0x[0-9a-fA-F]+", gpu["clocks_throttle_reasons.active"])
    if reasons := int(bits[0] if bits else "0", 16) & ~_IDLE:
        text = f"{name} is slowed down (reasons {reasons:#x}, {gpu['temperature.gpu']} C)"
        yield text, "cooling or power: drain the node"
    if number("memory.free") < _LEAST_FREE * number("memory.total") and gpu["pstate"] != "P0":
        text = f"{name} has {gpu['memory.free']} of {gpu['memory.total']} MiB free"
        yield text, "end what else has memory: nvidia-smi"


def judge_gpus(bench: Bench, every: Sequence[Iterable[Sequence[str]]]) -> Row:
    """Name GPUs with errors in memory, low clocks, little memory, or links that are down."""
    faults = [(rank, ill, remedy) for rank, answer in enumerate(every) for ill, remedy in answer if ill]
    if faults:
        text = "; ".join(f"{name_process(rank)}: {ill}" for rank, ill, _ in faults)
        remedies = "; ".join(dict.fromkeys(remedy for _, _, remedy in faults))
        return Row(FAILED, text, remedies, MissingPartError.exit_code, sorted({rank for rank, _, _ in faults}))
    if not any(every):
        return Row(ABSENT, "nvidia-smi tells of none")
    return Row(OK, "no errors, no throttling, all links up, by nvidia-smi")


def try_folder(bench: Bench) -> str:
    """Write, rename, lock and read files of other processes in `Bench.folder`; return the first fault, or ""."""
    folder = bench.folder / agree.first_says("check: folder", f".multimesh-check-{time.time_ns()}")
    rank, lock, fault = jax.process_index(), None, ""
    for turn in range(3):
        try:
            if rank == 0 and turn == 0:
                bench.doing = f"making a folder in {bench.folder}"
                folder.mkdir(parents=True)
                lock = (folder / "lock").open("w")
                fcntl.flock(lock, fcntl.LOCK_EX)
            elif rank and turn == 1:
                bench.doing = f"looking for the folder that process 0 made in {bench.folder}"
                fault = _share_folder(folder, rank)
            elif rank == 0 and turn == 2 and not fault:
                bench.doing = "looking for the files of all processes"
                absent = (n for n in range(1, bench.processes) if not _appears(folder / f"{n}.done"))
                if (first := next(absent, None)) is not None:  # each takes its time
                    fault = f"what {name_process(first)} wrote is not there"
        except OSError as error:
            fault = f"can't write there: {error.strerror}"
        agree.barrier(f"check: folder {turn}")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        lock.close()
    return fault


def _share_folder(folder: Path, rank: int) -> str:
    """Try the lock of process 0, and rename a file."""
    if not _appears(folder / "lock"):
        return "what process 0 wrote is not there"
    with (folder / "lock").open("r+") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "a lock of process 0 does not hold here"
    (folder / f"{rank}.part").touch()
    (folder / f"{rank}.part").rename(folder / f"{rank}.done")
    return ""


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _APPEARS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()


def judge_folder(bench: Bench, every: Sequence[str]) -> Row:
    """Name the first process for which the folder is not as it must be."""
    for rank, fault in sorted(enumerate(every), key=lambda pair: pair[0] == 0):  # process 0 sees only that one is odd
        if fault:
            text = f"in {bench.folder} of {name_process(rank)}: {fault}"
            remedy = "give --folder (and checkpoints) a folder on a file system of all hosts: NFS with locks, Lustre"
            return Row(FAILED, text, remedy, UsageError.exit_code, [rank])
    return Row(OK, f"in {bench.folder}: all see each other's files, locks and renames")
