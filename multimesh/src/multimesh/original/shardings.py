"""Logical layouts with the arguments of the original: ``mjit`` and ``with_sharding_constraint``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.errors import UsageError
from multimesh.frontend.jitted import Jitted, jit
from multimesh.marking import tasks as here
from multimesh.original.meshes import MultiMesh


def mjit(
    f: Callable[..., Any],
    *,
    mesh: Mesh | MultiMesh | None = None,
    devices: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Jitted:
    """`multimesh.jit` with logical layouts.

    Parameters
    ----------
    mesh, devices
        The devices that tasks may use, in any shape; by default all.
    in_shardings, out_shardings
        Pytree prefixes of the arguments and of the result. The spec of a ``NamedSharding`` constrains its part as
        `with_sharding_constraint` does; the layout under anything else is derived.
    """
    if mesh is not None and devices is not None:
        raise UsageError("mjit: give either mesh= or devices=, not both")

    @functools.wraps(f)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        result = f(*_annotated(args, in_shardings), **kwargs)
        return _annotated(result, out_shardings)

    among = mesh.devices if mesh is not None else devices
    flat = None if among is None else list(np.asarray(among, dtype=object).flat)
    plain = in_shardings is None and out_shardings is None
    made: Jitted = jit(
        f if plain else annotated, static_argnums=static_argnums, donate_argnums=donate_argnums, devices=flat
    )
    return made


def _annotated(values: Any, shardings: Any) -> Any:
    def annotate(sharding: Any, part: Any) -> Any:
        return here.with_sharding_constraint(part, sharding.spec) if isinstance(sharding, NamedSharding) else part

    return _mapped("mjit", annotate, shardings, values)


def _mapped(what: str, fn: Callable[[Any, Any], Any], prefix: Any, values: Any) -> Any:
    """Call ``fn(leaf, part)`` for a pytree prefix. All but tuples, lists and dicts are leaves of the prefix."""

    def is_leaf(x: Any) -> bool:
        return _is_names(x) or not isinstance(x, tuple | list | dict)

    try:
        return jax.tree.map(fn, prefix, values, is_leaf=is_leaf)
    except ValueError as error:
        raise UsageError(f"{what}: shardings are no pytree prefix of the values: {error}") from None


def _is_names(x: Any) -> bool:
    """Whether it is a spec, written as a tuple of names."""
    return isinstance(x, tuple) and any(isinstance(e, str) for e in x)


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """`multimesh.with_sharding_constraint`; also takes a ``NamedSharding`` (for its spec) or a tuple of names."""

    def constrain(given: Any, part: Any) -> Any:
        spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec(*given) if _is_names(given) else given
        return here.with_sharding_constraint(part, spec)

    return _mapped("with_sharding_constraint", constrain, axis_resources, x)
