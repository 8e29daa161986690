"""The arrays in a part of a file of Orbax, which keeps them in OCDBT, TensorStore's B-tree of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.ocdbt"
SHOWN = 3
"""Arrays that a message names."""


def arrays(folder: Path, name: str, start: int, end: int) -> list[str]:
    """Return the names of arrays in bytes ``start`` to ``end`` of a checkpoint's file; none if nothing tells."""
    file = folder / name
    above = [parent for parent in file.parents if folder in parent.parents and (parent / _MANIFEST).exists()]
    if not above:
        return []
    try:
        import tensorstore

        root = above[-1]
        base = tensorstore.KvStore.open(f"file://{root}/").result()
        found = {
            key.rpartition("/c/")[0] or key.rpartition("/")[0]
            for key, at, offset, size in _values(tensorstore, base)
            if root / at == file and offset < end and start < offset + size
        }
    except Exception:  # noqa: BLE001 - what describes the arrays may be what was damaged
        return []
    return sorted(found)


def _values(tensorstore: Any, base: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield each key of a database, and the file, the offset and the length of its value."""
    version = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    nodes = [(b"", version["root"].get("location"))]
    while nodes:
        prefix, location = nodes.pop()
        if not location:
            continue
        for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"], entry["location"]))
            elif "indirect_value" in entry:
                _, folder, file, offset, size = entry["indirect_value"].rsplit(":", 4)
                yield (prefix + entry["key"]).decode(), folder + file, int(offset), int(size)
