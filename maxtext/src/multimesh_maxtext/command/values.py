"""The values that flags may have, and the functions that read them from text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from multimesh import planner, schedules

BACKENDS = ("multimesh", "spmd", "cuda", "cpu", "legate")

SCHEDULES = (*schedules.names(), "auto", "custom")

ATTENTION = ("autoselected", "dot_product", "flash", "cudnn_flash_te", "cudnn_flash_jax")

REMAT = (  # MaxText also reads "none", and recomputes everything
    "full",
    "minimal",
    "minimal_flash",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
)

XLA_SWITCHES = {
    "latency_hiding_scheduler": (
        "move collectives so that computation hides them",
        ("--xla_gpu_enable_latency_hiding_scheduler",),
    ),
    "xla_pipelining": (
        "pipeline collectives of a loop over its iterations",
        tuple(f"--xla_gpu_enable_pipelined_{name}" for name in ("all_reduce", "all_gather", "reduce_scatter")),
    ),
    "xla_loop_buffering": ("double-buffer loops", ("--xla_gpu_enable_while_loop_double_buffering",)),
    "use_nccl_comm_split": (
        "make communicators of subsets by splitting",
        ("--xla_gpu_enable_nccl_comm_splitting",),
    ),
}
"""Switches that are on for GPUs by default: their effects, and XLA's flags for them."""

XLA_THRESHOLDS = {
    "xla_ar_threshold": ("all-reduces", 2**32, "--xla_gpu_all_reduce_combine_threshold_bytes"),
    "xla_ag_threshold": ("all-gathers", 2**32, "--xla_gpu_all_gather_combine_threshold_bytes"),
    "xla_rs_threshold": ("reduce-scatters", 2**25, "--xla_gpu_reduce_scatter_combine_threshold_bytes"),
}
"""Operations that XLA combines: up to which size by default, and XLA's flag for that."""


DEVICES = {name: int(planner.device(name).memory) // 2**20 for name in planner.devices()}
"""Accelerators, and MiB of their memory as their drivers show them."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def count(minimum: int) -> Callable[[str], int]:
    """Return the type of whole numbers of at least ``minimum``."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return whole_number


def rate(text: str) -> float:
    """Return a number above 0: ``4e5``."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def partition(text: str) -> str | tuple[int, ...]:
    """Return the layers of each piece, or ``auto``."""
    if text == "auto":
        return text
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor numbers of layers; write e.g. 3,3,2")
    return sizes


GRID_AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep", "interleave")

Axes = tuple[tuple[str, int], ...]
"""Sizes of some axes of a grid, by name."""


def fallback(text: str) -> str | tuple[Axes, ...]:
    """Return the grids of ``pp=4,dp=2; pp=4,dp=1`` in their order, or ``auto``."""
    if text.strip() == "auto":
        return "auto"
    return tuple(tuple(_axis(part, text) for part in grid.split(",")) for grid in text.rstrip("; ").split(";"))


def _axis(part: str, text: str) -> tuple[str, int]:
    name, _, size = (word.strip() for word in part.partition("="))
    if name not in GRID_AXES:
        known = ", ".join(GRID_AXES)
        raise argparse.ArgumentTypeError(f"{text!r}: {name!r} is no axis of a grid; those are {known}, or write auto")
    if not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: {part.strip()!r} has no size; write e.g. pp=4,dp=2; pp=4,dp=1")
    return name, int(size)


def parse_size(text: str) -> int:
    """Return bytes: ``80GiB``, ``24 GB``; ``1e9`` is none."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 80GiB or 24GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
