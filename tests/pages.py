"""What the pages of this repository show in their fences: blocks of code, and commands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """Return the Markdown files that git tracks."""
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--", "*.md"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return [name for name in output.split("\0") if name]


def blocks(name: str, language: str) -> list[str]:
    """Return the bodies of a page's blocks of a language."""
    return [body for kind, body in FENCE.findall((ROOT / name).read_text(encoding="utf-8")) if kind == language]


def typed(name: str) -> list[str]:
    """Return the lines that a page types into a console: those after ``$``, each joined with what continues it."""
    return [
        line for body in blocks(name, "console") for line in re.findall(r"^\$ (.*)", body.replace("\\\n", ""), re.M)
    ]


def read_commented(path: Path) -> dict[str, Any]:
    """Read JSON with comments of their own lines."""
    return dict(json.loads(re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)))
