"""Types of values of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multimesh import schedules


def schedule(name: str) -> str:
    """Return the name of a schedule that is known; the error names the nearest one."""
    schedules.get(name)
    return name


def at_least(least: float, kind: Callable[[str], float], noun: str) -> Callable[[str], Any]:
    """Return a type of numbers that are finite and not below ``least``."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {noun} of at least {least}, got {text!r}")
        return value

    return number


positive = at_least(1, int, "a whole number")
time = at_least(0, float, "a time")


def sizes(text: str) -> tuple[int, ...]:
    """Return whole numbers with commas between them."""
    return tuple(map(positive, text.split(",")))


def file(text: str) -> Path:
    """Return the path of a file that can be written, as far as one can tell before."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise argparse.ArgumentTypeError(f"can't write {text!r}: {reason}")
    return path
