"""Checks of arguments. Each returns the checked value, or raises an error that names what it must be."""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from multimesh.errors import UsageError


def refuse(label: str, expected: str, value: Any) -> UsageError:
    """Return the error for an argument of a wrong type. ``label`` names the function and the parameter."""
    text = repr(value)
    return UsageError(f"{label} must be {expected}, got {text if len(text) < 80 else '...'} ({type(value).__name__})")


def integer(label: str, value: Any, least: int | None = None) -> int:
    """Return an int, given as Python's or NumPy's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise refuse(label, "an int", value)
    if least is not None and number < least:
        raise UsageError(f"{label} must be at least {least}, got {number}")
    return number


def string(label: str, value: Any) -> str:
    """Return a str."""
    if not isinstance(value, str):
        raise refuse(label, "a str", value)
    return value


def function(label: str, value: Any) -> Any:
    """Return a callable."""
    if not callable(value):
        raise refuse(label, "callable", value)
    return value


def misfit(fn: Any, *arguments: Any) -> str:
    """Return why a callable does not take positional arguments; "" if it does, or does not tell, as one in C."""
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def many(label: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Return a sequence as a tuple; text is no sequence."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise refuse(label, expected, value)
    return tuple(value)


def names(label: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of str as a tuple."""
    return tuple(string(f"{label}: a name", name) for name in many(label, value, "a sequence of names"))


def pairs(label: str, value: Any, expected: str = "a mapping or a sequence of pairs") -> tuple[tuple[Any, Any], ...]:
    """Return the items of a mapping, or pairs, as a tuple of pairs."""
    items = tuple(value.items()) if isinstance(value, Mapping) else many(label, value, expected)
    if any(isinstance(pair, str | bytes) or not isinstance(pair, tuple | list) or len(pair) != 2 for pair in items):
        raise refuse(label, expected, value)
    return tuple((key, item) for key, item in items)


def path(label: str, value: Any) -> str:
    """Return the path of a file or folder of this machine as a str. Every path that a user gives is checked here."""
    if not isinstance(value, str | os.PathLike):
        raise refuse(label, "a path (str or os.PathLike)", value)
    text = os.fspath(value)
    # pathlib has made one slash of two
    if isinstance(text, str) and (scheme := re.match(r"([a-z][a-z0-9+.-]+):/", text, re.IGNORECASE)):
        raise UsageError(
            f"{label}: {text} is an address of {scheme[1]}, and no path of this machine: mount the bucket and give the "
            "path of the mount, or write there with Orbax's CheckpointManager and mm.distributed.orbax_handler()"
        )
    return text
