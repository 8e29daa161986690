"""Seconds of the parts of a transformer on a device: a layer, the embedding, the head, a transfer between stages."""

from __future__ import annotations

from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner import activations, products, recomputation, traffic
from multimesh.planner.configuration import Configuration
from multimesh.planner.products import Times
from multimesh.planner.transformer import Transformer

_EMBEDDING_PASSES, _UPDATE_PASSES = 4.0, 8.0


@dataclass(frozen=True)
class LayerParts:
    """Seconds of the parts of a model that stages are made of."""

    # layer, embedding, head: of a microbatch
    layer: Times
    embedding: Times
    head: Times
    hop: float  # of a transfer between neighboring stages
    # part of the two transfers of a cell, one that it waits for and one that it sends, in which its submesh does not
    # compute
    blocked: float
    shares: tuple[tuple[str, float], ...]  # parts of a layer's seconds, by name
    first: Times  # the same of a layer at the start whose MLP is dense though the others have experts


def parts(model: Transformer, how: Configuration, device: Device, stack: Stack) -> LayerParts:
    """Return the seconds of the parts of a model on a device, for a microbatch of ``how.tokens`` tokens."""
    layer, shares = _layer(model, how, device, stack)
    first = _layer(model.dense, how, device, stack)[0] if model.dense_layers else layer
    head = _head(model, how, device, stack)
    last = head + (layer + head) * model.predicted
    hop, blocked = traffic.hop(model, how, device, stack)
    return LayerParts(layer, _embedding(model, how, device), last, hop, blocked, shares, first)


def _layer(
    model: Transformer, how: Configuration, device: Device, stack: Stack
) -> tuple[Times, tuple[tuple[str, float], ...]]:
    parts = {
        "matrix products": products.products(model, how, device, stack),
        "attention": products.attention(model, how, device, stack),
        "memory": products.elementwise(model, how, device, stack),
        "tensor parallelism": traffic.tensor(model, how, device, stack),
        "context parallelism": traffic.context(model, how, device, stack),
        "expert parallelism": traffic.experts(model, how, device, stack),
    }
    shares = recomputation.count_again(model, how)
    again = products.sum_again(model, how, device, stack, shares)
    again += sum(shares.get(name, 0.0) * part.forward for name, part in parts.items())
    if how.recompute == "latent":
        again = products.expansion(model, how, device, stack)
    whole = sum(parts.values(), Times(backward=again * recomputation.count_times(how) * how.recomputed))
    least = max(stack.layer, stack.expert_layer if model.experts else 0.0)
    started = max(1.0, least / whole.forward, 2 * least / (whole.backward + whole.weights))
    parts["sharded parameters"] = traffic.sharding(model, how, device, stack, whole)
    if how.offload:
        kept = activations.residual_bytes(model, how.changed(offload=False), stack)
        parts["offload"] = traffic.offloading(how, device, whole, kept)
    whole += parts["sharded parameters"] + parts.get("offload", Times())
    return whole * started, tuple((name, part.total) for name, part in parts.items() if part.total)


def _embedding(model: Transformer, how: Configuration, device: Device) -> Times:
    one = kernels.move(device, 2.0 * how.tokens * model.hidden)
    return Times(_EMBEDDING_PASSES / 2 * one, 0.0, _UPDATE_PASSES / 2 * one)


def _head(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    columns = model.vocabulary / how.tp
    precision = how.precision if "head" in how.narrow else "bf16"
    product = kernels.matmul(device, how.tokens, model.hidden, columns, precision)
    logits = kernels.move(device, stack.head_passes * how.tokens * columns)
    return Times(product + logits, product + logits, product)
