"""Cuts a placed program into loops and the segments between them, and both into fragments."""

from __future__ import annotations

import collections

from multimesh import ir
from multimesh.passes.cutting.fragment import fragment
from multimesh.passes.cutting.parts import Parts, Pipeline, Segment


def cut(program: ir.Program) -> Parts:
    """Cut a placed program into straight segments and loops, and these into fragments."""
    epochs = _epochs(program)
    rows = program.linked
    read_at: dict[ir.Value, set[int]] = collections.defaultdict(set)
    for item, epoch in zip(program.items, epochs, strict=True):
        if isinstance(item, ir.Op):
            for v in item.needs:
                read_at[v].add(epoch)
    outside = {v for loop in program.loops for v in loop.reads} | set(ir.values(program.outputs))

    def segment(epoch: int) -> Segment:
        ops = [i for i, e in zip(program.items, epochs, strict=True) if e == epoch and isinstance(i, ir.Op)]
        results = {o for op in ops for o in op.outs if o in outside or read_at[o] - {epoch}}
        return Segment(fragment(ops, results, phased=False), frozenset(results))

    parts: list[Segment | Pipeline] = [segment(0)]
    for number, loop in enumerate(program.loops):
        results = {*ir.values(loop.leaves), *(o for op in loop.ops for o in op.outs if o in rows)}
        parts.append(Pipeline(loop, fragment(loop.ops, results, phased=True), frozenset(results)))
        parts.append(segment(number + 1))
    return Parts(program, tuple(parts))


def _epochs(program: ir.Program) -> list[int]:
    """For each item the number of loops it must come after; what needs none waits for its first reader."""
    epoch_of: dict[ir.Value, int] = {}
    epochs: list[int] = []
    loops = 0
    for item in program.items:
        epoch = max((epoch_of.get(v, 0) for v in item.reads), default=0)
        if isinstance(item, ir.Loop):
            loops += 1
            epoch = loops
        epochs.append(epoch)
        epoch_of.update(dict.fromkeys(item.outs, epoch))
    first_read: dict[ir.Value, int] = {}
    for i in reversed(range(len(program.items))):
        item = program.items[i]
        late = min((first_read[o] for o in item.outs if o in first_read), default=None)
        if isinstance(item, ir.Op) and epochs[i] == 0 and late is not None and not item.effects:
            epochs[i] = late
        at = epochs[i] - 1 if isinstance(item, ir.Loop) else epochs[i]
        for v in item.needs:
            first_read[v] = min(first_read.get(v, at), at)
    return epochs
