"""Versions, flags, devices and memory of processes, and the state of GPUs as ``nvidia-smi`` tells it."""

from __future__ import annotations

import collections
import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.commands.check.steps import Bench
from multimesh.commands.check.verdicts import OK, Row, make_failure
from multimesh.core import known_faults
from multimesh.errors import MissingPartError, UsageError
from multimesh.processes.initialize import name_process

_PACKAGES = ("jax", "jaxlib", "multimesh-jax", "numpy", "flax", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\w*-(plugin|pjrt)$")
_NCCL = ("libnccl.so.2", "libnccl.so")
_QUERY = (
    *("index", "pstate", "memory.free", "memory.total", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.active", "temperature.gpu"),
)
_IDLE = 0x1 | 0x4  # reasons to throttle that are none: nothing to do; a limit of power that is usual under load
_LEAST_FREE = 0.8  # share of a device's memory that nobody else should have


def versions(bench: Bench) -> dict[str, str]:
    """Return versions by component."""
    components = {"Python": platform.python_version()}
    for package in metadata.distributions():
        name = (package.name or "").lower().replace("_", "-")
        if name in _PACKAGES or _PLUGIN.match(name):
            components[name] = package.version
    if nccl := nccl_version():
        components["NCCL"] = nccl
    if driver := _ask_driver():
        components["driver"] = driver
    if cuda := re.search(r"cuda\s+(\d+)", jax.devices()[0].client.platform_version):
        components["CUDA"] = cuda[1]
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        components[name] = os.environ.get(name, "")
    components |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return components


def nccl_version(names: Sequence[str] = _NCCL) -> str:
    """Return the version of the NCCL that this process loads, as its own `ncclGetVersion` says; empty if none."""
    wheels = Path(np.__file__).parents[1].glob("nvidia/nccl*/lib/libnccl.so.2")
    for name in (*names, *map(str, wheels)):
        try:
            number = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        major, minor, patch = number.value // 10000, number.value // 100 % 100, number.value % 100
        return f"{major}.{minor}.{patch}"
    return ""


def _ask_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    return (re.findall(r"Kernel Module\D*([\d.]+)", text) or [""])[0]


def judge_versions(bench: Bench, every: Sequence[Mapping[str, str]]) -> list[Row]:
    """Compare versions with process 0, and with those that are known to hang pipelines."""
    first = every[0]
    for rank, other in enumerate(every):
        for name in first.keys() | other.keys():
            version, theirs = first.get(name, "none"), other.get(name, "none")
            if version != theirs:
                ours = f"{name_process(0)} has {version or 'nothing'!r}"
                text = f"{name}: {ours}, {name_process(rank)} has {theirs or 'nothing'!r}"
                return [make_failure("versions", text, "start all processes from one image or folder", 2)]
    if bad := known_faults.find_bad_versions(first) + known_faults.find_overrides(
        {"XLA_FLAGS": first.get("XLA_FLAGS", "")}
    ):
        return [make_failure("versions", bad[0].partition(": ")[0], bad[0].partition(": ")[2], 4)]
    shown = ", ".join(f"{name} {first[name]}" for name in ("jax", "jaxlib", "NCCL", "CUDA", "driver") if name in first)
    return [Row("versions", OK, f"{shown} (the same in all processes)")]


def devices(bench: Bench) -> dict[str, Any]:
    """Find the devices of all processes, lay the grid, and return what this process sees."""
    bench.doing = "waiting until all processes have found their devices"
    every = jax.devices()
    if not bench.meshes:
        bench.meshes = grid(every, bench)
    kinds = [device.device_kind for device in jax.local_devices()]
    return {"kinds": kinds, "gpus": gpu_table(), "links": gpu_links()}


def grid(every: Sequence[jax.Device], bench: Bench) -> tuple[Mesh, ...]:
    """Return a mesh for each stage, of the devices in their order. Sets what the flags left open.

    Raises ``MissingPartError`` if there are fewer devices than asked for.
    """
    stages = bench.stages or (len(every) // bench.per_stage if bench.per_stage else _stages(len(every), bench))
    size = bench.per_stage or max(1, len(every) // max(1, stages))
    if stages < 1 or stages * size > len(every):
        raise MissingPartError(
            f"{stages} stages of {size} devices need {stages * size}, and JAX finds {len(every)}; give other --stages "
            "or --gpus-per-stage, or see why devices are missing"
        )
    bench.stages, bench.per_stage = stages, size
    return tuple(Mesh(np.array(every[n * size : (n + 1) * size]), ("data",)) for n in range(stages))


def _stages(devices: int, bench: Bench) -> int:
    """Return as many stages as processes; of one process two, where it has two devices."""
    count = len(bench.job.hosts)
    return count if count > 1 else min(2, devices)


def judge_devices(bench: Bench, every: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Compare kinds, numbers and free memory of devices; name GPUs that are not well."""
    name = "devices"
    usual = collections.Counter(tuple(answer["kinds"]) for answer in every).most_common(1)[0][0]
    for rank, answer in enumerate(every):
        if tuple(answer["kinds"]) != usual:
            text = f"{name_process(rank)} sees {_count_kinds(answer['kinds'])}, most see {_count_kinds(usual)}"
            remedy = "give each process as many devices of one kind"
            return [make_failure(name, text, remedy, UsageError.exit_code, processes=[rank])]
    text = f"{len(every)} x {_count_kinds(usual)}; a grid of {bench.stages} stages x {bench.per_stage}"
    return [Row(name, OK, text), *judge_gpus(every)]


def _count_kinds(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in collections.Counter(kinds).items()) or "nothing"


def gpu_table() -> list[dict[str, str]]:
    """Return what ``nvidia-smi`` says of each GPU of this machine; nothing where there is none."""
    text = _smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    lines = [line.split(", ") for line in text.splitlines() if line.count(", ") == len(_QUERY) - 1]
    return [dict(zip(_QUERY, line, strict=True)) for line in lines]


def gpu_links() -> list[str]:
    """Return the lines of ``nvidia-smi nvlink`` on links that are down."""
    gpu, links = "", []
    for line in _smi("nvlink", "--status").splitlines():
        gpu = (re.findall(r"^GPU (\d+)", line) or [gpu])[0]
        if "inactive" in line.lower():
            links.append(f"GPU {gpu}, {line.strip()}")
    return links


def _smi(*argv: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *argv], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def judge_gpus(every: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Name GPUs with errors in memory, low clocks, little memory, or links that are down."""
    rows = []
    for rank, answer in enumerate(every):
        faults = [
            (f"GPU {gpu['index']} of {name_process(rank)} {ill}", do)
            for gpu in answer["gpus"]
            for ill, do in _ills(gpu)
        ]
        down = "drain the node; dcgmi diag -r 3 says more"
        faults += [(f"{link} of {name_process(rank)} is down", down) for link in answer["links"]]
        rows += [make_failure("GPUs", *fault, MissingPartError.exit_code, processes=[rank]) for fault in faults]
    healthy = [Row("GPUs", OK, "no errors, no throttling, all links up, by nvidia-smi")]
    return rows or healthy * any(answer["gpus"] for answer in every)


def _ills(gpu: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield what is wrong with a GPU, and the remedy."""
    if errors := _number(gpu, "ecc.errors.uncorrected.volatile.total"):
        yield f"has {errors:.0f} errors in memory that could not be corrected", "drain the node and reset the GPU"
    reasons = int((re.findall(r"0x[0-9a-fA-F]+", gpu["clocks_throttle_reasons.active"]) or ["0x0"])[0], 16) & ~_IDLE
    if reasons:
        yield f"is slowed down (reasons {reasons:#x}, {gpu['temperature.gpu']} C)", "cooling or power: drain the node"
    if _number(gpu, "memory.free") < _LEAST_FREE * _number(gpu, "memory.total") and gpu["pstate"] != "P0":
        yield f"has {gpu['memory.free']} of {gpu['memory.total']} MiB free", "end what else has memory: nvidia-smi"


def _number(gpu: Mapping[str, str], name: str) -> float:
    try:
        return float(gpu[name])
    except ValueError:  # [N/A]
        return 0.0
