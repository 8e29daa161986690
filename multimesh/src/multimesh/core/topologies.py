"""Devices that are not there, for which JAX compiles: GPUs of a cluster, on a machine without any."""

from __future__ import annotations

import importlib.util
import os
import warnings

import jax
from jax.experimental import topologies

from multimesh.core import checks
from multimesh.core.targets import target_config
from multimesh.errors import UsageError

_INSTALL = (
    "install it with ./bootstrap.sh --group compile-gpu, or with pip install --require-hashes --no-deps "
    "-r requirements/compile-gpu.txt"
)
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


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
    nodes, gpus = checks.integer("topology: nodes", nodes, 1), checks.integer("topology: gpus", gpus, 1)
    if process_per not in ("gpu", "node"):
        raise UsageError(f'topology: process_per must be "gpu" or "node", got {process_per!r}')
    config = target_config(checks.string("topology: device", device))
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        raise UsageError(f"topology: compiling for GPUs needs JAX's CUDA plugin, which is not installed; {_INSTALL}")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # what only compiles needs no other CUDA library
    if not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")):
        warnings.warn(
            "topology: cuDNN is not installed, and its attention cannot be compiled; " + _INSTALL, stacklevel=2
        )
    shape = f"{nodes}x1x{gpus}" if process_per == "node" else f"{nodes}x{gpus}x1"
    try:
        description = topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)
    except NotImplementedError as error:
        raise UsageError(
            "topology: JAX started before without its CUDA plugin; set JAX_PLATFORMS=cpu, or call topology first"
        ) from error
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"topology: JAX makes no topology {shape} of {device[:20]!r}: {first}") from error
    return tuple(description.devices)
