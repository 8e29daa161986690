"""Compiler contexts: options for the calls of `multimesh.jit` inside a ``with`` block.

The options in force are those of the calling thread (or asyncio task). They are part of the signature of a call, so a
function is traced again under other options.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from multimesh.errors import UsageError
from multimesh.marking.tracing import Manager, is_partitioning


@dataclasses.dataclass(frozen=True)
class Options:
    """The options and their defaults; `context` explains each."""

    autoshard: bool = False
    enable_task_fusion: bool = True
    only_fuse_loop_tasks: bool = False
    enable_recomputation: bool = True
    enable_fast_path: bool = True
    ignore_transforms: bool = False
    transport: str | None = None


_NAMES = tuple(field.name for field in dataclasses.fields(Options))
_DEFAULTS = Options()
_options: contextvars.ContextVar[Options] = contextvars.ContextVar("multimesh_options", default=_DEFAULTS)
_traces = jax.make_user_context(False)  # JAX's own caches keep traces with and without marks apart


def current() -> Options:
    """Return the options in force."""
    return _options.get()


@functools.cache
def with_autoshard(options: Options) -> Options:
    """Return the options with ``autoshard`` on. Cached, since every call asks for them."""
    return dataclasses.replace(options, autoshard=True)


def ignoring() -> bool:
    """Return whether tasks, microbatches and constraints are the identity here."""
    return _options.get().ignore_transforms


TRANSPORTS = ("pull", "device_put")
"""Names of the classes of `runtime.between.transports`."""


def context(**options: bool | str | None) -> Manager:
    """Set options for the calls inside a ``with`` block, or inside a function that it decorates.

    Each is True, False, or None, which leaves it as it is.

    Parameters
    ----------
    autoshard
        Derive layouts of arguments from the sharding constraints in the function (default: off). An argument keeps its
        own layout if it is an array with a ``NamedSharding``, or if ``in_shardings`` gives one. Each dimension of any
        other takes the axes of the nearest constraint that reaches it through operations: a weight gets a layout if
        it, or its product with an activation, is constrained. Without it such an argument is replicated.
    enable_task_fusion
        Make one kernel of the tasks that a submesh runs one after the other (default: on). If it is off, every task is
        a kernel of its own, and forward and backward of the last stage are two. Fewer kernels cost less time to
        dispatch, and values within a kernel need no array.
    only_fuse_loop_tasks
        Restrict task fusion to microbatch loops (default: off).
    enable_recomputation
        Compute cheap forward values (elementwise operations, changes of shape) again where the backward pass of a loop
        reads them, if that takes fewer bytes than to keep or to send them (default: on). ``jax.checkpoint`` works
        beside it: its function is computed again, whatever that costs.
    enable_fast_path
        Run a function without tasks as plain ``jax.jit`` (default: on). If it is off, such a function gets a plan on
        one submesh: the mesh of its arguments, or one device. Its microbatch loop then runs by its schedule.
    ignore_transforms
        Make ``task``, registered scopes, ``microbatch`` and ``with_sharding_constraint`` the identity, to debug
        (default: off). `jit` is then plain ``jax.jit``, on one device if the arguments lie on several submeshes, and
        ``in_shardings`` and ``out_shardings`` are ignored. ``microbatch(fn)`` calls ``fn`` once with all rows: the sum
        over microbatches if ``fn`` sums over rows, and that divided by their number if it averages. The block may also
        be around a part of a function that is traced.
    transport
        How arrays get from one process to another: ``"pull"`` (``jax.experimental.transfer``, over TCP; the default if
        there are CPUs) or ``"device_put"`` (NCCL; the default otherwise). The environment variable
        ``MULTIMESH_TRANSPORT`` sets it where no context does. Processes that share a GPU need ``"pull"``.

    Raises
    ------
    UsageError
        At once for an unknown option or another type. On entry inside a function that `jit` is tracing, except for
        ``ignore_transforms``: the plan is made after the trace, under the options of the call.

    Examples
    --------
    >>> with mm.context(enable_task_fusion=False, enable_recomputation=False):  # doctest: +SKIP
    ...     step(params, batch)
    """
    changes = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in _NAMES:
            raise UsageError(f"context: unknown option {name!r}; options are {', '.join(_NAMES)}")
    for name, value in changes.items():
        if name == "transport" and value not in TRANSPORTS:
            raise UsageError(f"transport: give one of {', '.join(TRANSPORTS)} or None (as it is), not {value!r}")
        if name != "transport" and not isinstance(value, bool):
            raise UsageError(f"{name}: give True, False or None (as it is), not {value!r}")
    return _apply_options(changes)


@contextlib.contextmanager
def _apply_options(changes: dict[str, Any]) -> Iterator[None]:
    names = [name for name in changes if name != "ignore_transforms"]
    if names and is_partitioning():
        raise UsageError(f"{names[0]}: opened inside a function that multimesh.jit traces; open it around the call")
    options = dataclasses.replace(_options.get(), **changes)
    token = _options.set(options)
    try:
        with _traces(options.ignore_transforms):
            yield
    finally:
        _options.reset(token)
