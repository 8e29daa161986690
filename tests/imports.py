"""Which modules of a package import which, anywhere in a file: also within functions, and for types."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path


def modules(folder: Path) -> dict[str, Path]:
    """Name within the package to file, such as ``passes.reading.inline`` or ``__init__``."""
    names = {path: path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")}
    return {
        ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts): p for p, parts in names.items()
    }


def graph(folder: Path) -> dict[str, set[str]]:
    """Module of the package in a folder to the others that it imports."""
    files = modules(folder)
    return {name: set(of_file(path, folder.name, files)) - {name} for name, path in files.items()}


def bottom_up(imported: Mapping[str, set[str]]) -> list[str]:
    """Return the modules such that each follows those that it imports; raise what names a circle."""
    return list(graphlib.TopologicalSorter(imported).static_order())


def of_file(path: Path, package: str, modules: Container[str]) -> Iterator[str]:
    """Yield the modules of a package that a file imports: of those known, else what holds them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            module = (node.module or "").partition(".")[2]
            for name in (".".join(filter(None, (module, alias.name))) for alias in node.names):
                yield name if name in modules else module or "__init__"
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] or "__init__" for a in node.names if a.name.split(".")[0] == package)
