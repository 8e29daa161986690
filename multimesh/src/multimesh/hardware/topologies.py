"""Devices that are not there, for which JAX compiles: GPUs of a cluster, on a machine without any."""

from __future__ import annotations

import functools
import importlib.util
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax
from jax.experimental import topologies

from multimesh.core import checks
from multimesh.errors import UsageError

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block}
  core_count: {cores} l2_cache_size: {l2} clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} {features} }}
  name: "{name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@functools.cache
def _targets() -> Mapping[str, Mapping[str, Any]]:
    table = tomllib.loads(resources.files(__package__).joinpath("targets.toml").read_text(encoding="utf-8"))
    return {name: table.get(facts.get("like", name), {}) | facts for name, facts in table.items()}


def target_config(device: str) -> str:
    """Return XLA's description of a GPU (a ``GpuTargetConfigProto`` as text)."""
    if "gpu_device_info" in device:
        return device
    known = _targets()
    if device not in known:
        raise UsageError(
            f"topology: knows no device {device!r}; it knows {', '.join(known)}; or pass the text of XLA's "
            "GpuTargetConfigProto"
        )
    facts = known[device]
    hopper = facts["capability"][0] >= 9
    features = "feature_extension: ACCELERATED_FEATURES" if hopper else ""
    return _TARGET.format(**facts, fpus=128 if hopper else 64, features=features)


def topology(device: str, *, nodes: int = 1, gpus: int = 8, process_per: str = "gpu") -> tuple[jax.Device, ...]:
    """Return devices that are not there, for meshes: what is lowered for them can be compiled, but not run.

    It needs JAX's CUDA plugin and NVIDIA's compiler (``requirements/compile-gpu.txt``), and no GPU or driver.

    Parameters
    ----------
    device
        Name of a GPU such as "h100", or the text of XLA's ``GpuTargetConfigProto``.
    nodes, gpus
        Nodes, and GPUs of each, which the fast link connects.
    process_per
        "gpu" or "node": how many devices a process has.

    Raises
    ------
    UsageError
        For a device that it does not know, or where the plugin is not installed.
    """
    nodes, gpus = checks.whole("topology: nodes", nodes, 1), checks.whole("topology: gpus", gpus, 1)
    if process_per not in ("gpu", "node"):
        raise UsageError(f'topology: process_per must be "gpu" or "node", got {process_per!r}')
    config = target_config(checks.string("topology: device", device))
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        raise UsageError(
            "topology: compiling for GPUs needs JAX's CUDA plugin, which is not installed; install it with "
            "pip install --require-hashes --no-deps -r requirements/compile-gpu.txt"
        )
    shape = f"{nodes}x1x{gpus}" if process_per == "node" else f"{nodes}x{gpus}x1"
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"topology: JAX makes no topology {shape} of {device[:20]!r}: {first}") from error
    return tuple(found.devices)
