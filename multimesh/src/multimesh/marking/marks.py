"""Marks in a jaxpr for the passes: tasks, constraints and microbatch loops.

A mark is an inner ``jax.jit`` (or a named scope). Its name has a reserved prefix and ends in the digest of a frozen
description. A mark computes nothing, and survives ``grad``, ``vmap``, ``remat`` and ``scan``. So the function also runs
under plain ``jax.jit``.
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


class MarkTable(Generic[T]):
    """The descriptions behind marks, by their digest. The name of a mark is the same in every process."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._names: dict[T, str] = {}
        self._items: dict[str, T] = {}
        self._lock = threading.Lock()

    def name(self, item: T, suffix: str = "") -> str:
        """Return the reserved name of a mark for ``item``."""
        with self._lock:
            if item not in self._names:
                short = hashlib.sha256(text(item).encode()).hexdigest()[:12]
                while short in self._items:  # taken by another item with the same text
                    short += "x"
                self._names[item], self._items[short] = short, item
            return f"{self.prefix}{self._names[item]}{suffix}"

    def find(self, name: str) -> T | None:
        """Return the description behind the name of a mark, or None for any other name."""
        if not name.startswith(self.prefix):
            return None
        return self._items[name.removeprefix(self.prefix).partition(":")[0]]


TASKS: MarkTable[Placement] = MarkTable("multimesh.task:")
CONSTRAINTS: MarkTable[tuple[PartitionSpec, int]] = MarkTable("multimesh.constraint:")  # spec and rank
LOOPS: MarkTable[LoopMark] = MarkTable("multimesh.loop:")
BACKWARD = "multimesh.backward"  # scope around a task whose operations are of the backward pass, whatever made them
BODY = "multimesh.body"  # name of the inner jit that is the body of a microbatch loop
_loop_uid = itertools.count()


def loop_name(mark: LoopMark) -> str:
    """Return a name for one microbatch loop. Its forward and its backward pass both carry it."""
    return LOOPS.name(mark, f":{next(_loop_uid)}")
