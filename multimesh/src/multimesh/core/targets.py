"""GPUs as XLA's compiler knows them, on machines that have none. Nothing here imports JAX."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from multimesh.errors import UsageError

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block}
  core_count: {cores} l2_cache_size: {l2} clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth} device_memory_size: {memory} {link}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} {features} }}
  name: "{name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


_NEEDED = (
    *("threads_per_warp", "threads_per_block_limit", "threads_per_core_limit", "block_dim_limit_x"),
    *("core_count", "fpus_per_core", "shared_memory_per_block_optin", "clock_rate_ghz", "memory_bandwidth", "major"),
)
"""What XLA divides by, or cannot choose kernels without."""


def target_names() -> tuple[str, ...]:
    """Return the GPUs that can be compiled for by their names."""
    return tuple(_targets())


@functools.cache
def _targets() -> Mapping[str, Mapping[str, Any]]:
    table = tomllib.loads(resources.files(__package__).joinpath("targets.toml").read_text(encoding="utf-8"))

    def complete(name: str) -> dict[str, Any]:
        facts = table[name]
        return (complete(facts["like"]) if "like" in facts else {}) | facts

    return {name: complete(name) for name in table}


def facts_of(device: str) -> Mapping[str, Any]:
    """Return what ``targets.toml`` says of a GPU. ``H100`` is ``h100``."""
    targets = _targets()
    if device.lower() not in targets:
        raise UsageError(
            f"topology: knows no device {device!r}; it knows {', '.join(targets)}; or pass the text of XLA's "
            "GpuTargetConfigProto"
        )
    return targets[device.lower()]


def target_config(device: str) -> str:
    """Return XLA's description of a GPU (a ``GpuTargetConfigProto`` as text)."""
    if "gpu_device_info" in device:
        missing = [name for name in _NEEDED if not re.search(rf"\b{name}: *[\d.]*[1-9]", device)]
        if missing:
            raise UsageError(
                f"topology: the GpuTargetConfigProto does not say {', '.join(missing)}, without which XLA's compiler "
                "crashes; complete it from one in xla/backends/gpu/target_config/specs of openxla/xla"
            )
        return device
    facts = facts_of(device)
    features = "feature_extension: ACCELERATED_FEATURES" if facts["capability"][0] >= 9 else ""
    link = ""
    if "links" in facts:
        link = "pcie_bandwidth: {pcie} ecc_enabled: true device_interconnect_info {{ active_links: {links} }}"
    return _TARGET.format(**facts, link=link.format(**facts), features=features)
