"""Seconds of what devices send each other: collectives of a layer, and transfers between stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from multimesh.hardware import kernels
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack
from multimesh.planner.configuration import Configuration
from multimesh.planner.products import Times
from multimesh.planner.transformer import Transformer


@dataclass(frozen=True)
class Passed:
    """Arrays that the devices of a group pass on for a microbatch of a layer.

    ``size`` is the bytes of one whole array; ``forward`` and ``backward`` are how often it is gathered, scattered or
    exchanged. A sum over all devices is a scatter and a gather.
    """

    size: float
    forward: int
    backward: int

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return self.size * (self.forward + self.backward)

    def times(self, one: float) -> Times:
        """Return the seconds of all of them, from those of one."""
        return Times(self.forward * one, self.backward * one)


def tensor_arrays(model: Transformer, how: Configuration) -> Passed:
    """Return the arrays of tensor parallelism: with sequence parallelism inputs are gathered again for W.

    Those of routed experts are of `expert_tensor_arrays`.
    """
    number = 2 if model.experts and not model.shared_ffn else 4
    return Passed(2.0 * how.tokens * model.hidden, number, number + 1 if how.sequence_parallel else number)


def context_arrays(model: Transformer, how: Configuration) -> Passed:
    """Return the arrays of context parallelism: keys and values of the other devices, and their gradients."""
    seen = min(1.0, model.seen(how.sequence) / how.sequence)
    return Passed(2.0 * how.tokens * model.keys_and_values / how.tp * how.cp * seen, 1, 2)


def expert_arrays(model: Transformer, how: Configuration) -> Passed:
    """Return the arrays of expert parallelism: tokens to their experts and back."""
    return Passed(2.0 * how.tokens * model.hidden / how.tp * model.active * how.load, 2, 2)


def expert_tensor_arrays(model: Transformer, how: Configuration) -> Passed:
    """Return the arrays that the devices of an expert gather from each other, and scatter: all copies of tokens."""
    return Passed(2.0 * how.tokens * how.expert_tp / how.tp * model.hidden * model.active * how.load, 2, 2)


def tensor(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of the collectives of tensor parallelism."""
    arrays = tensor_arrays(model, how)
    if stack.keeps_gathered:
        arrays = dataclasses.replace(arrays, backward=arrays.forward)
    return arrays.times(kernels.gather(device, arrays.size, how.tp) * stack.exposed_tensor)


def context(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of context parallelism."""
    arrays = context_arrays(model, how)
    return arrays.times(kernels.gather(device, arrays.size, how.cp, how.tp) * stack.exposed_context)


def experts(model: Transformer, how: Configuration, device: Device, stack: Stack) -> Times:
    """Return the seconds of expert parallelism, and of what the devices of an expert send each other."""
    if not model.experts:
        return Times()
    inside, arrays = expert_tensor_arrays(model, how), expert_arrays(model, how)
    copies = model.active if stack.sent_once else 1.0
    sent = inside.times(kernels.gather(device, inside.size, how.expert_tp))
    sent += arrays.times(kernels.exchange(device, arrays.size, how.ep, how.expert_tp, copies))
    return sent * stack.exposed_experts


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
    inner = how.tp * (1 if how.sharded == "parameters" else how.cp)
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
    return how.fsdp * (how.dp * how.cp if how.sharded == "parameters" else 1)


def hop(model: Transformer, how: Configuration, device: Device, stack: Stack) -> tuple[float, float]:
    """Return the seconds of a transfer between stages, and the part of a cell's two that keeps it from computing."""
    if how.pp == 1:
        return 0.0, 0.0
    size = 2.0 * how.tokens * model.hidden / how.tp  # its devices share the bytes, and gather them where they arrive
    inner = how.tp * how.cp * how.dp * how.fsdp
    one = kernels.send(device, size, far=inner * how.pp > device.domain)
    waits = one * (stack.blocking_interleaved if how.interleave > 1 else stack.blocking)
    return one, 2 * (waits + stack.transfer)
