"""A file that says on which devices every parameter and optimizer moment lies, and how much each device holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax


def write_placement(file: Path, **states: Any) -> None:
    """Add train states to the file, each under its name: ``arrays`` (path to device ids), ``bytes`` (by device id)."""
    found = json.loads(file.read_text()) if file.exists() else {}
    found |= {name: _describe(state) for name, state in states.items()}
    file.write_text(json.dumps(found, indent=1))


def _describe(state: Any) -> dict[str, Any]:
    arrays = {}
    held: dict[int, int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        arrays[jax.tree_util.keystr(path)] = sorted(device.id for device in x.sharding.device_set)
    for x in jax.live_arrays():
        if not x.is_deleted():
            # Not from x.addressable_shards: those would keep the buffers alive, and the step could not reuse them.
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for device in x.sharding.addressable_devices:
                held[device.id] = held.get(device.id, 0) + size
    return {"arrays": arrays, "bytes": held}
