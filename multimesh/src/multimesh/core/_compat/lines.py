"""Source lines of the user, for equations, callers and errors; and the scopes around an equation."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import source_info_util

from multimesh import errors
from multimesh.errors import UsageError

_OWN_FILES = os.path.dirname(errors.__file__) + os.sep
_JAX_FILES = os.path.dirname(jax.__file__) + os.sep
_NOT_USERS = (_OWN_FILES, _JAX_FILES, contextlib.__file__)
_ALL = 1000  # frames
_FRAME = re.compile(r"(.+?:\d+)(?::\d+)? \(")  # file:line:column (function), where there is a column

_TRANSPOSITION = ("Transform", "transpose")

REMATTED = "rematted_computation"
"""Scope of the operations that a backward pass repeats under ``jax.checkpoint``."""


def scopes(eqn: Any) -> tuple[tuple[str, ...], bool]:
    """Return the named scopes around an equation, outermost first, and whether a transposition made it."""
    steps = scopes_and_transpositions(eqn)
    return tuple(step for step in steps if step is not None), None in steps


def scopes_and_transpositions(eqn: Any) -> tuple[str | None, ...]:
    """Return the named scopes around an equation, outermost first, and None for each transposition among them."""
    stack = [(type(s).__name__, s.name) for s in eqn.source_info.name_stack.stack]
    return tuple(
        name if kind == "Scope" else None for kind, name in stack if kind == "Scope" or (kind, name) == _TRANSPOSITION
    )


def is_transposed_last(eqn: Any) -> bool:
    """Return whether a transposition is the outermost step that made the equation, with no differentiation after it."""
    steps = (s.name for s in eqn.source_info.name_stack.stack if type(s).__name__ == "Transform")
    return next((name for name in steps if name in ("jvp", "transpose")), None) == "transpose"


def without_transpositions(eqn: Any) -> Any:
    """Return the equation as if no transposition had made it."""
    names = eqn.source_info.name_stack
    entries = tuple(s for s in names.stack if (type(s).__name__, s.name) != _TRANSPOSITION)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=type(names)(entries)))


def _is_hidden(file: str) -> bool:
    """Return whether a file is shown only if no other is: of a library, or ``<string>`` as of a dataclass."""
    return "site-packages" in file or "dist-packages" in file or file.startswith("<")


def user_line(source_info: Any) -> str:
    """Return ``file:line`` of the user's code that made an equation, or an empty string.

    JAX leaves out its own frames, and those that libraries such as Flax registered. Those of any installed package are
    left out where others are left.
    """
    if source_info is None or source_info.traceback is None:
        return ""
    frames = source_info_util.summarize(source_info, _ALL).splitlines()  # the innermost is the last
    matches = filter(None, map(_FRAME.match, reversed(frames)))
    places = [match[1] for match in matches if not match[1].startswith(_NOT_USERS)]
    visible = (place for place in places if not _is_hidden(place))
    return next(visible, next(iter(places), ""))


def keep_line(source_info: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations are noted at the line of an equation: the compiler tells it of kernels."""
    if source_info is None or source_info.traceback is None:
        return contextlib.nullcontext()
    return source_info_util.user_context(source_info.traceback)


_warned: dict[Any, Any] = {}  # Python's record of the warnings of each place


def warn_at(line: str, message: str) -> None:
    """Warn at ``file:line`` of the user, as if that line had warned.

    Where it is not known, or known to be of a library (JAX records ten frames), warn at the caller's line.
    """
    file, _, number = (caller_line() if not line or _is_hidden(line) else line).rpartition(":")
    warnings.warn_explicit(message, UserWarning, file, int(number), registry=_warned)


def caller_line() -> str:
    """Return ``file:line`` of the innermost caller: not this package, not JAX, a library only if there is no other."""
    frames = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    others = [place for place in frames if not place[0].startswith(_NOT_USERS)] or frames[-1:]
    file, line = next((place for place in others if not _is_hidden(place[0])), others[0])
    return f"{file}:{line}"


def error_line(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of the user, and not of a library, that an exception passed."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    lines = [f"{name}:{line}" for name, line in frames if not name.startswith(_NOT_USERS) and not _is_hidden(name)]
    return lines[-1] if lines else caller_line()


def is_raised_by_jax(error: BaseException) -> bool:
    """Return whether code of JAX raised an error, and not that of the user."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(_JAX_FILES)


def invalid_value(error: Exception) -> str | None:
    """Return "nan" or "inf" if `jax_debug_nans` or `jax_debug_infs` raised the error; None for other errors."""
    return getattr(error, "ty", None) if type(error).__name__ == "InternalFloatingPointError" else None


_CONCRETE = (
    *(jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError),
    *(jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError),
)


@contextlib.contextmanager
def explain(meaning: Callable[[Exception, str, str], UsageError | None]) -> Iterator[None]:
    """Raise what an error of JAX means, by ``meaning(error, user's line, "JAX says: ...")``, which may be None."""
    try:
        yield
    except Exception as error:
        if isinstance(error, errors.MultiMeshError):
            raise
        says = f"JAX says: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        if (usage_error := meaning(error, error_line(error), says)) is None:
            raise
        raise usage_error from error


def explain_trace(name: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Raise an error that names the user's function and line if JAX can't trace that function.

    That is so if a result is no array, if Python code asks for the value of a traced array, or if it changes an object
    of Flax NNX that was made outside.
    """

    def meaning(error: Exception, line: str, says: str) -> UsageError | None:
        text = str(error)
        if isinstance(error, TypeError) and (returned := text.partition(" traced for jit returned ")[2]):
            return UsageError(f"{line}: {name()} must return a pytree of arrays; it returned {returned}")
        if isinstance(error, _CONCRETE) or (isinstance(error, TypeError) and "concrete value" in text):
            return UsageError(
                f"{line}: {name()} is traced, and an array has no value in Python then; use jnp.where or jax.lax.cond "
                f"in the place of `if`, or give it as a static Python value (static_argnums of multimesh.jit). {says}"
            )
        if remedy := remedy_of_sizes(error):
            return UsageError(f"{line}: in {name()} {remedy}. {says}")
        if "different trace level" not in text:
            return None
        return UsageError(
            f"{line}: {name()} is traced, and may not change an object of Flax NNX that was made outside of it; give "
            f"its state as an argument, nnx.merge it inside with copy=True, and return the new state. {says}"
        )

    return explain(meaning)


def remedy_of_sizes(error: Exception) -> str:
    """Return the remedy where JAX refuses to bring values of meshes of different sizes together, else nothing."""
    if "cannot change the size of the mesh" not in str(error):
        return ""
    return (
        "a transformation brings values of meshes of different sizes together, which JAX can't do around blocks; write "
        "tasks as calls, multimesh.task(fn, mesh=...), or as scopes of multimesh.register_task, in the place of `with "
        "multimesh.task(...)`"
    )


def set_name(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give ``fn`` this name, which ``jax.jit`` records in jaxprs, HLO modules and profiles."""
    fn.__name__ = fn.__qualname__ = name
    return fn
