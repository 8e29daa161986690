"""Where layers, parameters and optimizer moments go, without MaxText."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh_maxtext.trainer.placement import Stages, list_stacks, stage_meshes


@pytest.fixture
def stages() -> Stages:
    """Four stages of two devices for eight layers."""
    devices = jax.devices()
    first = Mesh(np.array([devices[1], devices[0]]).reshape(2, 1), ("data", "tensor"))
    return Stages(stage_meshes(first, 4, devices), layers=8)


def two_stages(**layout: Any) -> Stages:
    return Stages(stage_meshes(Mesh(np.array(jax.devices()[:4]), ("data",)), 2, jax.devices()), **layout)


def locate(stages: Stages, tree: Any) -> Any:
    """The number of the stage of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, _: stages.meshes.index(stages.of_path(path)), tree)


def test_stages_are_alike_but_for_their_devices(stages: Stages):
    ids = [[d.id for d in mesh.devices.flat] for mesh in stages.meshes]
    assert ids == [[1, 0], [3, 2], [5, 4], [7, 6]]
    assert {mesh.abstract_mesh for mesh in stages.meshes} == {stages.meshes[0].abstract_mesh}


@pytest.mark.parametrize(
    ("layout", "pieces", "stage_of"),
    [
        ({"layers": 8}, [4, 4], [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"layers": 8, "interleave": 2}, [2, 2, 2, 2], [0, 0, 1, 1, 0, 0, 1, 1]),
        ({"layers": 8, "interleave": 2, "placement": (0, 1, 1, 0)}, [2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 0, 0]),
        ({"layers": 6, "interleave": 2, "sizes": (2, 1, 2, 1)}, [2, 1, 2, 1], [0, 0, 1, 0, 0, 1]),
    ],
    ids=["shares", "in turn", "in a V", "uneven"],
)
def test_pieces_are_dealt_as_a_schedule_says(layout: dict[str, Any], pieces: list[int], stage_of: list[int]):
    """The embedding lies with the first layer, the final norm with the last, a stack of a piece with its first one."""
    stages = two_stages(**layout)
    firsts = list(itertools.accumulate([0, *pieces[:-1]]))
    assert stages.pieces == [range(first, first + size) for first, size in zip(firsts, pieces, strict=True)]
    assert [stages.meshes.index(stages.of_layer(n)) for n in range(layout["layers"])] == stage_of
    names = [name for name, *_ in list_stacks(stages.pieces, None)]
    assert names == [f"layers_{first}_{first + size - 1}" for first, size in zip(firsts, pieces, strict=True)]
    stages_of = locate(stages, {"embedding": 0, "decoder_norm": 0, **{name: {"mlp": 0} for name in names}})
    assert stages_of == {
        "embedding": stage_of[0],
        "decoder_norm": stage_of[-1],
        **{name: {"mlp": stage_of[first]} for name, first in zip(names, firsts, strict=True)},
    }


def test_layers_that_are_counted_apart_are_dealt_in_one_row():
    paths = {"dense_layers_0": 0, "moe_layers_0": 0, "moe_layers_1": 0, "moe_layers_2": 0}
    assert [*locate(two_stages(layers=4, dense=1), paths).values()] == [0, 0, 1, 1]


@pytest.mark.flax
def test_the_layers_of_a_piece_get_the_random_numbers_of_one_stack():
    from flax import nnx

    pieces = [range(0, 3), range(3, 6)]
    assert [(name, length) for name, length, _ in list_stacks(pieces, None)] == [("layers_0_2", 3), ("layers_3_5", 3)]
    stack = nnx.Rngs(params=1, dropout=2).fork(split=6)
    shares = [share.fork(split=3) for _, _, share in list_stacks(pieces, nnx.Rngs(params=1, dropout=2))]
    for stream in ("params", "dropout"):
        keys = [jax.random.key_data(rngs[stream].key.get_value()) for rngs in (stack, *shares)]
        np.testing.assert_array_equal(np.concatenate(keys[1:]), keys[0])
