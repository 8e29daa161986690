"""Bytes that a layer keeps of a microbatch for its backward pass, and those of what runs at the peak."""

from __future__ import annotations

from multimesh.hardware import kernels
from multimesh.hardware.software import Stack
from multimesh.planner import recomputation, traffic
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

_SCORES = 5.0  # bytes that unfused attention keeps for a score: of softmax, of its dropout, and the mask
_GATHERED = 2.0  # arrays of a width of the model that tensor parallelism has whole at a time: an input and its gradient
_HELD = 2.0  # layers whose gathered parameters, or offloaded activations, are on the device at a time


def residual_bytes(model: Transformer, how: Configuration, software: Stack) -> float:
    """Return the bytes that a layer keeps of a microbatch for its backward pass."""
    if how.offload:
        return 0.0
    if how.recompute != "none" and how.recomputed < 1:
        whole = residual_bytes(model, how.changed(recompute="none"), software)
        less = residual_bytes(model, how.changed(recomputed=1.0), software)
        return how.recomputed * less + (1 - how.recomputed) * whole
    spread = how.tp if how.sequence_parallel else 1
    if how.recompute == "full" or recomputation.list_names(how):
        return 2.0 * how.tokens * model.hidden / spread + recomputation.count_bytes(model, how)
    routed = model.active * how.load if model.experts else 0.0
    width = model.mlp_width(how.load)
    up = width * model.gates
    ranks = model.query_rank + model.kv_rank
    if how.recompute == "minimal":
        products = model.queries + model.keys_and_values + up
        return 2.0 * how.tokens * (2 * model.hidden + ranks + products) / how.tp
    if how.recompute == "alternate":
        products = model.queries + model.keys_and_values / 2 + model.values + width
        unused = model.hidden if software.copies else 0.0  # the last product, which nothing needs
        return 2.0 * how.tokens * ((model.hidden + unused) / spread + (ranks + products) / how.tp)
    size = min(2.0, 2 * kernels.BYTES[how.precision]) / 2  # of an input of a product; two copies where it is narrow
    between = 2.0 * (model.hidden + ranks) / spread + (model.queries + model.keys_and_values + up) / how.tp
    inputs = 2.0 * model.hidden / (1 if software.keeps_gathered else spread) + (model.values + width) / how.tp
    permuted = software.permuted * routed * model.hidden / how.tp
    found = 2.0 * how.tokens * (between + size * (inputs + permuted))
    if how.recompute == "latent":
        found -= 2.0 * how.tokens * (model.queries + model.keys_and_values) / how.tp
    if software.copies:
        again = model.keys_and_values + (width if model.gated else 0.0) + model.values * (how.microbatch > 1)
        found += 2.0 * how.tokens * again / how.tp
    if not software.fused_attention and how.recompute != "selective":
        found += _SCORES * how.tokens * how.sequence * model.heads / how.tp
    return found


def running(model: Transformer, how: Configuration, software: Stack) -> float:
    """Return the bytes of a layer that runs: what it computes again, and the arrays and parameters that it gathered."""
    plain = how.changed(recompute="none", offload=False)
    whole = residual_bytes(model, plain, software) if how.recompute not in ("none", "selective") else 0.0
    if how.offload:
        whole = max(whole, _HELD * residual_bytes(model, how.changed(offload=False), software))
    gathered = _GATHERED * 2.0 * how.tokens * model.hidden if how.sequence_parallel and how.tp > 1 else 0.0
    return whole + gathered + weights_bytes(model, how)


def weights_bytes(model: Transformer, how: Configuration) -> float:
    """Return the bytes of the parameters that sharding brings to a device while a layer runs: two layers, bfloat16."""
    if traffic.shards(how) == 1 or how.gather_once:
        return 0.0
    return _HELD * 2.0 * model.held_parameters(how.ep) / how.tp
