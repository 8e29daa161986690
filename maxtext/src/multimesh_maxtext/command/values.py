"""The values that flags and KEY=VALUE arguments may have, and the functions that read them from text."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from multimesh import planner, schedules

BACKENDS = ("multimesh", "spmd", "cuda", "cpu", "legate")

SCHEDULES = (*schedules.names(), "auto", "custom")

ATTENTION = ("autoselected", "dot_product", "flash", "cudnn_flash_te", "cudnn_flash_jax")

REMAT = (  # MaxText also reads "none", and recomputes everything
    *("full", "minimal", "minimal_flash", "minimal_with_context", "minimal_with_quantization"),
    *("minimal_with_context_and_quantization", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi"),
    *("save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "qkv_proj_offloaded", "minimal_offloaded", "custom"),
)

DEVICES = {name: int(planner.device(name).memory) // 2**20 for name in planner.devices()}
"""Accelerators, and MiB of their memory as their drivers show them."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def count(minimum: int) -> Callable[[str], int]:
    """Return the type of whole numbers of at least ``minimum``."""

    def whole_number(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= minimum:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")

    return whole_number


def partition(text: str) -> str | tuple[int, ...]:
    """Return the layers of each piece, or ``auto``."""
    if text == "auto":
        return text
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor numbers of layers; write e.g. 3,3,2")
    return tuple(map(int, text.split(",")))


def parse_size(text: str) -> int:
    """Return bytes: ``80GiB``, ``24 GB``; ``1e9`` is none."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 80GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def read_values(settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings with their values as YAML reads them; what is no YAML stays as it is written."""
    values: dict[str, Any] = {}
    for key, value in (setting.split("=", 1) for setting in settings):
        values[key] = value
        with contextlib.suppress(yaml.YAMLError, ValueError):  # such as a date that is none
            values[key] = yaml.safe_load(value)
    return values


def argument(key: str, value: Any) -> str:
    """Return ``key=value`` such that MaxText's YAML reader gives back the value, of the same type."""
    if isinstance(value, bool) or value is None:
        return f"{key}={json.dumps(value)}"
    if isinstance(value, str) and value and (yaml.safe_load(value) if is_plain(value) else None) != value:
        return f"{key}={json.dumps(value, ensure_ascii=False)}"
    return f"{key}={value}"


def is_plain(value: str) -> bool:
    """Return whether YAML reads a word without quotes as it is written."""
    return value != "=" and frozenset("#:{}[],&*!|>'\"%@`\n").isdisjoint(value)
