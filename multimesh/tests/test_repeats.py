"""Layers that repeat are found in a chain of operations, and stages begin where they do."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from multimesh.stages.balance import SLACK, Chain, cut_between_layers, cut_chain, equal_stages, find_layers
from pipelines import submeshes

import multimesh as mm

LAYER = (("norm", 1.0, 3.0), ("attend", 6.0, 2.0), ("add", 1.0, 1.0), ("up", 8.0, 4.0), ("down", 8.0, 1.0))
"""Operations of a layer: kind, cost, and the bytes of its result; the smallest leave the layer and its half."""


def chain_of_layers(
    counts: tuple[int, ...], before: float = 0.5, after: float = 0.5
) -> tuple[Chain, list[str], list[int]]:
    """Towers of layers of ``counts``, each of its own kinds, what is around them, and where layers start."""
    kinds, costs, sizes, starts = ["embed"], [before], [1.0], []
    for tower, count in enumerate(counts):
        for _ in range(count):
            starts.append(len(kinds))
            for kind, cost, size in LAYER:
                kinds.append(f"{tower} {kind}")
                costs.append(cost)
                sizes.append(size)
        starts.append(len(kinds))
    kinds, costs, sizes = [*kinds, "head"], [*costs, after], [*sizes, 0.0]
    reads = tuple((i - 1,) if i else () for i in range(len(kinds)))
    makes = tuple((i,) for i in range(len(kinds)))
    return Chain(tuple(costs), reads, makes, dict(enumerate(sizes))), kinds, starts


@pytest.mark.parametrize("counts", [(8,), (5, 7), (2,), (40,)])
def test_layers_are_found(counts):
    chain, kinds, starts = chain_of_layers(counts)
    layers_of = find_layers(chain, kinds)
    assert [i for layers in layers_of for i in layers] == starts


def test_nothing_repeats_in_a_chain_of_unlike_operations():
    chain, kinds, _ = chain_of_layers((4,))
    assert find_layers(chain, range(len(kinds))) == ()
    chain, kinds, _ = chain_of_layers((4,), before=500.0)
    assert find_layers(chain, kinds) == ()


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("after", [0.5, 12.0, 30.0])
def test_stages_begin_with_layers_unless_a_cut_inside_gains_more(stages, after):
    chain, kinds, starts = chain_of_layers((8,), after=after)
    anywhere = cut_chain(chain, stages)
    cut = cut_between_layers(chain, stages, find_layers(chain, kinds), anywhere)
    inner = [  # all cuts where layers start, by hand
        max(sum(chain.times[a:b]) for a, b in itertools.pairwise((0, *ends, len(kinds))))
        for ends in itertools.combinations(starts, stages - 1)
        if ends == () or ends[-1] < len(kinds)
    ]
    assert (cut is None) == (min(inner) > (1 + SLACK) * anywhere.slowest)
    if cut is not None:
        assert set(cut.ends[1:-1]) <= set(starts)
        assert cut.slowest <= (1 + SLACK) * anywhere.slowest


def test_of_cuts_between_layers_the_one_with_the_most_equal_stages_is_taken():
    chain, kinds, starts = chain_of_layers((12,))
    cut = cut_between_layers(chain, 4, find_layers(chain, kinds), cut_chain(chain, 4))
    assert cut.ends == (0, starts[3], starts[6], starts[9], len(kinds))
    assert equal_stages(tuple(tuple(kinds[a:b]) for a, b in itertools.pairwise(cut.ends))) == ((1, 2),)


def test_a_model_is_cut_between_its_layers_or_within_them_if_asked():
    layers, meshes = [{"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))} for _ in range(4)], submeshes(4, (1,))
    params = {"layers": layers, "head": jnp.ones((8, 12))}

    def loss(params, x):
        for layer in params["layers"]:
            x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]
        return ((x @ params["head"]) ** 2).sum()

    x = jnp.ones((4, 8))
    cuts = mm.pipeline(loss, meshes).cuts(params, x)
    assert cuts.equal == ((0, 1, 2),) or cuts.finest < (1 - SLACK) * max(stage.time for stage in cuts.stages)
    finest = mm.pipeline(loss, meshes, within_layers=True).cuts(params, x)
    assert finest.slowest <= cuts.slowest
