"""Seconds of what devices send each other: collectives of a layer, and transfers between stages."""

from __future__ import annotations

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner.configuration import Configuration
from multimesh.planner.products import Times
from multimesh.planner.transformer import Transformer


def tensor(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of the collectives of tensor parallelism.

    Four gathers or scatters of a layer forward, four backward, and with sequence parallelism two more.
    """
    one = kernels.gather(device, 2.0 * how.tokens * model.hidden, how.tp) * stack.exposed_tensor
    return Times(4 * one, (5 if how.sequence_parallel else 4) * one)


def context(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of context parallelism: keys and values of the other devices, and their gradients."""
    size = (
        2.0 * how.tokens * model.keys_and_values / how.tp * how.cp * min(1.0, model.seen(how.sequence) / how.sequence)
    )
    one = kernels.gather(device, size, how.cp, how.tp) * stack.exposed_context
    return Times(one, 2 * one)


def experts(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of expert parallelism: tokens to their experts and back."""
    if not model.experts or how.ep == 1:
        return Times()
    size = 2.0 * how.tokens * model.hidden / how.tp * model.active * how.load
    one = 2 * kernels.exchange(device, size, how.ep, how.expert_tp, model.active) * stack.exposed_experts
    return Times(one, one)


def sharding(model: Transformer, how: Configuration, device: Device, stack: Stack, layer: Times) -> Times:
    """Return the seconds that gathers of sharded parameters and scatters of their gradients add to a layer.

    ``model``, ``how``, ``device``, ``stack``: as in `multimesh.planner.step.forecast`.
    ``layer``: seconds of the layer that may hide them.
    """
    ranks = shards(how)
    if ranks == 1:
        return Times()
    one = _gather(model, how, device, stack, ranks)
    if how.gather_once:
        one /= how.microbatches
    back = layer.backward + layer.weights

    def added(compute: float, transfer: float) -> float:
        return max(compute, transfer) + stack.exposed_parameters * min(compute, transfer) - compute

    return Times(added(layer.forward, one), added(back, 2 * one))


def _gather(model: Transformer, how: Configuration, device: Device, stack: Stack, ranks: int) -> float:
    """Return the seconds of a gather of a layer's parameters; experts are gathered among those that hold the same."""
    always = 2.0 * (model.always_parameters if model.experts else model.dense_layer_parameters) / how.tp
    inner = how.tp * how.cp
    if not stack.rails:
        own = always + 2.0 * model.expert_parameters / (how.ep * how.expert_tp)
        return own / (device.network * device.rates.network)
    one = kernels.gather(device, always, ranks, inner)
    if model.experts:
        held = 2.0 * model.expert_parameters / (how.ep * how.expert_tp)
        one += kernels.gather(device, held, max(1.0, ranks / how.ep), inner * min(how.ep, ranks))
    return one


def offloading(how: Configuration, device: Device, layer: Times, kept: float) -> Times:
    """Return the seconds that ``kept`` bytes of a layer, sent to the host and back, add beside the computation."""
    if not how.offload:
        return Times()
    one = kept / device.host
    return Times(max(0.0, one - layer.forward), max(0.0, one - layer.backward - layer.weights))


def shards(how: Configuration) -> int:
    """Return the devices that share the parameters of a layer beyond tensor parallelism."""
    return how.fsdp * (how.dp if how.sharded == "parameters" else 1)


def hop(model: Transformer, how: Configuration, device: Device, stack: Stack) -> tuple[float, float]:
    """Return the seconds of a transfer between stages, and the part of a cell's two that keeps it from computing."""
    if how.pp == 1:
        return 0.0, 0.0
    size = 2.0 * how.tokens * model.hidden / how.tp  # its devices share the bytes, and gather them where they arrive
    inner = how.tp * how.cp * how.dp * how.fsdp
    one = kernels.send(device, size, far=inner * how.pp > device.domain)
    return one, 2 * one * (stack.blocking_interleaved if how.interleave > 1 else stack.blocking)
