"""Marks that tracing leaves in a jaxpr for the partitioner: tasks, constraints and microbatch loops.

A mark is an inner ``jax.jit`` (or a named scope) whose name starts with a reserved prefix and ends in the digest of an
interned, immutable description. Such a mark is the identity in meaning and survives ``grad``, ``vmap``, ``remat`` and
``scan``, so the same function also runs under plain ``jax.jit``.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from jax.sharding import PartitionSpec

from multimesh.core.stable import text
from multimesh.core.submesh import Placement
from multimesh.ir.program import LoopMark

T = TypeVar("T", bound=Hashable)


class Interned(Generic[T]):
    """Descriptions that marks refer to by a digest: names of marks in programs are the same in every process."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._names: dict[T, str] = {}
        self._items: dict[str, T] = {}
        self._lock = threading.Lock()

    def name(self, item: T, suffix: str = "") -> str:
        """Reserved name of a mark that stands for ``item``."""
        with self._lock:
            if item not in self._names:
                short = hashlib.sha256(text(item).encode()).hexdigest()[:12]
                while short in self._items:  # of another, which reads the same
                    short += "x"
                self._names[item], self._items[short] = short, item
            return f"{self.prefix}{self._names[item]}{suffix}"

    def find(self, name: str) -> T | None:
        """Description behind a mark's name, or None for any other name."""
        if not name.startswith(self.prefix):
            return None
        return self._items[name.removeprefix(self.prefix).partition(":")[0]]


TASKS: Interned[Placement] = Interned("multimesh.task:")
CONSTRAINTS: Interned[tuple[PartitionSpec, int]] = Interned("multimesh.constraint:")  # spec and rank
LOOPS: Interned[LoopMark] = Interned("multimesh.loop:")
BODY = "multimesh.body"  # name of the inner jit that is the body of a microbatch loop
_loop_uid = itertools.count()


def loop_name(mark: LoopMark) -> str:
    """Name of one microbatch loop; the forward and backward pass of that loop carry the same name."""
    return LOOPS.name(mark, f":{next(_loop_uid)}")
