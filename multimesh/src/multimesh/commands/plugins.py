"""Commands of other distributions: a module for each entry point of the group ``multimesh.commands``."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol

from multimesh.core import names

GROUP = "multimesh.commands"
_COMMANDS = {"suggest": "multimesh_planner.suggest_command"}  # of this project's other distributions


class Plugin(Protocol):
    """The module of a command."""

    SUMMARY: str  # a line of the list of commands
    ABOUT: str  # shown before the flags
    EXIT_CODES: str

    def add_flags(self, command: Any) -> None:
        """Declare the flags of the command."""

    def run(self, options: Any) -> dict[str, Any]:
        """Run the command and return its results as JSON has them."""


@functools.cache
def load_all() -> Mapping[str, Plugin]:
    """Return the modules of the commands that are installed, by name; those of a clone on PYTHONPATH too."""
    modules: dict[str, Plugin] = {entry.name: entry.load() for entry in metadata.entry_points(group=GROUP)}
    for name, module in _COMMANDS.items():
        if name not in modules and importlib.util.find_spec(module.partition(".")[0]):
            modules[name] = importlib.import_module(module)
    return dict(sorted(modules.items()))


def refuse_missing(argv: Sequence[str]) -> None:
    """Raise ``MissingPartError`` for a command of a distribution of this project that is not installed."""
    name = next(iter(argv), "")
    if name in _COMMANDS and name not in load_all():
        names.load_extra(_COMMANDS[name], f"python -m multimesh {name}")
