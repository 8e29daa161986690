"""Seconds of the parts of a transformer on a device: a layer, the embedding, the head, a transfer between stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.stacks import Stack
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

Product = tuple[float, float, float]  # [m, k] times [k, n]

_GATED_PASSES, _PLAIN_PASSES = 6.0, 4.0  # arrays of the width of the MLP that its activation reads or writes
_BACKWARD_PASSES = 1.5  # of those forward
_FUSED_BACKWARD = 2.5 / 0.85  # attention computes its scores again, and has more products of less reuse
_EMBEDDING_PASSES, _UPDATE_PASSES = 4.0, 8.0
_PAD = 64  # elements of a head that a product of unfused attention takes at a time


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
        """Of all three."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True)
class LayerParts:
    """Seconds of the parts of a model that stages are made of.

    Attributes
    ----------
    layer, embedding, head
        Of a microbatch.
    hop
        Of a transfer between neighboring stages.
    blocked
        Part of the two transfers of a cell, one that it waits for and one that it sends, in which its submesh does not
        compute.
    shares
        What a layer's seconds consist of, by name.
    """

    layer: Times
    embedding: Times
    head: Times
    hop: float
    blocked: float
    shares: tuple[tuple[str, float], ...]


def parts(model: Transformer, how: Configuration, device: Device, stack: Stack) -> LayerParts:
    """Seconds of the parts of a model on a device, for a microbatch of ``how.tokens`` tokens."""
    layer, shares = _layer(model, how, device, stack)
    hop, blocked = _hop(model, how, device, stack)
    return LayerParts(layer, _embedding(model, how, device), _head(model, how, device, stack), hop, blocked, shares)


def _layer(
    model: Transformer, how: Configuration, device: Device, stack: Stack
) -> tuple[Times, tuple[tuple[str, float], ...]]:
    products = _products(model, how, device, stack)
    attention = _attention(model, how, device, stack)
    passed = _passed(model, how, device, stack)
    tensor = _tensor(model, how, device, stack)
    context = _context(model, how, device, stack)
    experts = _experts(model, how, device)
    rest = Times(passed, _BACKWARD_PASSES * passed) + tensor + context + experts
    whole = products + attention + rest
    if how.recompute == "full":
        whole += Times(backward=whole.forward)
    elif how.recompute != "none":  # element-wise kernels that run again are fused with those of the backward pass
        whole += Times(backward=attention.forward)
    started = max(1.0, stack.layer / whole.forward, 2 * stack.layer / (whole.backward + whole.weights))
    sharded = _sharded(model, how, device, stack, whole)
    shares = {
        "matrix products": products.total,
        "attention": attention.total,
        "memory": (1 + _BACKWARD_PASSES) * passed,
        "tensor parallelism": tensor.total,
        "context parallelism": context.total,
        "expert parallelism": experts.total,
        "sharded parameters": sharded.total,
    }
    return (whole + sharded) * started, tuple((name, s) for name, s in shares.items() if s)


def _products(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    tokens, tp = how.tokens, how.tp
    dense: list[Product] = [
        (tokens, model.hidden, (model.queries + 2 * model.keys) / tp),
        (tokens, model.queries / tp, model.hidden),
    ]
    rows, count = tokens, 1.0
    if model.experts:
        count = max(1.0, model.experts / how.ep)  # experts on this device, each with its part of the tokens
        rows = tokens * model.active / count
    mlp: list[Product] = [(rows, model.hidden, model.up / tp), (rows, model.ffn / tp, model.hidden)]

    def seconds(shapes: Iterable[Product]) -> float:
        return sum(kernels.matmul(device, m, k, n, how.precision) + stack.kernel for m, k, n in shapes)

    def of(shapes: Sequence[Product]) -> Times:
        inputs = [(m, n, k) for m, k, n in shapes]
        weights = [(k, m, n) for m, k, n in shapes]
        return Times(seconds(shapes), seconds(inputs), seconds(weights))

    return of(dense) + of(mlp) * count


def _attention(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    tokens, width = how.tokens, model.queries / how.tp
    if stack.fused_attention:
        forward = kernels.attention(device, 2.0 * tokens * how.sequence * width) + stack.kernel
        return Times(forward, _FUSED_BACKWARD * forward)
    head = model.head_size
    padded = math.ceil(head / _PAD) * _PAD / head * (stack.misaligned if head % 8 else 1.0)
    products = 4.0 * tokens * how.sequence * width * padded / device.matmul_rate("bf16")
    scores = kernels.moved(device, stack.score_passes * model.heads / how.tp * tokens * how.sequence)
    return Times(products + scores, 2 * products + scores)


def _passed(model: Transformer, how: Configuration, device: Device, stack: Stack) -> float:
    """Seconds of the element-wise kernels forward."""
    whole = 0.0 if how.sequence_parallel else stack.replicated
    width = stack.passes * model.hidden * (whole + (1 - whole) / how.tp)
    inner = (_GATED_PASSES if model.gated else _PLAIN_PASSES) * model.ffn * max(1, model.active) / how.tp
    return kernels.moved(device, how.tokens * (width + inner))


def _tensor(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Four gathers or scatters of a layer forward, four backward, and with sequence parallelism two more."""
    one = kernels.gathered(device, 2.0 * how.tokens * model.hidden, how.tp) * stack.exposed_tensor
    return Times(4 * one, (5 if how.sequence_parallel else 4) * one)


def _context(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Keys and values of the other devices, and their gradients."""
    size = 2.0 * how.tokens * 2 * model.keys / how.tp * how.cp
    one = kernels.gathered(device, size, how.cp, how.tp) * stack.exposed_context
    return Times(one, 2 * one)


def _experts(model: Transformer, how: Configuration, device: Device) -> Times:
    """Tokens to their experts and back."""
    if not model.experts or how.ep == 1:
        return Times()
    size = 2.0 * how.tokens * model.hidden / how.tp * model.active
    one = 2 * kernels.gathered(device, size, how.ep, how.tp * how.cp)
    return Times(one, one)


def _sharded(model: Transformer, how: Configuration, device: Device, stack: Stack, layer: Times) -> Times:
    """What gathers of parameters and scatters of gradients add to a layer."""
    ranks = shards(how)
    if ranks == 1:
        return Times()
    size = 2.0 * model.held_parameters(how.ep) / how.tp
    one = kernels.gathered(device, size, ranks, how.tp * how.cp)
    if not stack.rails:
        one = size / (device.network * device.rates.network)
    back = layer.backward + layer.weights

    def added(compute: float, transfer: float) -> float:
        return max(compute, transfer) + stack.exposed_parameters * min(compute, transfer) - compute

    return Times(added(layer.forward, one), added(back, 2 * one))


def shards(how: Configuration) -> int:
    """Devices that share the parameters of a layer beyond tensor parallelism."""
    return how.fsdp * (how.dp if how.sharded == "parameters" else 1)


def _embedding(model: Transformer, how: Configuration, device: Device) -> Times:
    one = kernels.moved(device, 2.0 * how.tokens * model.hidden)
    return Times(_EMBEDDING_PASSES / 2 * one, 0.0, _UPDATE_PASSES / 2 * one)


def _head(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    columns = model.vocabulary / how.tp
    product = kernels.matmul(device, how.tokens, model.hidden, columns)
    logits = kernels.moved(device, stack.head_passes * how.tokens * columns)
    return Times(product + logits, product + logits, product)


def _hop(model: Transformer, how: Configuration, device: Device, stack: Stack) -> tuple[float, float]:
    if how.pp == 1:
        return 0.0, 0.0
    size = 2.0 * how.tokens * model.hidden / how.tp  # its devices share the bytes, and gather them where they arrive
    inner = how.tp * how.cp * how.dp * how.fsdp
    hop = kernels.sent(device, size, far=inner * how.pp > device.domain)
    return hop, 2 * hop * (stack.blocking_interleaved if how.interleave > 1 else stack.blocking)
