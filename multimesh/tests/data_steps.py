"""Some steps of a pipeline in one of several processes, each of which reads its rows; prints what it read, and losses.

data_steps.py STAGES FOLDER FIRST STEPS: goes on from the checkpoint in the folder if FIRST is not 0, and leaves one.
"""

import json
import os
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

ROWS, WIDTH = 16, 8


class Source:
    """Rows by number; it notes who was asked for which."""

    def __init__(self):
        self.asked = {"x": set(), "y": set()}

    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = np.random.default_rng(int(i)).normal(size=WIDTH).astype(np.float32)
        return {"x": x, "y": np.sin(2 * x), "number": int(i)}


def shuffle(source):
    return grain.MapDataset.source(source).shuffle(seed=3).repeat()


def loss_of(params, batch):
    x = batch["x"]
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def initial():
    return [np.random.default_rng(i).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for i in range(4)]


def training(loss):
    gradients = mm.microbatch(jax.value_and_grad(loss), size=4, argnum=1, reduce="mean")

    def step(params, batch):
        value, grads = gradients(params, batch)
        return jax.tree.map(lambda w, g: w - 0.3 * g, params, grads), value

    return step


def main(stages, folder, first, steps):
    mm.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
    meshes = [Mesh(row, ("data",)) for row in np.array(jax.devices()).reshape(stages, -1)]
    places = {"x": NamedSharding(meshes[0], P("data")), "y": NamedSharding(meshes[-1], P("data"))}
    source = Source()
    dataset = shuffle(source)

    def part(name, rows):
        examples = [dataset[int(i)] for i in rows]
        source.asked[name].update(map(int, rows))
        return np.stack([row[name] for row in examples])

    def batch_of(number):
        rows = np.arange(number * ROWS, (number + 1) * ROWS)
        return {
            name: jax.make_array_from_callback(
                (ROWS, WIDTH), place, lambda i, n=name: part(n, rows[i[0]]), dtype=np.float32
            )
            for name, place in places.items()
        }

    train = mm.jit(training(mm.pipeline(loss_of, meshes)))
    params, losses = initial(), []
    if first:
        state = mm.distributed.restore(folder, {"params": params, "step": 0})
        params, number = state["params"], state["step"]
        assert number == first
    for number in range(first, first + steps):
        params, value = train(params, batch_of(number))
        losses.append(float(mm.distributed.gather(value)))
    mm.distributed.save(f"{folder}/{first + steps}", {"params": params, "step": first + steps})
    print(json.dumps({"losses": losses, "asked": {name: sorted(rows) for name, rows in source.asked.items()}}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
