"""The rows of the argument that a microbatch loop cuts, and what to do about arguments that have none."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.core import _compat
from multimesh.errors import MultiMeshError, UsageError


def rows_of(arg: Any, dim: int, argnum: int) -> int:
    """Return the number of rows along ``dim`` of all leaves of an argument; refuse a leaf that differs, by its name."""
    leaves = [(f"argument {argnum}{jax.tree_util.keystr(path)}", x) for path, x in jax.tree.flatten_with_path(arg)[0]]
    if not leaves:
        raise UsageError(f"microbatch: argument {argnum} has no arrays to cut")
    for name, x in leaves:
        if not -np.ndim(x) <= dim < np.ndim(x):
            raise UsageError(f"microbatch: {name} of shape {np.shape(x)} has no rows along dim={dim}; {_remedy(x)}")
    rows = {name: np.shape(x)[dim] for name, x in leaves}
    usual = collections.Counter(rows.values()).most_common(1)[0][0]
    if len(set(rows.values())) == len(rows):
        usual = max(rows.values())
    for name, x in leaves:
        if rows[name] != usual:
            raise UsageError(
                f"microbatch: leaves of argument {argnum} differ in rows along dim={dim}: {name} has {rows[name]}, "
                f"others {usual}; {_remedy(x)}"
            )
    if not usual:
        raise UsageError(f"microbatch: argument {argnum} has 0 rows along dim={dim}; give one microbatch at least")
    return usual


def _remedy(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    key = dtype is not None and (
        jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and np.shape(x) in ((2,), (4,)))
    )
    if key:
        return "give a key as an argument of its own, and fold in the number of the microbatch, which index= passes"
    return "give what all rows share as an argument of its own, or repeat it for each row; argnum= says which is cut"


@contextlib.contextmanager
def explain_cut(args: Sequence[Any], argnum: int) -> Iterator[None]:
    """If a function fails on a microbatch of its first argument of several, add that this one was cut."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if argnum or len(args) < 2 or isinstance(error, MultiMeshError) or not _compat.is_raised_by_jax(error):
            raise
        raise UsageError(
            f"{_compat.error_line(error)}: the function failed on a microbatch of argument 0, which argnum=0 cuts; if "
            f"the batch is another argument, say so: argnum=1. JAX says: {str(error).strip().splitlines()[0]}"
        ) from error
