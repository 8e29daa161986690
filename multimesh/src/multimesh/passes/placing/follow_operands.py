"""The rule of placement: an operation outside of tasks runs where most of the bytes that it reads belong.

So a stage computes what belongs to it (the square of a weight, the moments of its gradient), and scalars travel.
Three kinds of operations go elsewhere:

* What floats (depends on arguments only) and is read by tasks runs where those are; see `owners`.
* A result at least twice as large as its operands (a broadcast scalar, a padded slice) is made where it is read.
* In a loop, what tasks wait for never turns back against the pipeline: that would add a stage. Gradients may go home.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.ir import graph
from multimesh.ir.primitives import is_small, lookup
from multimesh.passes.placing.minimize_transfers import Node, minimize_transfers
from multimesh.passes.placing.note_routes import position
from multimesh.passes.placing.owners import Owners, find_task_inputs

Homes = dict[ir.Value, Mesh]
Roots = dict[ir.Value, Mesh]  # the sources of a value that every reader recomputes; the value itself otherwise


@dataclass
class State:
    """The placement of values so far, in a program and its loops."""

    owners: Owners  # of floating values
    homes: Homes  # submesh of every other value
    pulls: Mapping[ir.Value, Mesh]  # what leads to a result that replaces an argument, to the owner of that
    roots: dict[ir.Value, Roots] = field(default_factory=dict)
    mixed: list[ir.Value] = field(default_factory=list)  # first results over several submeshes: a rewrite may cut them
    lost: list[ir.Value] = field(default_factory=list)  # results on the default submesh, since nothing says whose

    def roots_of(self, values: Iterable[ir.Value]) -> Roots:
        """Return the sources of values, each with its submesh. A value that may be anywhere has none."""
        roots: Roots = {}
        for v in values:
            if v in self.homes:
                roots[v] = self.homes[v]
            elif v in self.roots:
                roots |= self.roots[v]
            else:
                outer = self.owners.outside(v)
                if outer in self.homes:
                    roots[v] = self.homes[outer]
                elif outer in self.roots and outer is not v:
                    roots |= self.roots[outer]
                elif (owner := self.owners.of(v)) is not None:
                    roots[v] = owner
        return roots

    def largest(self, values: Iterable[ir.Value]) -> Mesh | None:
        """Return the submesh that owns the most bytes among the sources of values."""
        load: dict[Mesh, int] = collections.defaultdict(int)
        for v, mesh in self.roots_of(values).items():
            load[mesh] += v.nbytes
        return max(load, key=lambda mesh: (load[mesh], -self.owners.order.get(mesh, 0)), default=None)


class Follower:
    """A walk over operations in order that gives each a submesh: its task's, or the one that owns most operands."""

    def __init__(self, state: State, route: Sequence[Mesh] = ()):
        """Start a walk. ``route`` has the submesh of each stage of the loop whose body this is, if it is one."""
        self.items: list[ir.Item] = []
        self.anchored: dict[int, Mesh] = {}
        self._state, self._owners, self._homes = state, state.owners, state.homes
        self._route = tuple(route)
        self._way = self._route or tuple(self._owners.order)
        self._movable: set[int] = set()
        self._leading: set[ir.Value] = set()
        self._position: dict[ir.Value, int] = {}
        self._turned: set[ir.Value] = set()
        self.renamed: dict[ir.Value, ir.Atom] = {}
        self._read_on: dict[ir.Value, set[Mesh]] = collections.defaultdict(set)

    def run(self, items: Sequence[ir.Op]) -> Follower:
        """Place the operations of a program or of the body of a loop, in order."""
        self._leading = find_task_inputs(items) if self._route else set()
        self.expect(items)
        for op in items:
            self.follow(op)
        return self

    def expect(self, items: Iterable[ir.Item]) -> None:
        """Note which tasks use each value, before the walk."""
        for item in items:
            if isinstance(item, ir.Op) and item.task is not None:
                for v in item.reads:
                    self._read_on[v].add(item.task.mesh)

    def follow(self, op: ir.Op) -> None:
        """Place one operation."""
        op = graph.rename_op(op, self.renamed)
        if op.backward or any(v in self._turned for v in op.reads):
            self._turned.update(op.outs)
        if op.task is not None:
            self._anchor(op, op.task.mesh)
        elif op.prim is _compat.optimization_barrier_p and op.backward:
            self._split_barrier(op)
        else:
            self._unmarked(op)

    def near(self, mesh: Mesh) -> Mesh:
        """Return ``mesh``, or the first submesh of the loop if the loop never reaches it, so that it gets no stage."""
        return mesh if not self._route or mesh in self._route else self._route[0]

    def settle(self, awaited: Iterable[ir.Value] = (), pulled: Mapping[ir.Value, Mesh] = MappingProxyType({})) -> None:
        """Move operations where that saves a stage or a transfer, then ``pulled`` values to their submesh."""
        numbers: list[int] = []
        nodes: list[Node] = []
        for i, item in enumerate(self.items):
            if isinstance(item, ir.Op):
                item_nodes = [self._node(i, item)] if i in self.anchored else []
            else:
                item_nodes = list(self._parts(item))
            nodes += item_nodes
            numbers += [i] * len(item_nodes)
        nodes += [Node({v: mesh}, (), mesh) for v, mesh in pulled.items()]
        moved = minimize_transfers(nodes, self._route, awaited)
        for n, mesh in moved.items():
            self.anchored[numbers[n]] = mesh
            self._homes.update(dict.fromkeys(nodes[n].outs, mesh))
        for roots in self._state.roots.values() if moved else ():
            roots.update((v, self._homes[v]) for v in roots if v in self._homes)

    def _node(self, i: int, op: ir.Op) -> Node:
        reads = self._state.roots_of(op.reads)
        movable = i in self._movable
        staged = op.task is not None or movable or not self._owners.floating.issuperset(op.reads)
        return Node(reads, op.outs, self.anchored[i], movable, staged, op.backward, op.after)

    def _parts(self, loop: ir.Loop) -> Iterator[Node]:
        """Yield the reads and results of a placed loop on each submesh."""
        reads: dict[Mesh, Roots] = collections.defaultdict(dict)
        for op in loop.ops:
            for v in map(self._owners.outside, op.reads):
                if op.mesh is not None:
                    reads[op.mesh] |= self._state.roots_of([v])
        results = group((self._homes[o], o) for o in loop.outs)
        for mesh in dict.fromkeys((*reads, *results)):
            yield Node(reads[mesh], results[mesh], mesh)

    def _unmarked(self, op: ir.Op) -> None:
        floats = not op.effects and self._owners.floating.issuperset(op.reads)
        roots = self._state.roots_of(op.reads)
        # What is no smaller than its operands goes where it is used.
        keeps = not lookup(op).control and sum(o.aval.size for o in op.outs) >= sum(v.aval.size for v in roots)
        if op.prim.name == "concatenate" and _is_mixed(roots):
            self._state.mixed.append(op.outs[0])
        if any(o in self._owners.pinned for o in op.outs):
            self._anchor(op, self._owners.of(op.outs[0]) or self._way[0])
        elif floats and any(map(self._owners.tasks_on, op.outs)):
            home = self._owners.sliced_at_home(op)
            if home is not None and home == self.near(home):
                self._anchor(op, home)
            else:
                self._float(op, {o: mesh for o in op.outs if (mesh := self._owners.of(o)) is not None})
        elif (floats and (all(map(is_small, roots)) or keeps)) or self._spreads(op, roots, floats):
            self._float(op, roots)
        elif not roots:
            if op.effects:  # once, whoever reads it
                self._anchor(op, self.near(next(iter(self._owners.order))))
            else:
                self._float(op, {})
        elif op.prim.name == "cond" and not op.effects and len(set(roots.values())) > 1:
            self._conditional(op, roots)
        else:
            self._movable.add(len(self.items))
            self._anchor(op, self._home(op, roots))

    def _conditional(self, op: ir.Op, roots: Roots) -> None:
        """Cut a ``cond`` by the submeshes of its results. One that reads several submeshes is noted for a rewrite."""

        def home(reads: Iterable[ir.Value], out: ir.Value) -> Mesh:
            read_roots = self._state.roots_of(reads)
            if _is_mixed(read_roots) and op.outs[0] not in self._state.mixed:
                self._state.mixed.append(op.outs[0])
            return self._home(replace(op, outs=(out,)), read_roots or roots)  # its own size and pull, not those of all

        for part, mesh in _split(op, home):
            self._movable.add(len(self.items))
            self._anchor(part, mesh)

    def _spreads(self, op: ir.Op, roots: Roots, floats: bool) -> bool:
        """Return whether the sources of a result have at most half of its bytes."""
        if op.effects or lookup(op).control or not (floats or lookup(op).spreads):
            return False
        return 0 < 2 * sum(v.nbytes for v in roots) <= sum(o.nbytes for o in op.outs)

    def _home(self, op: ir.Op, roots: Roots) -> Mesh:
        """Return the submesh that owns most bytes of an operation's roots; of equal ones its reader's, or the last."""
        load: dict[Mesh, int] = collections.defaultdict(int)
        furthest: dict[Mesh, int] = collections.defaultdict(int)
        for v, mesh in self._without_turns(op, {v: self.near(mesh) for v, mesh in roots.items()}).items():
            load[mesh] += v.nbytes
            furthest[mesh] = max(furthest[mesh], self._at(op, v))
        pull = next((self._state.pulls[o] for o in op.outs if o in self._state.pulls), None)
        if pull is not None and len(op.outs) == 1 and max(load.values()) < op.outs[0].nbytes:
            return pull  # no submesh has as much of it as it makes: gradients of a stack's slices, added
        return max(load, key=lambda mesh: (load[mesh], mesh == pull, furthest[mesh], -self._owners.order.get(mesh, 0)))

    def _without_turns(self, op: ir.Op, roots: Roots) -> Roots:
        """Return the roots that an operation may follow in a loop without adding a turn through the submeshes."""
        positioned = {v: mesh for v, mesh in roots.items() if v in self._position}
        heavy = any(not is_small(v) for v in roots if v not in positioned) and all(map(is_small, positioned))
        if not self._route or not positioned or heavy or (self._is_back(op) and self._leading.isdisjoint(op.outs)):
            return roots
        base, count = self._base(op, positioned), len(set(self._route))
        return {v: m for v, m in positioned.items() if self._next(op, m, base) // count == base // count} or roots

    def _is_back(self, op: ir.Op) -> bool:
        return any(o in self._turned for o in op.outs)

    def _at(self, op: ir.Op, value: ir.Value) -> int:
        """Return the position of an operand in the pipeline. The backward pass begins with forward values at hand."""
        return self._position.get(value, 0) if (value in self._turned) == self._is_back(op) else 0

    def _base(self, op: ir.Op, values: Iterable[ir.Value]) -> int:
        return max((self._at(op, v) for v in values), default=0)

    def _next(self, op: ir.Op, mesh: Mesh, base: int) -> int:
        """Return the first position of a submesh that is not before ``base``."""
        if mesh not in self._way:
            return base
        return position(self._way[::-1] if self._is_back(op) else self._way, mesh, base)

    def _float(self, op: ir.Op, roots: Roots) -> None:
        self.items.append(op)
        self._state.roots.update((o, roots) for o in op.outs)

    def _anchor(self, op: ir.Op, mesh: Mesh) -> None:
        self.anchored[len(self.items)] = mesh
        self.items.append(op)
        position = self._next(op, mesh, self._base(op, self._state.roots_of(op.reads)))
        for o in op.outs:
            self._homes[o] = mesh
            self._position[o] = position

    def _split_barrier(self, op: ir.Op) -> None:
        """Split a barrier by submesh: that of the only user of the tied value, else that of its producer.

        Inputs that are nowhere yet pass through, those of other submeshes only order.
        """
        groups: dict[Mesh, list[tuple[ir.Value, ir.Value]]] = collections.defaultdict(list)
        for operand, tied in zip(op.ins, op.outs, strict=True):
            if isinstance(operand, ir.Value) and operand in self._homes:
                read_on = self._read_on[tied]
                groups[next(iter(read_on)) if len(read_on) == 1 else self._homes[operand]].append((operand, tied))
            else:
                self.renamed[tied] = operand
        placed = [v for v in op.reads if v in self._homes]
        for mesh, pairs in groups.items():
            ins, outs = zip(*pairs, strict=True)
            others = tuple(v for v in placed if self._homes[v] != mesh)
            self._movable.add(len(self.items))
            self._anchor(replace(op, ins=tuple(ins), outs=tuple(outs), after=others), mesh)


def _is_mixed(roots: Roots) -> bool:
    return len({mesh for v, mesh in roots.items() if not is_small(v)}) > 1


def _split(op: ir.Op, home: Callable[[Iterable[ir.Value], ir.Value], Mesh]) -> list[tuple[ir.Op, Mesh]]:
    """Cut an unmarked ``cond``, as that of ``optax.MultiSteps``, by the submeshes (``home``) of its results."""
    branches = op.params["branches"]
    groups: dict[Mesh, list[int]] = collections.defaultdict(list)
    for i in range(len(op.outs)):
        _, reads = _compat.dce(branches, [j == i for j in range(len(op.outs))])
        operands = ir.values((*itertools.compress(op.ins[1:], reads), op.ins[0]))
        groups[home(operands, op.outs[i])].append(i)
    if len(groups) == 1:
        return [(op, next(iter(groups)))]
    parts = []
    for where, results in groups.items():
        cut, reads = _compat.dce(branches, [j in results for j in range(len(op.outs))])
        ins = (op.ins[0], *itertools.compress(op.ins[1:], reads))
        outs = tuple(op.outs[j] for j in results)
        parts.append((replace(op, params={**op.params, "branches": cut}, ins=ins, outs=outs), where))
    return parts
