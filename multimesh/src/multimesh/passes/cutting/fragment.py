"""Cuts operations into fragments: those of one submesh at one dataflow level, each compiled as one kernel.

The level of an operation says how often its data changed submesh, or turned from the forward to the backward pass. So
fragments never wait for each other in a circle.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core.grouping import grouped
from multimesh.errors import internal_error


@dataclass(frozen=True, eq=False)
class Fragment:
    """One kernel of a submesh. In a microbatch loop it has a ``phase``, F, B or W, and the number of its ``stage``."""

    mesh: Mesh
    phase: str | None
    level: int
    ops: tuple[ir.Op, ...]
    ins: tuple[ir.Value, ...] = ()
    outs: tuple[ir.Value, ...] = ()
    stage: int | None = None

    @functools.cached_property
    def task(self) -> str:
        """Names of the tasks inside, in order."""
        return "+".join(dict.fromkeys(op.task.name for op in self.ops if op.task is not None))

    @functools.cached_property
    def made(self) -> set[ir.Value]:
        """Values that its operations make."""
        return {o for op in self.ops for o in op.outs}

    @property
    def after(self) -> set[ir.Value]:
        """Values that must exist before it runs although it does not read them."""
        return {v for op in self.ops for v in op.after}

    @property
    def needs(self) -> Iterator[ir.Value]:
        """Values that must exist before it runs."""
        return itertools.chain(self.ins, self.after)

    def __str__(self) -> str:
        head = f"{self.phase or '-'} level {self.level} {self.task or 'unmarked'} @{self.mesh.devices.flat[0]}"
        names = f"({' '.join(map(str, self.ins))}) -> ({' '.join(map(str, self.outs))})"
        return "\n".join([f"{head} {names}", *(f"  {op}" for op in self.ops)])


_Key = tuple[Mesh, str | None, int]


def fragment(ops: Sequence[ir.Op], results: Iterable[ir.Atom], *, phased: bool) -> tuple[Fragment, ...]:
    """Cut placed operations into fragments, ordered by level, the forward before the backward.

    ``results`` are read outside; with ``phased``, in a loop, forward and backward pass go into different fragments.
    """
    results = set(ir.values(results))
    keys = _keys(ops, phased)
    groups = grouped((key, i) for i, key in enumerate(keys))
    _coalesce(ops, groups)
    ordered = sorted(groups.items(), key=lambda item: (item[0][1] == "B", item[0][2], item[1][0]))
    made = tuple(Fragment(*key, tuple(ops[i] for i in sorted(indices))) for key, indices in ordered)
    return with_interfaces(made, results)


def _keys(ops: Sequence[ir.Op], phased: bool) -> list[_Key]:
    """Submesh, phase and level of each operation.

    What depends on inputs only (a cast of a weight) joins the first fragment of its submesh that reads it, a forward
    one if there is any: so no forward fragment ever waits for a backward one.
    """
    maker = {o: i for i, op in enumerate(ops) for o in op.outs}
    readers: dict[int, list[int]] = collections.defaultdict(list)
    keys: list[_Key] = []
    source: list[bool] = []
    for i, op in enumerate(ops):
        if op.mesh is None:
            raise internal_error(f"unplaced operation {op}")
        before = sorted({maker[v] for v in op.needs if v in maker})
        for j in before:
            readers[j].append(i)
        back = phased and (op.backward or any(keys[j][1] == "B" for j in before))
        phase = ("B" if back else "F") if phased else None
        local = [source[j] and ops[j].mesh == op.mesh for j in before]
        source.append(all(local) and not op.effects)
        levels = [
            keys[j][2] + (keys[j][:2] != (op.mesh, phase)) for j, near in zip(before, local, strict=True) if not near
        ]
        keys.append((op.mesh, phase, max(levels, default=0)))
    for i in reversed(range(len(ops))):
        if source[i] and readers[i] and all(ops[j].mesh == ops[i].mesh for j in readers[i]):
            keys[i] = min((keys[j] for j in readers[i]), key=lambda key: (key[1] == "B", key[2]))
    return keys


def _coalesce(ops: Sequence[ir.Op], groups: dict[_Key, list[int]]) -> None:
    """Join a fragment that only later fragments of its submesh and phase read to the first of those."""
    group_of = {i: key for key, indices in groups.items() for i in indices}
    maker = {o: i for i, op in enumerate(ops) for o in op.outs}
    readers: dict[_Key, set[_Key]] = collections.defaultdict(set)
    for i, op in enumerate(ops):
        for v in op.needs:
            if v in maker and group_of[maker[v]] != group_of[i]:
                readers[group_of[maker[v]]].add(group_of[i])
    for key in sorted(groups, key=lambda key: -key[2]):
        to = readers[key]
        if to and all(other[:2] == key[:2] for other in to):
            target = min(to, key=lambda other: other[2])
            groups[target] += groups.pop(key)
            readers[target] |= to - {target}
            for others in readers.values():
                if key in others:
                    others.discard(key)
                    others.add(target)
            readers[target].discard(target)


def with_interfaces(fragments: Sequence[Fragment], results: set[ir.Value]) -> tuple[Fragment, ...]:
    """Drop operations that nobody needs and fill in what each fragment reads and gives."""
    wanted = set(results)
    kept: list[Fragment] = []
    for part in reversed(fragments):
        ops = tuple(ir.live(part.ops, wanted))
        if ops:
            made = {o for op in ops for o in op.outs}
            ins = dict.fromkeys(v for op in ops for v in op.reads if v not in made)
            outs = dict.fromkeys(o for op in ops for o in op.outs if o in wanted)
            kept.append(replace(part, ops=ops, ins=tuple(ins), outs=tuple(outs)))
            wanted.update(v for op in ops for v in op.needs if v not in made)
    return tuple(reversed(kept))
