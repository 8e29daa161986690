"""Classes of software that run the layers of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from multimesh.errors import UsageError

from multimesh_planner import tables


@dataclass(frozen=True)
class Software:
    """The cost of a class of training software beside the rates of a data sheet."""

    name: str  # ``pytorch-eager`` has the bands of ``pytorch``
    about: str
    fused_attention: bool = True  # whether scores of attention stay on the chip
    flash2: bool = False  # whether it is FlashAttention 2 where later kernels are faster
    sent_once: bool = False  # a token crosses the network once for each domain with experts of it, not for each expert
    # arrays of bfloat16 that element-wise kernels read or write forward: of the width of the model for a layer, of the
    # scores of attention where it is not fused, of the logits
    passes: float = 0.0
    score_passes: float = 15.0
    head_passes: float = 0.0
    # share of the time of collectives that computation does not hide
    exposed_tensor: float = 1.0
    exposed_gradients: float = 1.0
    exposed_parameters: float = 1.0
    exposed_context: float = 1.0
    exposed_experts: float = 1.0
    # share of the time of a transfer between stages that keeps both ends from computing; with several stages a submesh
    blocking: float = 1.0
    blocking_interleaved: float = 1.0
    expert_passes: float = 2.0  # times that routing and permutation read or write the tokens of each expert, forward
    # whether memory has the rows of experts once for each expert of a device, masked, as by XLA's `ragged_dot` on GPUs,
    # and buffers of ep for the rows of all their devices
    masks_groups: bool = False
    grouped: float = 1.0  # times that the products of experts take longer than equal ones of their own
    # seconds: of a layer with experts, and eagerly of any, forward at least, as the host starts its kernels (backward
    # twice); between the kernels of a layer for each matrix product; of a step beside everything else
    expert_layer: float = 0.0
    is_eager: bool = False
    kernel: float = 0.0
    step: float = 0.0
    jitter: float = 0.0  # share of a step that each doubling of devices beyond a domain adds: the slowest of many
    # bytes of a parameter: as products read it, of its gradient, of a copy in float32 that the optimizer has
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    master_bytes: float = 4.0
    keeps_one_copy: bool = False  # of an input of a product in fp8 or fp4: that by columns, for W
    logit_bytes: float = 8.0  # of a logit at the peak
    loss_tokens: float = 16384.0  # tokens that have logits at a time, as it computes the loss of more in blocks
    gathers_logits: bool = False  # whether a device has those of the whole vocabulary in spite of tensor parallelism
    # whether fully sharded parallelism has the embedding and the head gathered all the time, beside the buffer that it
    # gathers them into; otherwise it gathers one of them where it is used
    keeps_ends: bool = False
    reserved: float = 2e9  # bytes of a device for the driver, libraries, and buffers of collectives


def software(name: str | Software) -> Software:
    """Look a class of software up; a `Software` is returned as it is.

    Raises ``UsageError`` if the table has none of this name.
    """
    if isinstance(name, Software):
        return name
    if name not in software_names():
        raise UsageError(f"software: there is no {name!r}; choose one of {', '.join(software_names())}")
    return Software(name, **tables.read_table("hardware/software.toml")[name])


def software_names() -> tuple[str, ...]:
    """Return the names of the classes."""
    return tuple(tables.read_table("hardware/software.toml"))
