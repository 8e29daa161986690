"""How the help of a command begins: with examples, before what it does and its options."""

from __future__ import annotations

import argparse
from typing import Any


def shown(text: str, *examples: str) -> dict[str, Any]:
    """Return keyword arguments of ``add_parser`` for a command that does ``text``, shown by ``examples``."""
    return {
        "help": text,
        "description": "\n".join([*(f"  {example}" for example in examples), "", f"{text[0].upper()}{text[1:]}."]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
