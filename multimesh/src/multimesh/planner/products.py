"""Seconds of the kernels of a layer on one device: matrix products, attention, and what passes the memory between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner import recomputation
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

Product = tuple[float, float, float, float]  # how many of [m, k] times [k, n] run together, and m, k, n

_GATED_PASSES, _PLAIN_PASSES = 6.0, 4.0  # arrays of the width of the MLP that its activation reads or writes
_BACKWARD_PASSES = 1.5  # of those forward
_FUSED_BACKWARD = 2.5 / 0.85  # attention computes its scores again, and has more products of less reuse
_PAD = 64  # elements of a head that a product of unfused attention takes at a time
_ROUTED = 8.0  # bytes of a token and expert that the router reads and writes
_BAND = 256  # keys of tiles that local attention masks in part: it takes tiles of 128 keys and 256 queries
# Arrays of bfloat16 that unfused kernels read and write for a token and expert, forward and backward: of the width of
# an expert for the limits of its activation (clamp, concatenate), and of the model's for the bias (multiply, add,
# concatenate; the bias and the probability have sums of their own). DeepEP and HybridEP give probabilities of float32,
# so the bias is added in it. Counted in NVIDIA/Megatron-LM, core_r0.15 and core_r0.16: weighted_bias_quick_geglu_impl,
# TEGroupedMLP._apply_bias, and the managers of the flex dispatcher.
_LIMITED, _BIASED, _BIASED_FLOAT32 = (8.0, 10.0), (6.0, 6.0), (14.0, 18.0)


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
    shapes = [shape for _, shape in _shapes(model, how)]
    inputs = [(count, m, n, k) for count, m, k, n in shapes]
    weights = [(count, k, m, n) for count, m, k, n in shapes]
    return Times(*(_seconds(of, how, device, stack, cast=of is not weights) for of in (shapes, inputs, weights)))


def sum_again(
    model: Transformer, how: Configuration, device: Device, stack: Stack, again: Mapping[str, float]
) -> float:
    """Return the seconds of the products of a layer that the backward pass computes again: a share of each kind."""
    return sum(
        share * _seconds([shape], how, device, stack, cast=True)
        for kind, shape in _shapes(model, how)
        if (share := again.get(kind, 0.0))
    )


def _seconds(of: Sequence[Product], how: Configuration, device: Device, stack: Stack, *, cast: bool) -> float:
    return sum(
        kernels.matmul(device, m, k, n, how.precision, count, cast=cast) * (stack.grouped if count > 1 else 1)
        + stack.kernel
        for count, m, k, n in of
    )


def operations(model: Transformer, how: Configuration) -> float:
    """Return the operations of the matrix products of a layer on a device, for a microbatch forward and backward.

    Two for each multiplication. Attention between its projections is left out.
    """
    again, times = recomputation.count_again(model, how), recomputation.count_times(how)
    return sum(
        2.0 * count * m * k * n * (3 + how.recomputed * times * again.get(kind, 0.0))
        for kind, (count, m, k, n) in _shapes(model, how)
    )


def _shapes(model: Transformer, how: Configuration) -> Iterator[tuple[str, Product]]:
    """Yield the matrix products of a layer forward, each after its kind in `recomputation.PRODUCTS`."""
    tokens, tp = how.tokens, how.tp
    for rows, columns, shards_columns in model.projections:
        if shards_columns:
            yield "into attention", (1, tokens, rows, columns / tp)
        else:
            yield "out of attention", (1, tokens, rows / tp, columns)
    if not model.experts:
        yield "up", (1, tokens, model.hidden, model.up / tp)
        yield "down", (1, tokens, model.ffn / tp, model.hidden)
        return
    if model.shared_ffn:
        yield "up", (1, tokens, model.hidden, model.shared_ffn * model.gates / tp)
        yield "down", (1, tokens, model.shared_ffn / tp, model.hidden)
    yield "up", (1, tokens / tp, model.hidden, model.experts)
    count = max(1.0, model.experts / how.ep)  # experts on this device, with tokens of all that share them
    rows = tokens * how.expert_tp / tp * model.active * how.load / count
    yield "up", (count, rows, model.hidden, model.expert * model.gates / how.expert_tp)
    yield "down", (count, rows, model.expert / how.expert_tp, model.hidden)


def expansion(model: Transformer, how: Configuration, device: Device, stack: Stack) -> float:
    """Return the seconds in which the backward pass computes the heads of latent attention again."""
    shapes = [(1, how.tokens, rows, columns / how.tp) for rows, columns in model.expansions]
    return _seconds(shapes, how, device, stack, cast=True)


def attention(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of attention between its projections."""
    tokens, sequence = how.tokens, float(how.sequence)
    width = (model.queries + model.values) / how.tp
    if stack.fused_attention:

        def seconds(share: float, seen: float) -> float:
            operations = share * tokens * seen * width
            return share and kernels.attention(device, operations, model.head_size, seen / how.cp, flash2=stack.flash2)

        forward, backward = kernels.attention_in_fp8(model.head_size) if "attention" in how.narrow else (1.0, 1.0)
        local = min(sequence, 2.0 * (model.window + _BAND)) if model.window else sequence
        masked = sequence if "attention" in how.narrow else local  # fp8 computes all scores backward, and masks them
        everywhere = seconds(1 - model.windowed, sequence) + stack.kernel
        return Times(
            forward * (everywhere + seconds(model.windowed, local)),
            backward * _FUSED_BACKWARD * (everywhere + seconds(model.windowed, masked)),
        )
    head = model.head_size
    padded = math.ceil(head / _PAD) * _PAD / head * (stack.misaligned if head % 8 else 1.0)
    scored = 2.0 * tokens * how.sequence * width * padded / device.matmul_rate("bf16")
    scores = kernels.move(device, stack.score_passes * model.heads / how.tp * tokens * how.sequence)
    return Times(scored + scores, 2 * scored + scores)


def elementwise(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of the element-wise kernels."""
    whole = 0.0 if how.sequence_parallel else stack.replicated
    width = stack.passes * model.hidden * (whole + (1 - whole) / how.tp)
    inner = (_GATED_PASSES if model.gated else _PLAIN_PASSES) * model.mlp_width(how.load) / how.tp
    routed = 0.0
    if model.experts:
        gathered = 2.0 * model.hidden * (1 + model.active * how.load)
        unsorted = not stack.sent_once and model.experts <= how.ep  # what comes for one expert is in order
        routed = (stack.expert_passes / (2 if unsorted else 1) * gathered + _ROUTED * model.experts) / how.tp
    forward = how.tokens * (width + inner + routed)
    biases = _biases(model, how, stack)
    return Times(
        kernels.move(device, forward) + kernels.move(device, biases[0]),
        kernels.move(device, _BACKWARD_PASSES * forward) + kernels.move(device, biases[1]),
    )


def _biases(model: Transformer, how: Configuration, stack: Stack) -> tuple[float, float]:
    """Return the bytes of kernels for biases of experts and limits of their activation, forward and backward."""
    if not (model.biased and stack.bias_kernels):
        return 0.0, 0.0
    copies = 2.0 * how.tokens / how.tp * model.active * how.load
    added = _BIASED_FLOAT32 if stack.sent_once else _BIASED
    forward, backward = (
        copies * (limits * model.expert + biases * model.hidden) for limits, biases in zip(_LIMITED, added, strict=True)
    )
    return forward, backward
