"""Wheels that tests make."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path


def pack(path: Path, *entries: tuple[str, str, int], metadata: Iterable[str] = ()) -> str:
    """Write a wheel of names, texts and modes, with these lines of metadata; return its sha256."""
    name, version = path.name.split("-")[:2]
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    texts = {
        "METADATA": lines,
        "WHEEL": ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any"],
        "RECORD": [],
    }
    files = [(f"{name}-{version}.dist-info/{file}", "\n".join([*text, ""]), 0o100644) for file, text in texts.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text, mode in (*entries, *files):
            info = zipfile.ZipInfo(file)
            info.external_attr = mode << 16
            archive.writestr(info, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()
