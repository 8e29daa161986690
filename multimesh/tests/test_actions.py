"""What each process does of a plan, worked out in one: the parts make up the whole, and no process waits for ever."""

import collections
import functools
import itertools

import graphs
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MODELS
from multimesh.runtime.actions import all_actions, by_devices, process_transfers, project
from multimesh.runtime.resharding import plan_resharding
from pipelines import Split, gradient, submeshes

import multimesh as mm

TRANSFORMER = next(m for m in MODELS if m.name == "transformer")
OWNERS = {
    "4x2": lambda d: d.id // 2,
    "2x4": lambda d: d.id // 4,
    "8x1": lambda d: d.id,
    "alternating": lambda d: d.id % 2,
}


@functools.cache
def pipeline(schedule):
    split = Split(submeshes(4))
    f = mm.jit(gradient(TRANSFORMER, split, size=2, rows=16, schedule=schedule))
    return f.plan(TRANSFORMER.init(4), TRANSFORMER.batch(16, 0))


def ways(plan, action):
    pairs = zip(action.ins, action.outs, strict=True)
    return [plan_resharding(plan.layouts[a], plan.layouts[b], plan.slots[a].shape) for a, b in pairs]


def check(plan, owner):
    """Parts in the order of the whole, in which no action is missing; replayed, all come to their end."""
    count = 1 + max(owner(d) for mesh in plan.submeshes for d in mesh.devices.flat)
    parts = [project(plan, process, owner) for process in range(count)]
    actions = {action.number: action for action in all_actions(plan, owner)}
    assert set().union(*({a.number for a in part} for part in parts)) == set(actions)
    frees = collections.Counter(slot for part in parts for action in part for slot in action.frees)
    for process, part in enumerate(parts):
        assert [a.number for a in part] == sorted(a.number for a in part)
        submeshes = {i for i, mesh in enumerate(plan.submeshes) if process in map(owner, mesh.devices.flat)}
        for action in part:
            original = actions[action.number]
            assert (action.kernel, action.ins, action.outs) == (original.kernel, original.ins, original.outs)
            assert submeshes & set(action.submeshes)
    for slot in (slot for action in actions.values() for slot in action.frees):
        mesh = plan.submeshes[plan.slots[slot].submesh]
        assert frees[slot] == len(set(map(owner, mesh.devices.flat)))
    replay(plan, parts, owner)


def replay(plan, parts, owner):
    """Run the parts in turns: what is read is there; who receives waits, who sends does not."""
    env = [{slot for _, slot in (*plan.inputs, *plan.constants)} for _ in parts]
    sends = collections.Counter()
    queues = [collections.deque(part) for part in parts]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                receives = []
                if action.kernel is None:
                    transfers = process_transfers(ways(plan, action), owner)
                    for transfer in transfers:
                        if transfer.source == rank and ("sent", action.number, rank, transfer.target) not in sends:
                            sends["sent", action.number, rank, transfer.target] += 1
                            assert {action.ins[p.array] for p in transfer.pieces} <= env[rank]
                    receives = [r for r in transfers if r.target == rank != r.source]
                else:
                    assert set(action.ins) <= env[rank]
                if any(not sends["sent", action.number, r.source, rank] for r in receives):
                    break
                progress = True
                queue.popleft()
                submeshes = [i for i, mesh in enumerate(plan.submeshes) if rank in map(owner, mesh.devices.flat)]
                env[rank] |= {slot for slot in action.outs if plan.slots[slot].submesh in submeshes}
                env[rank] -= set(action.frees)
    assert not any(queues), "a process waits for ever"


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "prefetch-wavefront"])
def test_parts_of_a_pipeline(schedule, owner):
    check(pipeline(schedule), OWNERS[owner])


@pytest.mark.parametrize("seed", range(25))
def test_parts_of_random_graphs(seed):
    graph, owner = graphs.graph(seed), sorted(OWNERS)[seed % len(OWNERS)]

    def loss(*a):
        return sum((y**2).mean() for y in graph.run(a, True))

    check(mm.jit(jax.grad(loss, argnums=(0, 1, 2))).plan(*graphs.inputs()), OWNERS[owner])


def test_one_process_has_every_action_and_as_few_calls_as_can_be():
    plan = pipeline("1f1b")
    (part,) = [project(plan, 0, lambda d: 0)]
    kinds = [action.kernel is None for action in part]
    assert not any(a and b for a, b in itertools.pairwise(kinds))
    assert sum(map(len, (s.ins for s in part if s.kernel is None))) == plan.traffic()[0]


def test_every_byte_crosses_once_where_cuts_fit():
    devices = np.array(jax.devices())
    source = NamedSharding(Mesh(devices[:4], ("data",)), P("data"))
    target = NamedSharding(Mesh(devices[4:].reshape(2, 2), ("data", "model")), P("data", "model"))
    transfers = process_transfers([plan_resharding(source, target, (8, 8))], OWNERS["4x2"])
    assert sum(len(r.pieces) for r in transfers) * 8 == 64
    assert [(r.source, r.target) for r in transfers] == [(0, 2), (1, 3)]
    pairs = [(a.id, b.id) for r in transfers for a, b, _ in by_devices(r)]
    assert pairs == sorted(set(pairs))


def test_all_processes_make_all_moves_where_the_transport_wants_it():
    plan = pipeline("1f1b")
    parts = [project(plan, process, OWNERS["4x2"], everyone=True) for process in range(4)]
    assert len({tuple(a.number for a in part if a.kernel is None) for part in parts}) == 1
