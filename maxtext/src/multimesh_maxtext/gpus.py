"""Which GPUs the driver shows, without JAX."""

from __future__ import annotations

import os
import subprocess


def visible_gpu_memory() -> list[int] | None:
    """Return the memory of every visible GPU in MiB, ``None`` if there is no driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    memory = [int(line) for line in listing.stdout.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return memory if chosen is None else memory[: len([part for part in chosen.split(",") if part])]
