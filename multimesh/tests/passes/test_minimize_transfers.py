"""Operations outside of tasks add no stage and no transfer: against all placements of them, on small programs."""

import collections
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from multimesh.ir.primitives import is_small
from multimesh.passes.cutting.cut_fragments import cut_operations
from multimesh.passes.cutting.number_stages import number_by_schedule
from multimesh.passes.cutting.parts import Pipeline
from multimesh.passes.placing.mincut import SINK, SOURCE, Cut
from multimesh.passes.placing.note_routes import order_submeshes
from multimesh.passes.placing.place_operations import place_operations
from programs import loops, ones, separated

import multimesh as mm
from multimesh import ir

WIDTH = 8
MESHES = tuple(Mesh(np.array([d]), ("data",)) for d in jax.devices()[:5])


def on(stage, fn):
    return mm.task(fn, f"stage{stage}", mesh=MESHES[stage])


AFTER = {  # what stands behind all stages: of what each stage made, h
    "nothing": lambda h, w: h[-1],
    "product with a skip": lambda h, w: h[0] * h[-1],
    "mean of a skip": lambda h, w: h[-1] - h[0].mean(),
    "several from a skip": lambda h, w: jnp.sin(h[0]) * h[-1],
    "sum of all": lambda h, w: sum(h[1:], h[0]),
    "a parameter": lambda h, w: h[-1] * (1 + w[0].sum()),
    "scale by a scalar": lambda h, w: h[-1] * h[0].sum(),
}
BEFORE = {  # what stands before the last stage
    "cast of the batch": lambda h, x: 2 * (h[-1] if h else x),
    "skip into the last": lambda h, x: h[-1] + h[0] if len(h) > 1 else h[-1],
    "skip of a batch": lambda h, x: h[-1] + jnp.cos(x),
}


def program(where, count):
    def loss(w, x):
        h = []
        for s in range(count):
            y = h[-1] if h else x
            if where in BEFORE and s == count - 1:
                y = BEFORE[where](h, x)
            h.append(on(s, lambda w, y: jnp.tanh(y @ w))(w[s], y))
        y = AFTER.get(where, AFTER["nothing"])(h, w)
        extra = sum((v**2).mean() for v in h) if where == "auxiliary losses" else 0
        return (y**2).sum() + extra

    return loss


MODES = {"forward": lambda f: f, "grad": jax.grad, "checkpoint": lambda f: jax.grad(jax.checkpoint(f))}
ALL = (*AFTER, *BEFORE, "auxiliary losses")


class Placement:
    """Operations that have a place, what each reads, and where the tasks' arguments are."""

    def __init__(self, program, loop):
        ops = loop.ops if loop is not None else tuple(program.items)
        self.results = set(ir.values(loop.leaves if loop is not None else program.outputs))
        self.loop = loop
        self.schedule = loop.mark.schedule if loop is not None else None
        data = set(loop.slices) if loop is not None else {program.inputs[-1]}
        producers = {o: op for op in ops for o in op.outs}
        floating = set()
        for op in ops:
            size, largest = (max((v.aval.size for v in values), default=0) for values in (op.outs, op.reads))
            if op.task is None and size >= largest and all(v not in producers or v in floating for v in op.reads):
                floating.update(op.outs)  # made again where it is read; what is smaller (a sum) is made once
        self.ops = [op for op in ops if op.task is not None or not floating.issuperset(op.outs)]
        roots = collections.defaultdict(set)
        for op in ops:
            for v in op.reads:
                roots_of = roots[v] if v in floating else {v}
                for o in op.outs:
                    roots[o] |= roots_of if o in floating else set()
        self.reads = [{r for v in op.reads for r in (roots[v] if v in floating else {v})} - data for op in self.ops]
        self.home = {}
        for op, reads in zip(self.ops, self.reads, strict=True):
            self.home |= {v: op.mesh for v in reads if v not in producers and op.task is not None}
        self.moving = [n for n, op in enumerate(self.ops) if op.task is None]

    def place(self, meshes):
        ops = list(self.ops)
        for n, mesh in zip(self.moving, meshes, strict=True):
            ops[n] = replace(ops[n], mesh=mesh)
        return ops

    def count_transfers(self, meshes):
        """Return how many arrays and scalars are sent; in straight code bytes and number of arrays."""
        ops = self.place(meshes)
        home = self.home | {o: op.mesh for op in ops for o in op.outs}
        crossing = {
            (v, op.mesh)
            for op, reads in zip(ops, self.reads, strict=True)
            for v in reads
            if home.get(v, op.mesh) != op.mesh and not (is_small(v) and v in self.home)
        }
        scalars = sum(is_small(v) for v, _ in crossing)
        if self.schedule is None:
            arrays = [v.nbytes for v, _ in crossing if not is_small(v)]
            return sum(arrays), len(arrays)
        return len(crossing) - scalars, scalars

    def stages(self, meshes):
        if self.schedule is None:
            return 0
        ops = self.place(meshes)
        parts = cut_operations(ops, self.results, phased=True)
        loop = replace(self.loop, submeshes=order_submeshes(ops))
        pipeline = number_by_schedule(Pipeline(loop, parts, frozenset(self.results)), self.schedule)
        return pipeline.chunks * len(pipeline.submeshes)


def find_placement(where, count, mode, loop):
    fn = MODES[mode](program(where, count))
    if loop:
        fn = mm.microbatch(fn, argnum=1, size=2)
    operations = place_operations(separated(fn, [ones(WIDTH, WIDTH)] * count, ones(4, WIDTH)))
    return Placement(operations, loops(operations)[0] if loop else None)


def check(where, count, mode, loop):
    case = find_placement(where, count, mode, loop)
    homes = [case.ops[n].mesh for n in case.moving]
    least, transfers = case.stages(homes), case.count_transfers(homes)
    if loop and mode != "checkpoint":
        assert least == count
    for meshes in itertools.product(MESHES[:count], repeat=len(case.moving)):
        cheaper = case.count_transfers(meshes) < transfers
        if cheaper or least > count:
            better = (case.stages(meshes), case.count_transfers(meshes)) < (least, transfers)
            assert not better, [f"{case.ops[n]} -> {mesh}" for n, mesh in zip(case.moving, meshes, strict=True)]


MOST, MANY = ("mean of a skip", "a parameter"), ("scale by a scalar", "several from a skip")
"""Where a checkpointed loop has the most placements to try."""


def marks(where, mode, loop):
    if mode != "checkpoint" or not loop:
        return ()
    return pytest.mark.full if where in MOST else pytest.mark.longer if where in MANY else ()


@pytest.mark.parametrize(
    ("where", "mode", "loop"),
    [
        pytest.param(
            *case,
            id="-".join((*case[:2], "loop" if case[2] else "straight")),
            marks=marks(*case),
        )
        for case in itertools.product(ALL, MODES, [True, False])
    ],
)
def test_no_placement_of_two_stages_is_better(where, mode, loop):
    check(where, 2, mode, loop)


FEW = [where for where in ALL if where != "auxiliary losses"]  # whose placements can be counted


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("where", FEW)
def test_no_placement_of_a_forward_is_better(where, count):
    check(where, count, "forward", True)


@pytest.mark.telling(
    "nothing",
    "product with a skip",
    "several from a skip",
    "sum of all",
    "cast of the batch",
    "skip into the last",
    "skip of a batch",
)
@pytest.mark.longer
@pytest.mark.parametrize("where", FEW)
def test_no_placement_of_a_gradient_of_three_stages_is_better(where):
    check(where, 3, "grad", True)


@pytest.mark.longer
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("where", ALL)
def test_no_operation_outside_tasks_adds_a_stage(where, count):
    for mode in MODES:
        if mode != "checkpoint":
            case = find_placement(where, count, mode, True)
            assert case.stages([case.ops[n].mesh for n in case.moving]) == count
        step = mm.microbatch(MODES[mode](program(where, count)), argnum=1, size=2, schedule="zb-h1")
        mm.jit(step).plan([ones(WIDTH, WIDTH)] * count, ones(4, WIDTH))  # which is refused with more stages


def test_the_cheapest_cut():
    """The sum by hand: 3 and 2 leave the source, 1 and 4 reach the sink, and 2 go across."""
    cut = Cut()
    for source, sink, cost in ((SOURCE, "a", 3), (SOURCE, "b", 2), ("a", "b", 2), ("a", SINK, 1), ("b", SINK, 10**30)):
        cut.pay(source, sink, cost)
    assert cut.sink_side() == {"b", SINK}
