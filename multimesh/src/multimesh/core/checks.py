"""Checks of arguments. Each returns the checked value, or raises an error that names what it must be."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from multimesh.errors import UsageError


def refuse(what: str, wanted: str, value: Any) -> UsageError:
    """Return the error for an argument of a wrong type. ``what`` names the function and the parameter."""
    shown = repr(value)
    return UsageError(f"{what} must be {wanted}, got {shown if len(shown) < 80 else '...'} ({type(value).__name__})")


def whole(what: str, value: Any, least: int | None = None) -> int:
    """Return an int, given as Python's or NumPy's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise refuse(what, "an int", value)
    if least is not None and number < least:
        raise UsageError(f"{what} must be at least {least}, got {number}")
    return number


def string(what: str, value: Any) -> str:
    """Return a str."""
    if not isinstance(value, str):
        raise refuse(what, "a str", value)
    return value


def function(what: str, value: Any) -> Any:
    """Return a callable."""
    if not callable(value):
        raise refuse(what, "callable", value)
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


def callable_with(what: str, value: Any, *arguments: str) -> Any:
    """Return a callable that takes positional arguments of these names."""
    if error := misfit(function(what, value), *arguments):
        raise UsageError(f"{what} is called with ({', '.join(arguments)}), which it does not take: {error}")
    return value


def many(what: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """Return a sequence as a tuple; text is no sequence."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise refuse(what, wanted, value)
    return tuple(value)


def placement(what: str, value: Any, count: int) -> tuple[int, ...]:
    """Return the submesh of each stage, by number, as a tuple; by default each of ``count`` in turn."""
    if value is None:
        return tuple(range(count))
    found = many(f"{what}: placement", value, "a sequence of ints")
    route = tuple(whole(f"{what}: placement: a submesh", number, 0) for number in found)
    if {*route} != {*range(count)}:
        raise UsageError(f"{what}: placement={value!r} must name each of submeshes 0 to {count - 1}, and no other")
    return route


def names(what: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of str as a tuple."""
    return tuple(string(f"{what}: a name", name) for name in many(what, value, "a sequence of names"))


def pairs(what: str, value: Any, wanted: str = "a mapping or a sequence of pairs") -> tuple[tuple[Any, Any], ...]:
    """Return the items of a mapping, or pairs, as a tuple of pairs."""
    found = tuple(value.items()) if isinstance(value, Mapping) else many(what, value, wanted)
    if any(isinstance(pair, str | bytes) or not isinstance(pair, tuple | list) or len(pair) != 2 for pair in found):
        raise refuse(what, wanted, value)
    return tuple((key, item) for key, item in found)


def path(what: str, value: Any) -> str:
    """Return the path of a file as a str."""
    if not isinstance(value, str | os.PathLike):
        raise refuse(what, "a path (str or os.PathLike)", value)
    return os.fspath(value)
