"""Where layers, parameters and optimizer moments go, without MaxText."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh_maxtext.trainer.placement import Stages, stage_meshes


@pytest.fixture
def stages() -> Stages:
    """Four stages of two devices for eight layers."""
    devices = jax.devices()
    first = Mesh(np.array([devices[1], devices[0]]).reshape(2, 1), ("data", "tensor"))
    return Stages(stage_meshes(first, 4, devices), layers=8)


def test_stages_are_alike_but_for_their_devices(stages: Stages):
    ids = [[d.id for d in mesh.devices.flat] for mesh in stages.meshes]
    assert ids == [[1, 0], [3, 2], [5, 4], [7, 6]]
    assert {mesh.abstract_mesh for mesh in stages.meshes} == {stages.meshes[0].abstract_mesh}


def test_layers_are_dealt_in_contiguous_shares(stages: Stages):
    assert [stages.meshes.index(stages.of_layer(n)) for n in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_pieces_are_dealt_to_the_stages_in_turn():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    interleaved = Stages(stage_meshes(mesh, 2, jax.devices()), layers=8, interleave=2)
    assert interleaved.pieces == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [interleaved.meshes.index(interleaved.of_layer(n)) for n in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    stacks = {f"layers_{p.start}_{p.stop - 1}": {"mlp": 0} for p in interleaved.pieces}
    found = jax.tree_util.tree_map_with_path(
        lambda path, _: interleaved.meshes.index(interleaved.of_path(path)), stacks
    )
    assert found == {name: {"mlp": n % 2} for n, name in enumerate(stacks)}


def test_pieces_are_dealt_as_a_schedule_says():
    """In a V the first and the last piece are on one stage, and so are the embedding and the logits."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    v = Stages(stage_meshes(mesh, 2, jax.devices()), layers=8, interleave=2, placement=(0, 1, 1, 0))
    assert [v.meshes.index(v.of_layer(n)) for n in range(8)] == [0, 0, 1, 1, 1, 1, 0, 0]
    paths = jax.tree_util.tree_leaves_with_path({"embedding": 0, "decoder_norm": 0, "layers_4": 0})
    assert {jax.tree_util.keystr(path): v.meshes.index(v.of_path(path)) for path, _ in paths} == {
        "['embedding']": 0,
        "['decoder_norm']": 0,
        "['layers_4']": 1,
    }


def test_pieces_of_unequal_sizes():
    """Their stacks are named by their first and last layers, also that of one layer."""
    from multimesh_maxtext.trainer.placement import list_stacks

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    uneven = Stages(stage_meshes(mesh, 2, jax.devices()), layers=6, interleave=2, sizes=(2, 1, 2, 1))
    assert uneven.pieces == [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    assert [uneven.meshes.index(uneven.of_layer(n)) for n in range(6)] == [0, 0, 1, 0, 0, 1]
    names = ["layers_0_1", "layers_2_2", "layers_3_4", "layers_5_5"]
    assert [name for name, *_ in list_stacks(uneven.pieces, None)] == names


def test_layers_that_are_counted_apart_are_dealt_in_one_row():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    stages = Stages(stage_meshes(mesh, 2, jax.devices()), layers=4, dense=1)
    paths = {"dense_layers_0": 0, "moe_layers_0": 0, "moe_layers_1": 0, "moe_layers_2": 0}
    found = jax.tree_util.tree_map_with_path(lambda path, _: stages.meshes.index(stages.of_path(path)), paths)
    assert [*found.values()] == [0, 0, 1, 1]


@pytest.mark.flax
def test_the_layers_of_a_piece_get_the_random_numbers_of_one_stack():
    from flax import nnx

    from multimesh_maxtext.trainer.placement import list_stacks

    pieces = [range(0, 3), range(3, 6)]
    assert [(name, length) for name, length, _ in list_stacks(pieces, None)] == [("layers_0_2", 3), ("layers_3_5", 3)]
    whole = nnx.Rngs(params=1, dropout=2).fork(split=6)
    shares = [share.fork(split=3) for _, _, share in list_stacks(pieces, nnx.Rngs(params=1, dropout=2))]
    for stream in ("params", "dropout"):
        keys = [jax.random.key_data(rngs[stream].key.get_value()) for rngs in (whole, *shares)]
        np.testing.assert_array_equal(np.concatenate(keys[1:]), keys[0])


def test_parameters_and_their_moments_go_with_their_layer(stages: Stages):
    layers = {f"layers_{n}": {"mlp": {"kernel": 0}} for n in (0, 3, 7)}
    params = {"decoder": {**layers, "decoder_norm": {"scale": 0}, "logits_dense": {"kernel": 0}}, "embedding": 0}
    state = {"model": params, "optimizer": [{"mu": params, "nu": params, "count": 0}], "step": 0}
    found = jax.tree_util.tree_map_with_path(lambda path, _: stages.meshes.index(stages.of_path(path)), state)
    for part in (found["model"], found["optimizer"][0]["mu"], found["optimizer"][0]["nu"]):
        decoder = part["decoder"]
        assert [decoder[f"layers_{n}"]["mlp"]["kernel"] for n in (0, 3, 7)] == [0, 1, 3]
        assert (decoder["decoder_norm"]["scale"], decoder["logits_dense"]["kernel"], part["embedding"]) == (3, 3, 0)
    assert (found["optimizer"][0]["count"], found["step"]) == (0, 0)


def test_state_is_created_on_its_stage_and_nowhere_else(stages: Stages):
    def init() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 8)
        return {f"layers_{n}": jax.random.normal(keys[n], (64, 32)) for n in range(8)}

    specs = dict.fromkeys(init(), NamedSharding(stages.meshes[0], P("data")))
    shardings = stages.shardings(specs)
    created = stages.create(init, shardings)
    expected = jax.jit(init)()
    for n in range(8):
        x = created[f"layers_{n}"]
        assert x.sharding == NamedSharding(stages.of_layer(n), P("data"))
        np.testing.assert_array_equal(x, expected[f"layers_{n}"])
