"""A submesh for every operation.

Operations of a task run where the task is, others where most of what they read belongs (`follow_operands`). What
depends on inputs only is cloned to each submesh whose tasks read it. A result that replaces an argument ends where that
belongs.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.grouping import group
from multimesh.core.submesh import Placement
from multimesh.errors import MultiMeshError
from multimesh.ir import graph
from multimesh.ir.primitives import is_small
from multimesh.ir.program import task_meshes
from multimesh.passes.placing.follow_operands import Follower, Homes, State
from multimesh.passes.placing.note_routes import order_submeshes
from multimesh.passes.placing.owners import Owners

Moves = dict[ir.Value, ir.Value]


def place_operations(program: ir.Program, replaced: Mapping[int, int] | None = None) -> ir.Program:
    """Place all operations of a program, and note the ``homes`` of values. Without tasks, all is on its ``home``."""
    program = replace(program, items=tuple(_resolve_constraints(program)))
    order = tuple(dict.fromkeys((*task_meshes(program), *program.input_homes.values())))
    order = order or ((program.home,) if program.home is not None else ())
    if not order:
        raise MultiMeshError("nothing in this function is a task; wrap parts of it in multimesh.task(..., mesh=...)")
    homes: Homes = {}
    tried: set[ir.Value] = set()
    while True:
        placed, state = _place_once(program, order, replaced or {}, homes)
        mixed = [v for v in state.mixed if v not in tried]
        if mixed:
            from multimesh.stacked.piecewise import in_pieces

            program, done = in_pieces(program, mixed)
            tried |= done
            continue
        readers = {} if homes else state.owners.readers(placed)
        homeless = any(len(on) > 1 and state.owners.of(v) is None for v, on in readers.items())
        if homes or not (homeless or state.lost):
            return replace(placed, homes=state.homes)
        homes = state.homes  # once more, now that the readers of all arguments are known


def _place_once(
    program: ir.Program, order: Sequence[Mesh], replaced: Mapping[int, int], earlier_homes: Homes
) -> tuple[ir.Program, State]:
    default = order[0]
    owners = Owners(program, order, earlier_homes)
    result_homes = {
        i: mesh
        for i, arg in replaced.items()
        if (mesh := owners.of(value := program.inputs[arg])) and (value in owners.pinned or not is_small(value))
    }
    state = State(owners, {}, _pulls(program, result_homes))
    rows = program.linked
    moved: Moves = {}
    walked = Follower(state)
    walked.expect(program.items)
    for item in program.items:
        if isinstance(item, ir.Op):
            walked.follow(item)
        else:
            loop = graph.rename_loop(item, walked.renamed)
            walked.items.append(_place_loop(loop, state, default, rows, moved))
    results = [graph.resolve(o, walked.renamed) for o in program.outputs]
    destinations = {v: mesh for i, mesh in result_homes.items() for v in ir.values([results[i]])}
    walked.settle(pulled=destinations)
    items, outputs = _clone_floating(walked, state, tuple(results), destinations, default)
    homes = state.homes
    finals = list(outputs)
    for i, mesh in result_homes.items():
        v = finals[i]
        if isinstance(v, ir.Value) and homes.get(v, mesh) != mesh:  # computed elsewhere, it still ends at home
            finals[i] = ir.Value(v.aval)
            homes[finals[i]] = mesh
            items.append(ir.Op(_compat.copy_p, {}, (v,), (finals[i],), mesh=mesh))
    return replace(program, items=tuple(items), outputs=tuple(finals)), state


def _pulls(program: ir.Program, result_homes: Mapping[int, Mesh]) -> Homes:
    """Map results that end on a given submesh, and values of their shape on the way to them, to that submesh."""
    producer = graph.makers(i for i in program.items if isinstance(i, ir.Op) and i.task is None)
    pulls: Homes = {}
    for i, mesh in result_homes.items():
        stack = list(ir.values([program.outputs[i]]))
        while stack:
            v = stack.pop()
            if v in producer and v not in pulls:
                pulls[v] = mesh
                stack += [r for r in producer[v].reads if r.aval.shape == v.aval.shape]
    return pulls


def _resolve_constraints(program: ir.Program) -> list[ir.Item]:
    """Replace logical constraints outside tasks by one for each task that uses the value, or for its producer."""

    def resolve(ops: Sequence[ir.Item]) -> list[ir.Item]:
        if not any(isinstance(i, ir.Op) and "logical" in i.params and i.task is None for i in ops):
            return list(ops)
        producer = graph.makers(i for i in ops if isinstance(i, ir.Op))
        rename: dict[tuple[ir.Value, Placement | None], ir.Value] = {}
        out: list[ir.Item] = []
        marked = ((i, i.task) for i in ops if isinstance(i, ir.Op) and i.task is not None)
        readers = group((v, task) for op, task in marked for v in op.reads)
        for item in ops:
            if not isinstance(item, ir.Op):
                out.append(item)
                continue
            ins = (rename.get((i, item.task), i) if isinstance(i, ir.Value) else i for i in item.ins)
            item = replace(item, ins=tuple(ins))
            if "logical" not in item.params or item.task is not None:
                out.append(item)
                continue
            made_by = producer.get(item.ins[0]) if isinstance(item.ins[0], ir.Value) else None
            tasks = [*dict.fromkeys(readers[item.outs[0]])]
            tasks = tasks or ([made_by.task] if made_by is not None and made_by.task else [])
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
                constrained = ir.Value(item.outs[0].aval)
                out.append(replace(item, task=task, outs=(constrained,)))
                rename[item.outs[0], task] = constrained
            out.append(replace(item, params={"identity": True}))  # for readers outside tasks
        return out

    items = [replace(i, ops=_only_ops(resolve(i.ops))) if isinstance(i, ir.Loop) else i for i in program.items]
    return resolve(items)


def _only_ops(items: Iterable[ir.Item]) -> tuple[ir.Op, ...]:
    return tuple(item for item in items if isinstance(item, ir.Op))


def _place_loop(loop: ir.Loop, state: State, default: Mesh, rows: set[ir.Value], moved: Moves) -> ir.Loop:
    """Place the body of a loop. ``moved`` gets the clones of ``rows``, which later loops read."""
    homes = state.homes
    loop = replace(loop, linked={k: moved.get(v, v) for k, v in loop.linked.items()})
    homes.update({inner: homes[row] for inner, row in loop.linked.items() if row in homes})
    order = order_submeshes(loop.ops) or tuple(state.owners.order)
    walked = Follower(state, [order[rank] for rank in loop.mark.schedule.placement(len(order))]).run(loop.ops)
    states = [graph.resolve(c.leaf, walked.renamed) for c in loop.carries.values()]
    walked.settle(ir.values(states))
    row_values = [o for op in loop.ops for o in op.outs if o in rows]
    leaves = tuple(graph.resolve(a, walked.renamed) for a in (*loop.leaves, *row_values))
    placed, results = _clone_floating(walked, state, leaves, {}, default, set(states))
    count = len(loop.leaves)
    moved.update(zip(row_values, results[count:], strict=True))
    homes.update((o, homes.get(leaf, default)) for o, leaf in zip(loop.outs, results[:count], strict=True))
    return replace(graph.with_leaves(loop, results), ops=_only_ops(placed))


def _clone_floating(
    walked: Follower,
    state: State,
    outputs: tuple[ir.Atom, ...],
    destinations: Mapping[ir.Value, Mesh],
    default: Mesh,
    states: Collection[ir.Atom] = (),
) -> tuple[list[ir.Item], tuple[ir.Atom, ...]]:
    """Clone operations that may run anywhere to every submesh that uses them, or to their ``destinations``.

    A value that only outputs use goes where its sources belong, or to ``default``. The first copy of one of the
    ``states`` that is read becomes the output, so that no iteration waits for it.
    """
    items, anchored = walked.items, walked.anchored
    needed: dict[ir.Value, dict[Mesh, None]] = collections.defaultdict(dict)
    floating = [i for i, item in enumerate(items) if isinstance(item, ir.Op) and i not in anchored]
    made_floating = {o for i in floating for o in items[i].outs}
    needed.update({v: {mesh: None} for v, mesh in destinations.items() if v in made_floating})
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
                home = state.largest(item.outs)
                if home is None and not all(map(is_small, item.reads)):
                    state.lost += item.outs
                on[i] = {walked.near(home or default): None}
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
                state.homes.update(dict.fromkeys(outs, mesh))
            placed.append(replace(item, mesh=mesh, ins=ins, outs=outs))
    for carried in states:
        needed[carried] = dict(reversed(needed[carried].items()))
    any_copy = {value: clone for (value, _), clone in reversed(copy.items())}  # the first of each

    def copied(atom: ir.Atom) -> ir.Atom:
        if not isinstance(atom, ir.Value):
            return atom
        candidates = (copy[atom, mesh] for mesh in (destinations.get(atom), *needed[atom]) if (atom, mesh) in copy)
        return next(candidates, any_copy.get(atom, atom))

    return placed, tuple(map(copied, outputs))


def _loop_needs(loop: ir.Loop, default: Mesh) -> Iterable[tuple[ir.Value, Mesh]]:
    """Yield the outer values that a placed loop reads, each with the submesh that reads it."""
    for op in loop.ops:
        for v in op.reads:
            outer = loop.consts.get(v, loop.slices.get(v))
            if isinstance(outer, ir.Value) and op.mesh is not None:
                yield outer, op.mesh
    made_on = _map_submeshes(loop) if loop.carries else {}
    for c in loop.carries.values():
        if isinstance(c.init, ir.Value):
            yield c.init, made_on[c.leaf]
    for atom in (*(s.leaf for s in loop.sums), *loop.stacks.values()):
        outer = loop.consts.get(atom, loop.slices.get(atom)) if isinstance(atom, ir.Value) else None
        if isinstance(outer, ir.Value):
            yield outer, default


def _map_submeshes(loop: ir.Loop) -> dict[ir.Value, Mesh]:
    """Map the values that a placed loop computes to their submeshes."""
    return {o: op.mesh for op in loop.ops for o in op.outs if op.mesh is not None}


def _read_copies(
    loop: ir.Loop, copy: dict[tuple[ir.Value, Mesh], ir.Value], floating: set[ir.Value], default: Mesh
) -> ir.Loop:
    """Return the loop with each submesh's operations reading that submesh's copy of an outer value."""
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
    made_on = _map_submeshes(loop)
    carries = {k: replace(c, init=copy.get((c.init, made_on[c.leaf]), c.init)) for k, c in loop.carries.items()}
    return replace(loop, ops=ops, consts=consts, slices=slices, sums=sums, stacks=stacks, carries=carries)
