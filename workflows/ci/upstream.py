"""What an upstream says of its refs, asked without a clone of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from workflows.sources import assemble, git
from workflows.sources.manifest import Component


def ask(component: Component, ref: str, mirror: str | None) -> tuple[str, dict[str, str]]:
    """Return the address that was asked, and its refs that match with their commits (see `git.ask`)."""
    url = assemble.address(component, mirror)
    with tempfile.TemporaryDirectory() as folder:
        return url, git.ask(git.init(Path(folder, "ask")), url, ref, label=component.name)
