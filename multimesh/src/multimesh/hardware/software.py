"""Software that runs the layers of a transformer."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from multimesh.errors import UsageError


@dataclass(frozen=True)
class Stack:
    """The cost of a training framework's kernels and collectives beside the sheet's rates. All numbers are fitted.

    Attributes
    ----------
    name, about
        A name and a version.
    fused_attention
        Whether scores of attention stay on the chip.
    flash2
        Whether fused attention is FlashAttention 2, also where later kernels are faster.
    passes
        Arrays of bfloat16 of the width of the model that the element-wise kernels of a layer read or write forward.
    replicated
        Share of ``passes`` that tensor parallelism without sequence parallelism leaves on every device.
    score_passes
        The same for scores of attention where it is not fused, forward and backward each.
    head_passes
        The same for the logits.
    misaligned
        How many times longer attention takes whose heads are no multiple of 8 elements, where it is not fused.
    exposed_tensor, exposed_gradients, exposed_parameters, exposed_context
        Share of the time of collectives of tensor, data, fully sharded and context parallelism that computation does
        not hide.
    broadcasts
        Tensors of a layer whose owner broadcasts them when the optimizer is done, one after the other, where ZeRO-1
        gives each rank whole tensors; 0: it gathers equal slices of all.
    blocking
        Share of the time of a transfer between stages that keeps both ends from computing; ``blocking_interleaved``
        where a submesh has several stages.
    transfer
        Seconds of the host for a transfer between stages, in which neither end computes.
    rails
        Share of a ring's bandwidth that sharded parameters get; 0: that of one network adapter a device.
    year
        When it was measured, such as 2025.5.
    expert_passes
        Times that the kernels around experts (routing, permutation, quantization) read or write the tokens of each
        expert, forward.
    grouped
        Times that the products of experts take longer than equal ones of their own.
    exposed_experts
        Share of the time of all-to-alls of expert parallelism that computation does not hide.
    sent_once
        Whether a token crosses the network once for each domain that has experts of it, and not once for each expert.
    bias_kernels
        Whether biases of experts, and limits of what enters their activation, have kernels of their own.
    jitter
        Share of a step that each doubling of the devices beyond a domain adds: the slowest of many.
    layer, expert_layer
        Least seconds of a layer forward, and of one with experts: what the host takes to start its kernels.
    kernel
        Seconds between the kernels of a layer for each matrix product.
    step
        Seconds of a step beside everything else.
    parameter_bytes, gradient_bytes, optimizer_bytes
        Of a parameter.
    copies
        Whether element-wise kernels are not fused, so that they keep arrays that no product takes: the activation of
        the MLP before its gate, keys and values beside those that came with the queries, and the result of attention in
        another layout where a microbatch has several sequences.
    keeps_gathered
        Whether the inputs of products that tensor parallelism gathers are kept for the backward pass. Otherwise it
        gathers them again.
    permuted
        Arrays of tokens in the order of their experts that a layer keeps: with 1 the probabilities weigh inside of the
        experts, with 2 what comes out of them is kept too.
    logit_bytes
        Of a logit at the peak.
    held_ends
        Whether fully sharded parallelism has the embedding and the head gathered all the time, and room for the buffer
        that it gathers them into. Otherwise it gathers one of them where it is used.
    summed_bytes
        Of a gradient that a device has whole while the microbatches add to it, where sharded parameters are gathered
        once a step.
    reserved
        Bytes of a device for the driver, libraries, and buffers of collectives.
    """

    name: str
    about: str
    fused_attention: bool = True
    flash2: bool = False
    passes: float = 0.0
    replicated: float = 1.0
    score_passes: float = 0.0
    head_passes: float = 0.0
    misaligned: float = 1.0
    exposed_tensor: float = 1.0
    exposed_gradients: float = 1.0
    exposed_parameters: float = 1.0
    exposed_context: float = 1.0
    broadcasts: float = 0.0
    blocking: float = 1.0
    blocking_interleaved: float = 1.0
    transfer: float = 0.0
    rails: float = 1.0
    year: float = 2026.0
    expert_passes: float = 2.0
    grouped: float = 1.2
    exposed_experts: float = 1.0
    sent_once: bool = True
    bias_kernels: bool = False
    jitter: float = 0.0
    layer: float = 0.0
    expert_layer: float = 0.0
    kernel: float = 0.0
    step: float = 0.0
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    copies: bool = False
    keeps_gathered: bool = False
    permuted: float = 2.0
    logit_bytes: float = 8.0
    held_ends: bool = False
    summed_bytes: float = 2.0
    reserved: float = 2e9


def stack(name: str | Stack) -> Stack:
    """Look a stack up; a `Stack` is returned as it is.

    Raises
    ------
    UsageError
        If the table has none of this name.
    """
    if isinstance(name, Stack):
        return name
    tables = _table()
    if name not in tables:
        raise UsageError(f"stack: there is no {name!r}; known are {', '.join(tables)}")
    return tables[name]


def stack_names() -> tuple[str, ...]:
    """Return the stacks of the table that comes with MultiMesh."""
    return tuple(_table())


@functools.cache
def _table() -> Mapping[str, Stack]:
    text = resources.files("multimesh.hardware").joinpath("stacks.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {name: make_stack(name, tables) for name in tables}


def make_stack(name: str, tables: Mapping[str, Mapping[str, Any]]) -> Stack:
    """Return the stack that a table describes, with the fields of the one that it is like."""
    fields, base = dict(tables[name]), str(tables[name].get("like", ""))
    while base:
        fields = {**tables[base], **fields}
        base = tables[base].get("like", "")
    fields.pop("like", None)
    return Stack(name=name, **fields)
