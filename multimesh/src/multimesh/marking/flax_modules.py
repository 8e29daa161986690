"""Flax modules as tasks and as arguments. Flax is imported only if the user did."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from multimesh.errors import UsageError

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _flax(name: str) -> Any:
    return sys.modules.get(f"flax.{name}")


def with_call(module: Any, wrap: Wrap) -> Any | None:
    """Return the Flax module with its ``__call__`` wrapped, or None if ``module`` is no Flax module.

    Class name, fields and parameters stay, so parent modules and checkpoints still fit. The result is a copy, except
    for a linen module that a parent has adopted already (as in ``@nn.compact``).
    """
    linen, nnx = _flax("linen"), _flax("nnx")
    if linen is not None and isinstance(module, linen.Module):
        cls = subclass(type(module), wrap)
        if module.parent is None:
            fields = {f.name for f in dataclasses.fields(module) if f.init} - {"parent", "name"}
            named = {} if module.name is None else {"name": module.name}
            return cls(**{name: getattr(module, name) for name in fields}, **named)
        object.__setattr__(module, "__class__", cls)
        return module
    if nnx is not None and isinstance(module, nnx.Module):
        twin = copy.copy(module)
        twin.__class__ = subclass(type(module), wrap)
        return twin
    return None


def subclass(cls: type, wrap: Wrap) -> type:
    """Return a subclass of the same name whose ``__call__`` is wrapped."""
    body = {"__call__": wrap(cls.__call__), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), body)


@contextlib.contextmanager
def refuse_changes(caller: Callable[[], str], args: Any) -> Iterator[None]:
    """Refuse changes of NNX objects among a traced function's arguments: they change copies, and would be lost.

    Raises ``UsageError`` if an object has other arrays at the end than at the beginning.
    """
    before = _variables(args)
    yield
    now = _variables(args) if before else {}
    changed = next((name for name in {**before, **now} if before.get(name) is not now.get(name)), None)
    if changed is not None:
        raise UsageError(
            f"{caller()} changes {changed[1]} of a Flax NNX object among its arguments, and this change is lost, as "
            "under jax.jit; give its state (nnx.split) as an argument, nnx.merge it inside, and return the new state"
        )


def _variables(args: Any) -> dict[tuple[int, str], Any]:
    """Return the arrays of the NNX objects in a pytree, by the number of the object and their paths."""
    nnx = _flax("nnx")
    if nnx is None:
        return {}
    leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    objects = [x for x in leaves if isinstance(x, nnx.Pytree)]
    return {
        (number, f"{type(x).__name__}{jax.tree_util.keystr(path)}"): leaf
        for number, x in enumerate(objects)
        for path, leaf in jax.tree.leaves_with_path(x)
    }
