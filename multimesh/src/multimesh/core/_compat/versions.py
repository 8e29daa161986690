"""Versions of JAX: which are supported, and which private parts a version has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from multimesh.errors import MultiMeshError

SUPPORTED = "jax>=0.10"  # as in pyproject.toml
NEWEST_TRIED = (0, 12)
NEWER = jax.__version_info__[:2] > NEWEST_TRIED
_TRIED = ".".join(map(str, NEWEST_TRIED))

if jax.__version_info__ < (0, 10):
    raise MultiMeshError(f"MultiMesh needs {SUPPORTED}, found {jax.__version__}: pip install '{SUPPORTED}'")

_missing: list[str] = []


def private(path: str, *, irreplaceable: bool = False) -> Any:
    """The object at a dotted path under ``jax._src``; None if its public fallback is to be used.

    That is so under ``MULTIMESH_PUBLIC_JAX=1``, if nothing is at the path, and for a JAX that was never tried. For the
    last it is not if the part is ``irreplaceable``.
    """
    if os.environ.get("MULTIMESH_PUBLIC_JAX") == "1":
        return None
    module, *names = path.split(".")
    try:
        found = functools.reduce(getattr, names, importlib.import_module(f"jax._src.{module}"))
    except (AttributeError, ImportError):
        _missing.append(path)
        return None
    return None if NEWER and not irreplaceable else found


def tell() -> None:
    """Warn of a JAX that was never tried, and of private parts that it lacks; call it after the last `private`."""
    lacks = f"jax {jax.__version__} has no {', '.join(f'jax._src.{path}' for path in _missing)}"
    if NEWER:
        also = f"; {lacks}" if _missing else ""
        warnings.warn(
            f"jax {jax.__version__} is newer than this MultiMesh, which was tried with jax up to {_TRIED}: it goes on "
            f"with JAX's public functions, which takes longer{also}",
            stacklevel=2,
        )
    elif _missing:
        warnings.warn(f"{lacks}: public functions take their place, which takes longer", stacklevel=2)


@functools.cache
def moved(error: str) -> None:
    """Warn, once, that JAX has moved something inside of an object."""
    warnings.warn(
        f"jax {jax.__version__}: {error}: public functions take its place, which takes longer",
        stacklevel=3,
    )


@contextlib.contextmanager
def tried_version() -> Iterator[None]:
    """If a JAX that was never tried lacks something, raise an error that names the versions."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if not NEWER:
            raise
        raise MultiMeshError(
            f"this version of MultiMesh does not work with jax {jax.__version__} ({error}), with which it was never "
            f"tried: upgrade multimesh-jax, or pip install 'jax<{NEWEST_TRIED[0]}.{NEWEST_TRIED[1] + 1}'"
        ) from error
