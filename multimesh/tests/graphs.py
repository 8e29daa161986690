"""Random directed graphs of operations over random submeshes that may share devices, as straight code."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import multimesh as mm

ROWS, WIDTH, INPUTS = 8, 4, 3

OPERATIONS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * jnp.cos(b),
    "matmul": lambda a, b: jnp.tanh(a @ (b.T @ a) / 8),
    "where": lambda a, b: jnp.where(a > b, a, 0.5 * b),
    "mean": lambda a, b: a - b.mean(0),
    "reverse": lambda a, b: jnp.concatenate([b[:, 2:], a[:, :2]], 1),
    "scan": lambda a, b: jax.lax.scan(lambda c, x: (0.5 * c + x, jnp.sin(c)), b[0], a)[1],
    "remat": jax.checkpoint(lambda a, b: jnp.tanh(a) * jax.nn.sigmoid(b)),
    "constant": lambda a, b: a + jnp.arange(WIDTH, dtype=a.dtype),
}


@dataclasses.dataclass(frozen=True)
class Node:
    """``submesh`` None: the operation stands outside every task."""

    operation: str
    left: int
    right: int
    submesh: int | None


@dataclasses.dataclass(frozen=True)
class Graph:
    starts: tuple[tuple[int, int], ...]  # (first device, number of devices) of every submesh
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def meshes(self) -> list[Mesh]:
        return [Mesh(np.array(jax.devices()[a : a + n]), ("i",)) for a, n in self.starts]

    def run(self, args: Any, tasks: bool) -> list[Any]:
        values = list(args)
        meshes = self.meshes() if tasks else []
        for k, node in enumerate(self.nodes):
            f = OPERATIONS[node.operation]
            if tasks and node.submesh is not None:
                f = mm.task(f, name=f"n{k}", mesh=meshes[node.submesh])
            values.append(f(values[node.left], values[node.right]))
        return [values[o] for o in self.outputs]


def graph(seed: int, devices: int = 8) -> Graph:
    """Draw a graph over the first devices; its last node is a task and a result."""
    rng = random.Random(seed)
    sizes = [rng.choice([n for n in (1, 2, 4) if n <= devices]) for _ in range(rng.randint(1, 3))]
    starts = tuple((rng.randint(0, devices - n), n) for n in sizes)
    nodes = []
    for k in range(rng.randint(2, 7)):
        left, right = (rng.randint(0, INPUTS + k - 1) for _ in range(2))
        nodes.append(Node(rng.choice(sorted(OPERATIONS)), left, right, rng.choice([None, *range(len(sizes))])))
    nodes[-1] = dataclasses.replace(nodes[-1], submesh=rng.randrange(len(sizes)))
    last = INPUTS + len(nodes) - 1
    results = tuple(rng.randint(0, last) for _ in range(rng.randint(1, 3)))
    return Graph(starts, tuple(nodes), (*results, last))


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(INPUTS)]
