"""Declares commands. The help of each begins with examples; then come its purpose and its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

Subparsers = argparse._SubParsersAction


def command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    examples: Sequence[str] = (),
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a command with its purpose ``text``; it calls ``run``, which may return an exit code. Return its parser."""
    shown = "\n".join([*(f"  {example}" for example in examples), "", f"{text[0].upper()}{text[1:]}."])
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=shown, formatter_class=formatter, **options
    )
    parser.set_defaults(func=run)
    return parser
