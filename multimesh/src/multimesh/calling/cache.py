"""Keep traces, plans and compiled functions by signature, and the last arguments of a function."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh.calling.arguments import Signature
from multimesh.calling.transforms import Call
from multimesh.core import _compat
from multimesh.ir.primitives import is_small
from multimesh.passes.placing.owners import Owners
from multimesh.passes.reading.inline_calls import inline_calls
from multimesh.stacked.row_blocks import spec_of_blocks


@dataclass(frozen=True, eq=False)
class Recent:
    """The arguments of the last call. If the next ones are alike, they need no new signature."""

    tree: Any
    static: tuple[Any, ...]
    context: Any
    traits: tuple[Any, ...]
    compiled: Any

    def fits(self, leaves: Sequence[Any], tree: Any, static: tuple[Any, ...], context: Any) -> bool:
        """Return whether a call has the same types, layouts and static arguments. Layouts are compared by identity."""
        if tree != self.tree or static != self.static or context != self.context:
            return False
        for leaf, (kind, sharding, shape, dtype, weak) in zip(leaves, self.traits, strict=True):
            if type(leaf) is not kind or leaf.shape != shape or leaf.dtype != dtype:
                return False
            if sharding is not None and (leaf.sharding is not sharding or getattr(leaf, "weak_type", False) != weak):
                return False
        return True


def traits(leaf: Any) -> tuple[Any, ...]:
    """Return the properties that `Recent` compares. A leaf that is no JAX or NumPy array never fits."""
    if isinstance(leaf, jax.Array):
        return type(leaf), leaf.sharding, leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    return (np.ndarray if type(leaf) is np.ndarray else None, None, np.shape(leaf), getattr(leaf, "dtype", None), False)


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced function: its `Call`, and the values of an enclosing transformation, which are its first arguments."""

    call: Call
    captured: list[Any]
    out_tree: Any
    devices: tuple[jax.Device, ...]
    defaults: dict[int, Mesh] = field(default_factory=dict)  # submesh of argument leaves that were given on none

    @functools.cached_property
    def erased(self) -> Any:
        """The traced function without layouts in its types, as the passes read it."""
        return self.call.closed if self.call.types is None else _compat.erase(self.call.closed)

    @functools.cached_property
    def _unowned(self) -> frozenset[int]:
        """Argument leaves that no task reads."""
        program = inline_calls(self.erased, self.devices)
        owners = Owners(program, (), {})
        return frozenset(i for i, v in enumerate(program.inputs) if not is_small(v) and not owners.tasks_on(v))

    def homes(self, meshes: Sequence[Mesh | None]) -> tuple[Mesh | None, ...]:
        """Return the meshes that leaves are given on, as far as these decide where anything runs."""
        homes = [mesh if i in self._unowned and mesh != self.defaults.get(i) else None for i, mesh in enumerate(meshes)]
        return tuple(homes) if any(mesh is not None for mesh in homes) else ()

    def bind(self, leaves: Sequence[Any]) -> Any:
        """Run the call, or let ``jax.grad``, ``jax.vmap`` and the like transform it."""
        arrays = [x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in (*self.captured, *leaves)]
        return jax.tree.unflatten(self.out_tree, self.call(*arrays))


@dataclass(eq=False)
class Cache:
    """The cache of one function under one set of ``jit`` arguments. It never refers to the function."""

    compiled: dict[Any, Any] = field(default_factory=dict)
    lowered: dict[Any, Any] = field(default_factory=dict)
    traces: dict[Any, Trace] = field(default_factory=dict)
    recent: Recent | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def matching(signature: Signature, functions: Mapping[Signature, Any]) -> Any | None:
    """Return the function that was compiled for this signature before its layouts, now given, were derived, if any."""
    for other, compiled in functions.items():
        lowered = getattr(compiled, "lowered", None)
        if lowered is None or replace(other, specs=signature.specs) != signature:
            continue
        derived = (None if s is None else spec_of_blocks(s) for s in lowered.input_shardings)
        specs = zip(signature.specs, other.specs, derived, strict=True)
        if all(now == then or (then is None and now == spec) for now, then, spec in specs):
            return compiled
    return None
