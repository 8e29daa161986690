"""``register_task``: rules that make tasks of named scopes, so that models need no change."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.core import _compat, checks
from multimesh.core.submesh import AxisMap, Placement, make_task
from multimesh.errors import UsageError


@dataclass(frozen=True)
class Registration:
    """A rule that places every named scope that its pattern matches. A ``with`` block over it ends it."""

    pattern: re.Pattern[str]
    task: Placement | None = None
    callback: Callable[[str, bool], tuple[tuple[int, int], str]] | None = None
    dims: tuple[int, ...] | None = None
    device_axes: tuple[str, ...] | None = None
    logical_axes: tuple[tuple[str, Any], ...] = ()
    where: str = ""

    def remove(self) -> None:
        """End the registration; removing twice is harmless."""
        global _registrations
        with _registrations_lock:
            _registrations = tuple(r for r in _registrations if r is not self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def resolve(self, path: str, backprop: bool, devices: tuple[jax.Device, ...]) -> Placement | None:
        """Return the task of a scope path (``decoder/layers_3/mlp``), or None if the pattern does not match."""
        match = [None, *self.pattern.finditer(path)][-1]  # the innermost counts
        if match is None:
            return None
        label = match.group(1) if self.pattern.groups else match.group(0)
        if self.callback is None:
            return self.task
        return self._place(self.callback(label, backprop), label, devices)

    def _place(self, answer: Any, label: str, devices: tuple[jax.Device, ...]) -> Placement:
        if hasattr(answer, "place_task"):  # as tasks of `multimesh.jax` have it
            return cast("Placement", answer.place_task(label, devices))
        text, expected = self.pattern.pattern, "((start, stop), task_name)"
        answered = f"register_task({text!r}): what the callback returned for {label!r}"
        try:
            (start, stop), name = checks.many(answered, answer, expected)
        except (TypeError, ValueError):
            raise checks.refuse(answered, expected, answer) from None
        start, stop = (checks.integer(f"{answered}: a device's number", number) for number in (start, stop))
        if not 0 <= start < stop <= len(devices):
            raise UsageError(
                f"register_task({text!r}): the callback placed {label!r} on devices {start}..{stop}, but there are "
                f"{len(devices)}"
            )
        dims = self.dims or (stop - start,)
        if math.prod(dims) != stop - start:
            raise UsageError(
                f"register_task({text!r}): dims={dims} does not hold the {stop - start} devices that the callback "
                f"chose for {label!r}"
            )
        grid = np.asarray(devices[start:stop], dtype=object).reshape(dims)
        name = checks.string(f"{answered}: the task's name", name)
        return make_task(name, devices=grid, device_axes=self.device_axes, logical_axes=dict(self.logical_axes))


R = TypeVar("R", bound=Registration)
_registrations: tuple[Registration, ...] = ()  # the newest first; replaced, never changed
_registrations_lock = threading.Lock()


def in_force() -> tuple[Registration, ...]:
    """Return the registrations in force, the newest first."""
    return _registrations


def add(registration: R) -> R:
    """Put a registration in force, before all others."""
    global _registrations
    with _registrations_lock:
        _registrations = (registration, *_registrations)
    return registration


def register_task(
    regex: str | re.Pattern[str],
    *,
    mesh: Mesh | None = None,
    devices: Any = None,
    callback: Callable[[str, bool], tuple[tuple[int, int], str]] | None = None,
    dims: tuple[int, ...] | None = None,
    device_axes: tuple[str, ...] | None = None,
    logical_axes: AxisMap | None = None,
) -> Registration:
    """Make every ``jax.named_scope`` whose path matches ``regex`` a task: models need no change.

    Flax linen names a scope after each module. For NNX write ``jax.named_scope``.

    Parameters
    ----------
    regex
        Searched in the path of a scope (``decoder/layers_3/mlp``), without ``jvp()`` and ``transpose()``. The innermost
        match counts, and of several registrations the newest.
    mesh, devices
        The submesh, as in `task`.
    callback
        A function, instead of a fixed submesh: ``callback(name, backprop) -> ((start, stop), task_name)``. ``name`` is
        group 1 of the match, and ``start:stop`` a range of the devices of `jit`.
    dims, device_axes
        Shape and axis names of the range of devices.
    logical_axes
        Logical axis name to the submesh's axis, axes or None.

    Returns
    -------
    Registration
        In force until its ``remove()``, or the end of a ``with`` over it.

    Raises
    ------
    UsageError
        At once, if arguments do not fit together.
    """
    if not isinstance(regex if isinstance(regex, str) else getattr(regex, "pattern", None), str):
        raise checks.refuse("register_task: regex", "a str or a compiled pattern of str", regex)
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise UsageError(f"register_task({regex!r}): not a regular expression: {error}") from None
    text, where = pattern.pattern, _compat.caller_line()
    if callback is None:
        if dims is not None:
            raise UsageError(f"register_task({text!r}): dims= shapes a callback's devices; give callback=")
        task = make_task(text, mesh=mesh, devices=devices, device_axes=device_axes, logical_axes=logical_axes)
        return add(Registration(pattern, task, where=where))
    if mesh is not None or devices is not None:
        raise UsageError(f"register_task({text!r}): callback= chooses the devices; drop mesh=/devices=")
    label = f"register_task({text!r}): callback="
    if why := checks.misfit(checks.function(label, callback), "name", "backprop"):
        raise UsageError(f"{label} is called with (name, backprop), which it does not take: {why}")
    if dims is not None:
        entries = checks.many(f"register_task({text!r}): dims=", dims, "a sequence of ints")
        dims = tuple(checks.integer(f"register_task({text!r}): dims=", d, 1) for d in entries)
    if pattern.groups < 1:
        raise UsageError(f"register_task({text!r}): callback= gets group 1 of the match; add a (group)")
    axes = None if device_axes is None else checks.names(f"register_task({text!r}): device_axes=", device_axes)
    logical = () if logical_axes is None else checks.pairs(f"register_task({text!r}): logical_axes=", logical_axes)
    if logical and axes is None:
        raise UsageError(f"register_task({text!r}): logical_axes= needs device_axes=")
    return add(Registration(pattern, None, callback, dims, axes, logical, where))
