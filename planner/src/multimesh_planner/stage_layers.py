"""Seconds of the parts of a transformer on a device (layer, embedding, head, transfer), and of its stages."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from multimesh_planner import footprint, layer_seconds
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import Device
from multimesh_planner.hardware.software import Software
from multimesh_planner.layer_seconds import Times
from multimesh_planner.transformer import Transformer

_EMBEDDING_PASSES, _UPDATE_PASSES = 4.0, 8.0


@dataclass(frozen=True)
class LayerParts:
    """Seconds of the parts of a model that stages are made of."""

    # layer, embedding, head: of a microbatch
    layer: Times
    embedding: Times
    head: Times
    hop: float  # of a transfer between neighboring stages
    blocked: float  # part of the two transfers of a cell, a received and a sent one, in which its submesh is idle
    shares: tuple[tuple[str, float], ...]  # parts of a layer's seconds, by name
    first: Times  # the layer at the start whose MLP is dense though the others have experts


def parts(model: Transformer, how: Configuration, device: Device, software: Software) -> LayerParts:
    """Return the seconds of the parts of a model on a device, for a microbatch of ``how.tokens`` tokens."""
    layer, shares = _layer(model, how, device, software)
    first = _layer(model.dense, how, device, software)[0] if model.dense_layers else layer
    one = kernels.move(device, 2.0 * how.tokens * model.hidden)
    embedding = Times(_EMBEDDING_PASSES / 2 * one, 0.0, _UPDATE_PASSES / 2 * one)
    columns = model.vocabulary / how.tp
    product = kernels.matmul(device, how.tokens, model.hidden, columns)
    logits = kernels.move(device, software.head_passes * how.tokens * columns)
    head = Times(product + logits, product + logits, product)
    last = head + (layer + head) * model.predicted
    return LayerParts(layer, embedding, last, *layer_seconds.hop(model, how, device, software), shares, first)


def _layer(
    model: Transformer, how: Configuration, device: Device, software: Software
) -> tuple[Times, tuple[tuple[str, float], ...]]:
    parts = {
        "matrix products": layer_seconds.products(model, how, device, software),
        "attention": layer_seconds.attention(model, how, device, software),
        "memory": layer_seconds.elementwise(model, how, device, software),
        "tensor parallelism": layer_seconds.tensor(model, how, device, software),
        "context parallelism": layer_seconds.context(model, how, device, software),
        "expert parallelism": layer_seconds.experts(model, how, device, software),
    }
    shares = footprint.count_again(model, how)
    again = layer_seconds.sum_again(model, how, device, software, shares)
    again += sum(shares.get(name, 0.0) * part.forward for name, part in parts.items())
    if how.recompute == "latent":
        again = layer_seconds.expansion(model, how, device, software)
    computed = sum(parts.values(), Times(backward=again * footprint.count_times(how) * how.recomputed))
    # the host starts the kernels; W has a third of those of B
    least = software.expert_layer if model.experts or software.is_eager else 0.0
    backward, weights = max(1.5 * least, computed.backward), max(0.5 * least, computed.weights)
    total = Times(max(least, computed.forward), backward, weights)
    parts["host"] = total + computed * -1
    parts["sharded parameters"] = layer_seconds.sharding(model, how, device, software, total)
    total += parts["sharded parameters"]
    if how.offload:
        size = footprint.residual_bytes(model, how.with_policy(offload=False), software)
        parts["offload"] = layer_seconds.offloading(device, total, size)
        total += parts["offload"]
    return total, tuple((name, part.total) for name, part in parts.items() if part.total)


def balance(model: Transformer, how: Configuration, parts: LayerParts, route: tuple[int, ...]) -> tuple[int, ...]:
    """Distribute layers over stages: minimize the slowest submesh, and after that the slowest stage.

    One layer after the other goes to the submesh that has least to do, there to the stage that has; the embedding and
    the head are there before.
    """
    seconds, sizes = parts.layer.total, [1] * how.stages
    busy = [0.0] * how.stages
    busy[0] += parts.embedding.total
    busy[-1] += parts.head.total
    rows: list[list[tuple[float, int]]] = [[] for _ in range(how.pp)]  # heaps
    for stage, row in zip(range(how.stages), itertools.cycle(route), strict=False):
        heapq.heappush(rows[row], (busy[stage], stage))
    queue = [(sum(time for time, _ in of) + len(of) * seconds, of[0], row) for row, of in enumerate(rows)]
    heapq.heapify(queue)
    for _ in range(model.layers - how.stages):
        time, (least, stage), row = queue[0]
        heapq.heapreplace(rows[row], (least + seconds, stage))
        heapq.heapreplace(queue, (time + seconds, rows[row][0], row))
        sizes[stage] += 1
    return tuple(sizes)


def times(model: Transformer, how: Configuration, parts: LayerParts) -> tuple[Times, ...]:
    """Return the seconds of each stage: its layers, the embedding on the first and the head on the last."""
    dense, stages = model.dense_layers, []
    equal: dict[tuple[int, int], Times] = {}
    for number in how.count_layers(model.layers):
        first = min(dense, number)
        dense -= first
        if (number, first) not in equal:
            equal[number, first] = parts.layer * (number - first) + parts.first * first
        stages.append(equal[number, first])
    stages[0] += parts.embedding
    stages[-1] += parts.head
    return tuple(stages)
