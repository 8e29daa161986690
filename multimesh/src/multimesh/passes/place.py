"""Placement: every operation gets a submesh.

Marked operations are where their task is. Unmarked ones follow their operands. What depends on inputs only is cloned
to each submesh that reads it, so that nothing is sent that can be computed on the spot.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import _compat, ir
from multimesh.errors import MultiMeshError
from multimesh.passes.conditionals import split
from multimesh.submesh import Task

Homes = dict[ir.Value, Mesh]


def place(program: ir.Program, default: Mesh | None = None) -> tuple[ir.Program, Homes]:
    """Place a program.

    Parameters
    ----------
    program
        With loops in final form.
    default
        The submesh of outputs that depend on inputs only; by default the first task's. Of everything where nothing is a
        task.

    Returns
    -------
    Program, dict
        All operations placed, and the submesh of every value that an operation or loop makes.

    Raises
    ------
    MultiMeshError
        When nothing in the program is a task and there is no ``default``.
    """
    program = replace(program, items=tuple(_resolve_constraints(program)))
    order = task_meshes(program) or ((default,) if default is not None else ())
    if not order:
        raise MultiMeshError("nothing in this function is a task; wrap parts of it in multimesh.task(..., mesh=...)")
    default = default or order[0]
    homes: Homes = {}
    rows = {v for i in program.items if isinstance(i, ir.Loop) for v in i.linked.values()}
    moved: dict[ir.Value, ir.Value] = {}
    items = [_place_loop(i, default, homes, order, rows, moved) if isinstance(i, ir.Loop) else i for i in program.items]
    walked = _Follower(homes, order, _by_size).run(items)
    outputs = tuple(walked.output(o) for o in program.outputs)
    placed, outputs = _clone_floating(walked.items, walked.anchored, homes, outputs, default)
    return replace(program, items=tuple(placed), outputs=outputs), homes


def has_tasks(program: ir.Program) -> bool:
    """Whether anything in the program is marked."""
    return any(op.task is not None for op in _all_ops(program))


def task_meshes(program: ir.Program) -> tuple[Mesh, ...]:
    """Submeshes of the tasks of a program, in the order of their first forward use."""
    ops = sorted(_all_ops(program), key=lambda op: op.backward)
    return tuple(dict.fromkeys(op.task.mesh for op in ops if op.task is not None))


def _all_ops(program: ir.Program) -> Iterable[ir.Op]:
    for item in program.items:
        yield from item.ops if isinstance(item, ir.Loop) else (item,)


def _resolve_constraints(program: ir.Program) -> list[ir.Item]:
    """Logical constraints outside tasks become one constraint per consuming task (else the producing task's)."""

    def resolve(ops: Sequence[ir.Item]) -> list[ir.Item]:
        if not any(isinstance(i, ir.Op) and "logical" in i.params and i.task is None for i in ops):
            return list(ops)
        producer = {o: i for i in ops if isinstance(i, ir.Op) for o in i.outs}
        rename: dict[tuple[ir.Value, Task | None], ir.Value] = {}
        out: list[ir.Item] = []
        readers: dict[ir.Value, dict[Task, None]] = collections.defaultdict(dict)
        for item in ops:
            if isinstance(item, ir.Op) and item.task is not None:
                for v in item.reads:
                    readers[v][item.task] = None
        for item in ops:
            if not isinstance(item, ir.Op):
                out.append(item)
                continue
            item = replace(item, ins=tuple(_seen_by(i, item.task, rename) for i in item.ins))
            if "logical" not in item.params or item.task is not None:
                out.append(item)
                continue
            made_by = producer.get(item.ins[0]) if isinstance(item.ins[0], ir.Value) else None
            tasks = list(readers[item.outs[0]]) or ([made_by.task] if made_by is not None and made_by.task else [])
            if not tasks and not item.backward:
                raise MultiMeshError(
                    f"{_compat.user_line(item.source)}: with_sharding_constraint({item.params['logical']}) outside a "
                    "task, and no task beside it reads or makes the value; constrain it inside a task"
                )
            if not readers[item.outs[0]]:
                params = item.params if tasks else {"identity": True}
                out.append(replace(item, task=tasks[0] if tasks else None, params=params))
                continue
            for task in tasks:
                made = ir.Value(item.outs[0].aval)
                out.append(replace(item, task=task, outs=(made,)))
                rename[item.outs[0], task] = made
            out.append(replace(item, params={"identity": True}))  # for readers outside tasks
        return out

    items = [replace(i, ops=_only_ops(resolve(i.ops))) if isinstance(i, ir.Loop) else i for i in program.items]
    return resolve(items)


def _only_ops(items: Iterable[ir.Item]) -> tuple[ir.Op, ...]:
    return tuple(item for item in items if isinstance(item, ir.Op))


def _seen_by(atom: ir.Atom, task: Task | None, rename: dict[tuple[ir.Value, Task | None], ir.Value]) -> ir.Atom:
    if not isinstance(atom, ir.Value):
        return atom
    return rename.get((atom, task), atom)


def _by_size(value: ir.Value, depth: int) -> tuple[int, int]:
    """Straight code follows its largest operand, so that optimizer states stay where they are."""
    return value.nbytes, depth


def _by_depth(value: ir.Value, depth: int) -> tuple[int, int]:
    """Loop bodies follow the operand that is furthest along the pipeline."""
    return depth, value.nbytes


class _Follower:
    """Walks items in order and gives each a submesh: its task's, or that of the operand that ranks first."""

    def __init__(self, homes: Homes, order: Sequence[Mesh], rank: Callable[[ir.Value, int], tuple[int, int]]):
        self.homes = homes
        self.items: list[ir.Item] = []
        self.anchored: dict[int, Mesh] = {}
        self._order = {mesh: i for i, mesh in enumerate(order)}
        self._rank = rank
        self._depth: dict[ir.Value, int] = {}
        self._rename: dict[ir.Value, ir.Value] = {}
        self._read_on: dict[ir.Value, set[Mesh]] = collections.defaultdict(set)

    def run(self, items: Sequence[ir.Item]) -> _Follower:
        for item in items:
            if isinstance(item, ir.Op) and item.task is not None:
                for v in item.reads:
                    self._read_on[v].add(item.task.mesh)
        for item in items:
            if isinstance(item, ir.Loop):
                self.items.append(item)
                continue
            op = replace(item, ins=tuple(self._rename.get(i, i) if isinstance(i, ir.Value) else i for i in item.ins))
            known = [v for v in op.reads if v in self.homes]
            if op.prim is _compat.optimization_barrier_p and op.task is None and op.backward:
                self._split_barrier(op, known)
            elif op.task is not None:
                self._anchor(op, op.task.mesh, known)
            elif op.prim.name == "cond" and len({self.homes[v] for v in known}) > 1 and not op.effects:
                for part, mesh in split(op, functools.partial(self._home, otherwise=known)):
                    self._anchor(part, mesh, [v for v in part.reads if v in self.homes])
            elif known:
                self._anchor(op, self._home(op.reads, known), known)
            elif op.effects:  # once, whoever reads it
                self._anchor(op, next(iter(self._order)), known)
            else:
                self.items.append(op)
        return self

    def _home(self, reads: Iterable[ir.Value], otherwise: Sequence[ir.Value]) -> Mesh:
        """Submesh of the operand that ranks first among those that are placed."""
        return self.homes[max([v for v in reads if v in self.homes] or otherwise, key=self._key)]

    def _key(self, value: ir.Value) -> tuple[int, int, int]:
        return (*self._rank(value, self._depth.get(value, 0)), -self._order.get(self.homes[value], 0))

    def _anchor(self, op: ir.Op, mesh: Mesh, known: Sequence[ir.Value]) -> None:
        self.anchored[len(self.items)] = mesh
        self.items.append(op)
        depth = max((self._depth.get(v, 0) + (self.homes[v] != mesh) for v in known), default=0)
        for o in op.outs:
            self.homes[o] = mesh
            self._depth[o] = depth

    def _split_barrier(self, op: ir.Op, known: Sequence[ir.Value]) -> None:
        """One barrier per submesh: where the tied value is read, if that is one submesh, else where it is made.

        Inputs that are nowhere yet pass through, those of other submeshes only order.
        """
        groups: dict[Mesh, list[tuple[ir.Value, ir.Value]]] = collections.defaultdict(list)
        for given, tied in zip(op.ins, op.outs, strict=True):
            if isinstance(given, ir.Value) and given in self.homes:
                read_on = self._read_on[tied]
                groups[next(iter(read_on)) if len(read_on) == 1 else self.homes[given]].append((given, tied))
            else:
                self._rename[tied] = given
        for mesh, pairs in groups.items():
            ins, outs = zip(*pairs, strict=True)
            others = tuple(v for v in known if self.homes[v] != mesh)
            self._anchor(replace(op, ins=tuple(ins), outs=tuple(outs), after=others), mesh, known)

    def output(self, atom: ir.Atom) -> ir.Atom:
        """What a result is called after barriers were split."""
        return self._rename.get(atom, atom) if isinstance(atom, ir.Value) else atom


def _place_loop(
    loop: ir.Loop,
    default: Mesh,
    outer: Homes,
    order: Sequence[Mesh],
    rows: set[ir.Value],
    moved: dict[ir.Value, ir.Value],
) -> ir.Loop:
    """Place a loop's body; ``moved`` follows the ``rows`` that later loops are linked to when they are cloned."""
    loop = replace(loop, linked={k: moved.get(v, v) for k, v in loop.linked.items()})
    homes: Homes = {inner: outer[row] for inner, row in loop.linked.items() if row in outer}
    walked = _Follower(homes, order, _by_depth).run(loop.ops)
    given = [o for op in loop.ops for o in op.outs if o in rows]
    wanted = tuple(walked.output(a) for a in (*loop.leaves, *given))
    states = {walked.output(c.leaf) for c in loop.carries.values()}
    placed, results = _clone_floating(walked.items, walked.anchored, homes, wanted, default, states)
    sums = tuple(replace(s, leaf=r) for s, r in zip(loop.sums, results, strict=False))
    stacks = dict(zip(loop.stacks, results[len(sums) :], strict=False))
    left = results[len(sums) + len(stacks) :]
    carries = {k: replace(c, leaf=r) for (k, c), r in zip(loop.carries.items(), left, strict=False)}
    moved.update(zip(given, left[len(carries) :], strict=True))
    for s in sums:
        outer[s.out] = _home(s.leaf, homes, default)
    for o, inner in stacks.items():
        outer[o] = _home(inner, homes, default)
    for c in carries.values():
        outer[c.out] = _home(c.leaf, homes, default)
    ops = _only_ops(placed)
    outer.update({o: homes[o] for op in ops for o in op.outs})  # rows for linked loops
    return replace(loop, ops=ops, sums=sums, stacks=stacks, carries=carries)


def _home(atom: ir.Atom, homes: Homes, default: Mesh) -> Mesh:
    return homes.get(atom, default) if isinstance(atom, ir.Value) else default


def _clone_floating(
    items: Sequence[ir.Item],
    anchored: dict[int, Mesh],
    homes: Homes,
    outputs: tuple[ir.Atom, ...],
    default: Mesh,
    states: Collection[ir.Atom] = (),
) -> tuple[list[ir.Item], tuple[ir.Atom, ...]]:
    """Copy what depends on inputs only to every submesh that reads it; what only outputs read goes to ``default``.

    Of the copies of outputs among ``states`` the first that is read is the output, so that no iteration waits for it.
    """
    needed: dict[ir.Value, dict[Mesh, None]] = collections.defaultdict(dict)
    floating = [i for i, item in enumerate(items) if isinstance(item, ir.Op) and i not in anchored]
    made_floating = {o for i in floating for o in items[i].outs}
    on: dict[int, dict[Mesh, None]] = {}
    for i in reversed(range(len(items))):
        item = items[i]
        if isinstance(item, ir.Loop):
            for value, mesh in _loop_needs(item, default):
                needed[value][mesh] = None
            continue
        if i in anchored:
            on[i] = {anchored[i]: None}
        else:
            on[i] = {m: None for o in item.outs for m in needed[o]}
            if not on[i]:
                on[i] = {default: None}
        for v in item.reads:
            needed[v].update(on[i])
    copy: dict[tuple[ir.Value, Mesh], ir.Value] = {}
    placed: list[ir.Item] = []
    for i, item in enumerate(items):
        if isinstance(item, ir.Loop):
            placed.append(_read_copies(item, copy, made_floating, default))
            continue
        for mesh in reversed(on[i]):  # the walk above met the last reader first
            ins = tuple(copy.get((v, mesh), v) if isinstance(v, ir.Value) else v for v in item.ins)
            outs = item.outs
            if i not in anchored:
                outs = tuple(ir.Value(o.aval) for o in item.outs)
                copy.update({(o, mesh): new for o, new in zip(item.outs, outs, strict=True)})
                homes.update(dict.fromkeys(outs, mesh))
            placed.append(replace(item, mesh=mesh, ins=ins, outs=outs))
    for state in states:
        needed[state] = dict(reversed(needed[state].items()))
    return placed, tuple(_copy_for_output(o, copy, needed, default) for o in outputs)


def _copy_for_output(
    atom: ir.Atom,
    copy: dict[tuple[ir.Value, Mesh], ir.Value],
    needed: dict[ir.Value, dict[Mesh, None]],
    default: Mesh,
) -> ir.Atom:
    if not isinstance(atom, ir.Value):
        return atom
    for mesh in (*needed[atom], default):
        if (atom, mesh) in copy:
            return copy[atom, mesh]
    return next((made for (value, _), made in copy.items() if value is atom), atom)


def _loop_needs(loop: ir.Loop, default: Mesh) -> Iterable[tuple[ir.Value, Mesh]]:
    """Outer values that a placed loop reads, each with the submesh that reads it."""
    for op in loop.ops:
        for v in op.reads:
            outer = loop.consts.get(v, loop.slices.get(v))
            if isinstance(outer, ir.Value) and op.mesh is not None:
                yield outer, op.mesh
    for c in loop.carries.values():
        yield c.init, _made_on(loop)[c.leaf]
    for atom in (*(s.leaf for s in loop.sums), *loop.stacks.values()):
        outer = loop.consts.get(atom, loop.slices.get(atom)) if isinstance(atom, ir.Value) else None
        if isinstance(outer, ir.Value):
            yield outer, default


def _made_on(loop: ir.Loop) -> dict[ir.Value, Mesh]:
    """Submeshes of the values that a placed loop makes."""
    return {o: op.mesh for op in loop.ops for o in op.outs if op.mesh is not None}


def _read_copies(
    loop: ir.Loop, copy: dict[tuple[ir.Value, Mesh], ir.Value], floating: set[ir.Value], default: Mesh
) -> ir.Loop:
    """Make each submesh's operations read that submesh's copy of an outer value."""
    consts: dict[ir.Value, ir.Atom] = {}
    slices: dict[ir.Value, ir.Value] = {}
    inner_copy: dict[tuple[ir.Value, Mesh], ir.Value] = {}

    def localised(v: ir.Atom, mesh: Mesh) -> ir.Atom:
        if not isinstance(v, ir.Value):
            return v
        for table, new in ((loop.consts, consts), (loop.slices, slices)):
            if v not in table:
                continue
            outer = table[v]
            if outer not in floating:
                new[v] = outer
                return v
            if (v, mesh) not in inner_copy:
                inner_copy[v, mesh] = ir.Value(v.aval)
                new[inner_copy[v, mesh]] = copy[outer, mesh]
            return inner_copy[v, mesh]
        return v

    ops = tuple(replace(op, ins=tuple(localised(i, op.mesh) for i in op.ins)) for op in loop.ops if op.mesh is not None)
    sums = tuple(replace(s, leaf=localised(s.leaf, default)) for s in loop.sums)
    stacks = {o: localised(i, default) for o, i in loop.stacks.items()}
    made_on = _made_on(loop)
    carries = {k: replace(c, init=copy.get((c.init, made_on[c.leaf]), c.init)) for k, c in loop.carries.items()}
    return replace(loop, ops=ops, consts=consts, slices=slices, sums=sums, stacks=stacks, carries=carries)
