"""Seconds of the kernels of a layer on one device: matrix products, attention, and what passes the memory between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner import saved
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

Product = tuple[float, float, float, float]  # how many of [m, k] times [k, n] run together, and m, k, n

_GATED_PASSES, _PLAIN_PASSES = 6.0, 4.0  # arrays of the width of the MLP that its activation reads or writes
_BACKWARD_PASSES = 1.5  # of those forward
_FUSED_BACKWARD = 2.5 / 0.85  # attention computes its scores again, and has more products of less reuse
_PAD = 64  # elements of a head that a product of unfused attention takes at a time
_ROUTED = 8.0  # bytes of a token and expert that the router reads and writes


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


def products(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of the matrix products of a layer."""
    shapes = list(_shapes(model, how))

    def seconds(of: list[Product], *, cast: bool) -> float:
        return sum(
            kernels.matmul(device, m, k, n, how.precision, count, cast=cast) * (stack.grouped if count > 1 else 1)
            + stack.kernel
            for count, m, k, n in of
        )

    inputs = [(count, m, n, k) for count, m, k, n in shapes]
    weights = [(count, k, m, n) for count, m, k, n in shapes]
    return Times(seconds(shapes, cast=True), seconds(inputs, cast=True), seconds(weights, cast=False))


def operations(model: Transformer, how: Configuration) -> float:
    """Return the operations of the matrix products of a layer on a device, for a microbatch forward and backward.

    Two for each multiplication. Attention between its projections is left out.
    """
    once = sum(2.0 * count * m * k * n for count, m, k, n in _shapes(model, how))
    return once * (3 + (how.recomputed * saved.again(model, how) if how.recompute == "full" else 0))


def _shapes(model: Transformer, how: Configuration) -> Iterator[Product]:
    tokens, tp = how.tokens, how.tp
    for rows, columns, shards_columns in model.projections:
        yield (1, tokens, rows, columns / tp) if shards_columns else (1, tokens, rows / tp, columns)
    if not model.experts:
        yield 1, tokens, model.hidden, model.up / tp
        yield 1, tokens, model.ffn / tp, model.hidden
        return
    if model.shared_ffn:
        yield 1, tokens, model.hidden, model.shared_ffn * model.gates / tp
        yield 1, tokens, model.shared_ffn / tp, model.hidden
    yield 1, tokens / tp, model.hidden, model.experts
    count = max(1.0, model.experts / how.ep)  # experts on this device, with tokens of all that share them
    rows = tokens * how.expert_tp / tp * model.active * how.load / count
    yield count, rows, model.hidden, model.expert * model.gates / how.expert_tp
    yield count, rows, model.expert / how.expert_tp, model.hidden


def attention(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of attention between its projections."""
    tokens, seen = how.tokens, model.seen(how.sequence)
    width = (model.queries + model.values) / how.tp
    if stack.fused_attention:
        operations = tokens * seen * width
        forward = kernels.attention(device, operations, model.head_size, how.sequence / how.cp) + stack.kernel
        return Times(forward, _FUSED_BACKWARD * forward)
    head = model.head_size
    padded = math.ceil(head / _PAD) * _PAD / head * (stack.misaligned if head % 8 else 1.0)
    scored = 2.0 * tokens * how.sequence * width * padded / device.matmul_rate("bf16")
    scores = kernels.move(device, stack.score_passes * model.heads / how.tp * tokens * how.sequence)
    return Times(scored + scores, 2 * scored + scores)


def elementwise(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of the element-wise kernels."""
    whole = 0.0 if how.sequence_parallel else stack.replicated
    width = stack.passes * model.hidden * (whole + (1 - whole) / how.tp)
    inner = (_GATED_PASSES if model.gated else _PLAIN_PASSES) * _inner(model, how)
    routed = 0.0
    if model.experts:
        gathered = 2.0 * model.hidden * (1 + model.active * how.load)
        routed = (stack.expert_passes * gathered + _ROUTED * model.experts) / how.tp
    forward = kernels.move(device, how.tokens * (width + inner + routed))
    return Times(forward, _BACKWARD_PASSES * forward)


def _inner(model: Transformer, how: Configuration) -> float:
    """Return the width of the MLP on a device, for each of its tokens."""
    if not model.experts:
        return model.ffn / how.tp
    return (model.expert * model.active * how.load + model.shared_ffn) / how.tp
