"""Seconds of the parts of a transformer on a device (layer, embedding, head, transfer), and of its stages.

A layer has matrix products, attention, what passes the memory between, and what devices send each other.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from multimesh_planner import footprint
from multimesh_planner.configuration import Configuration
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import Device
from multimesh_planner.hardware.software import Software
from multimesh_planner.transformer import Transformer

Product = tuple[float, float, float, float]  # how many of [m, k] times [k, n] run together, and m, k, n

_GATED_PASSES, _PLAIN_PASSES = 6.0, 4.0  # arrays of the width of the MLP that its activation reads or writes
_BACKWARD_PASSES = 1.5  # of those forward
_FUSED_BACKWARD = 2.5 / 0.85  # attention computes its scores again, and has more products of less reuse
_PAD = 64  # elements of a head that a product of unfused attention takes at a time
_ROUTED = 8.0  # bytes of a token and expert that the router reads and writes
_BAND = 256  # keys of tiles that local attention masks in part: it takes tiles of 128 keys and 256 queries
_EMBEDDING_PASSES, _UPDATE_PASSES = 4.0, 8.0
_ELSEWHERE = {"sharded": "none", "gather_once": False, "offload": False, "offload_optimizer": False}
"""Fields that do not tell what a layer computes."""

_REPLICATED = 0.22  # of the passes, 12 arrays of two norms and two sums, without sequence parallelism on all devices


@dataclass(frozen=True)
class Times:
    """Seconds of a microbatch: F, what B computes for the input, and W for the parameters."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.forward + other.forward, self.backward + other.backward, self.weights + other.weights)

    def __mul__(self, number: float) -> Times:
        return Times(self.forward * number, self.backward * number, self.weights * number)

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward + self.backward + self.weights


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
    return LayerParts(layer, embedding, last, *hop(model, how, device, software), shares, first)


def _layer(
    model: Transformer, how: Configuration, device: Device, software: Software
) -> tuple[Times, tuple[tuple[str, float], ...]]:
    like = how.with_policy(batch=1, dp=1, fsdp=1, pp=min(2, how.pp), interleave=1, layers=(), **_ELSEWHERE)
    if not footprint.list_names(how):
        like = like.with_policy(schedule="1f1b")
    parts, total = _compute(model, like, device, software)
    waiting, offload = sharding(model, how, device, software, total), Times()
    total += waiting
    if how.offload:  # to the host and back, beside the computation
        one = footprint.residual_bytes(model, how.with_policy(offload=False), software) / device.host
        offload = Times(max(0.0, one - total.forward), max(0.0, one - total.backward - total.weights))
    named = {**parts, "sharded parameters": waiting, "offload": offload}
    return total + offload, tuple((name, part.total) for name, part in named.items() if part.total)


@functools.lru_cache(maxsize=8192)  # a search asks for few layers, on many meshes
def _compute(
    model: Transformer, how: Configuration, device: Device, software: Software
) -> tuple[Mapping[str, Times], Times]:
    """Return the seconds of a layer whose parameters and activations are on its devices: by part, and of all."""
    of = model, how, device, software
    parts = {
        "matrix products": products(*of),
        "attention": attention(*of),
        "memory": elementwise(*of),
        "tensor parallelism": tensor(*of),
        "context parallelism": context(*of),
        "expert parallelism": experts(*of),
    }
    shares, shapes = footprint.count_again(model, how), list(list_shapes(model, how))
    again = sum(
        share * _seconds([shape], how, device, software) for kind, shape in shapes if (share := shares.get(kind, 0.0))
    )
    again += sum(shares.get(name, 0.0) * part.forward for name, part in parts.items())
    if how.recompute == "latent":  # the heads, from what is compressed
        ranks = model.query_rank, model.kv_rank
        expanding = [shape for kind, shape in shapes if kind == "into attention" and shape[2] in ranks]
        again = _seconds(expanding, how, device, software)
    computed = sum(parts.values(), Times(backward=again * how.recomputed))
    # the host starts the kernels; W has a third of those of B
    least = software.expert_layer if model.experts or software.is_eager else 0.0
    backward, weights = max(1.5 * least, computed.backward), max(0.5 * least, computed.weights)
    total = Times(max(least, computed.forward), backward, weights)
    parts["host"] = total + computed * -1
    return parts, total


def products(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of the matrix products of a layer."""
    shapes = [shape for _, shape in list_shapes(model, how)]
    inputs = [(count, m, n, k) for count, m, k, n in shapes]
    weights = [(count, k, m, n) for count, m, k, n in shapes]
    return Times(*(_seconds(of, how, device, software, cast=of is not weights) for of in (shapes, inputs, weights)))


def _seconds(of: Sequence[Product], how: Configuration, device: Device, software: Software, cast: bool = True) -> float:
    return sum(
        kernels.matmul(device, m, k, n, how.precision, count, cast=cast) * (software.grouped if count > 1 else 1)
        + software.kernel
        for count, m, k, n in of
    )


def list_shapes(model: Transformer, how: Configuration) -> Iterator[tuple[str, Product]]:
    """Yield the matrix products of a layer forward, each after its kind in `footprint.PRODUCTS`."""
    tokens, tp = how.tokens, how.tp
    *entering, (rows, columns) = model.projections
    for height, width in entering:
        yield "into attention", (1, tokens, height, width / tp)
    yield "out of attention", (1, tokens, rows / tp, columns)
    if width := model.shared_ffn if model.experts else model.ffn:
        yield "up", (1, tokens, model.hidden, width * model.gates / tp)
        yield "down", (1, tokens, width / tp, model.hidden)
    if model.experts:
        yield "up", (1, tokens / tp, model.hidden, model.experts)
        count = max(1.0, model.experts / how.ep)  # experts on this device, with tokens of all that share them
        copies = tokens * how.expert_tp / tp * model.active * how.load / count
        yield "up", (count, copies, model.hidden, model.expert * model.gates / how.expert_tp)
        yield "down", (count, copies, model.expert / how.expert_tp, model.hidden)


def attention(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of attention between its projections."""
    tokens, sequence = how.tokens, float(how.sequence)
    width = (model.queries + model.values) / how.tp
    if software.fused_attention:

        def seconds(share: float, keys: float) -> float:
            work = share * tokens * keys * width
            return share and kernels.attention(device, work, model.head_size, keys / how.cp, flash2=software.flash2)

        local = min(sequence, 2.0 * (model.window + _BAND)) if model.window else sequence
        forward = seconds(1 - model.windowed, sequence) + seconds(model.windowed, local) + software.kernel
        return Times(forward, _FUSED_BACKWARD * forward)
    padded = math.ceil(model.head_size / _PAD) * _PAD / model.head_size
    scored = 2.0 * tokens * how.sequence * width * padded / device.matmul_rate("bf16")
    scores = kernels.move(device, software.score_passes * model.heads / how.tp * tokens * how.sequence)
    return Times(scored + scores, 2 * scored + scores)


def elementwise(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of the element-wise kernels."""
    replicated = 0.0 if how.sequence_parallel else _REPLICATED
    width = software.passes * model.hidden * (replicated + (1 - replicated) / how.tp)
    inner = (_GATED_PASSES if model.gated else _PLAIN_PASSES) * model.mlp_width(how.load) / how.tp
    routed = 0.0
    if model.experts:
        gathered = 2.0 * model.hidden * (1 + model.active * how.load)
        routed = (software.expert_passes * gathered + _ROUTED * model.experts) / how.tp
    forward = kernels.move(device, how.tokens * (width + inner + routed))
    return Times(forward, _BACKWARD_PASSES * forward)


def tensor(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of the collectives of tensor parallelism, but for those of routed experts.

    A sum over all devices is a scatter and a gather. With sequence parallelism inputs are gathered again for W.
    """
    number = 2 if model.experts and not model.shared_ffn else 4
    one = kernels.gather(device, 2.0 * how.tokens * model.hidden, how.tp) * software.exposed_tensor
    return Times(number * one, (number + how.sequence_parallel) * one)


def context(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of context parallelism: keys and values of the other devices, and their gradients."""
    part = min(1.0, model.mean_keys(how.sequence) / how.sequence)
    size = 2.0 * how.tokens * model.keys_and_values / how.tp * how.cp * part
    one = kernels.gather(device, size, how.cp, how.tp) * software.exposed_context
    return Times(one, 2 * one)


def experts(model: Transformer, how: Configuration, device: Device, software: Software) -> Times:
    """Return the seconds of expert parallelism: tokens to their experts and back.

    The devices of an expert gather all copies of tokens from each other, and scatter them.
    """
    if not model.experts:
        return Times()
    size = 2.0 * how.tokens * model.hidden / how.tp * model.active * how.load
    copies = model.active if software.sent_once else 1.0
    one = kernels.gather(device, how.expert_tp * size, how.expert_tp)
    one += kernels.exchange(device, size, how.ep, how.expert_tp, copies)
    return Times(2 * one, 2 * one) * software.exposed_experts


def sharding(model: Transformer, how: Configuration, device: Device, software: Software, layer: Times) -> Times:
    """Return the seconds that gathers of sharded parameters and scatters of their gradients add to a layer.

    ``layer``: seconds of the layer that may hide them.
    """
    if how.shards == 1:
        return Times()
    always, routed = model.split_parameters(how.tp, how.ep * how.expert_tp, sparse=1.0)
    inner = how.tp * (1 if how.sharded == "parameters" else how.cp)
    one = kernels.gather(device, 2.0 * always, how.shards, inner)
    if routed:  # among the devices that have the same experts
        one += kernels.gather(device, 2.0 * routed, max(1.0, how.shards / how.ep), inner * min(how.ep, how.shards))
    if how.gather_once:
        one /= how.microbatches

    def extra(compute: float, transfer: float) -> float:
        return max(compute, transfer) + software.exposed_parameters * min(compute, transfer) - compute

    return Times(extra(layer.forward, one), extra(layer.backward + layer.weights, 2 * one))


def hop(model: Transformer, how: Configuration, device: Device, software: Software) -> tuple[float, float]:
    """Return the seconds of a transfer between stages, and the part of a cell's two that keeps it from computing."""
    if how.pp == 1:
        return 0.0, 0.0
    size = 2.0 * how.tokens * model.hidden / how.tp  # its devices share the bytes, and gather them where they arrive
    one = kernels.send(device, size, far=how.devices > device.domain)
    return one, 2 * one * (software.blocking_interleaved if how.interleave > 1 else software.blocking)


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
