"""What a lock of ``requirements/`` has for a Python."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

_REQUIREMENT = re.compile(r"^[A-Za-z0-9].*?(?=\s*\\?$)", re.MULTILINE)


def locked_versions(path: Path, python: str | None = None) -> dict[str, str]:
    """Return the locked version of each package for a Python, such as ``3.13.2``; by default, for that which runs."""
    environment = {name: str(value) for name, value in default_environment().items()}
    if python is not None:
        environment |= {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    lines = (Requirement(match[0]) for match in _REQUIREMENT.finditer(path.read_text(encoding="utf-8")))
    applicable = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
    return {line.name: next(iter(line.specifier)).version for line in applicable}
