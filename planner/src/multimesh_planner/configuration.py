"""How a model is spread over devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from multimesh.core import checks
from multimesh.errors import UsageError

from multimesh import schedules
from multimesh_planner.hardware.devices import PRECISIONS

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")

USUAL = ("none", "selective", "minimal", "full")
"""Recomputation that most software has, the most frugal last: a search tries it."""

POLICIES = {
    "save_dot_except_mlp": ("query", "key", "value", "out"),
    "save_qkv_proj": ("query", "key", "value"),
    "save_out_proj": ("out",),
}
"""Policies of MaxText between ``minimal`` and ``full``, with the results of a layer that they keep."""

RECOMPUTE = (*USUAL[:-1], "latent", "alternate", *POLICIES, "full")
SAVED = ("input", "query", "key", "value", "context", "out", "mlpwi", "mlpwo")
SHARDED = ("none", "optimizer", "parameters")
OPTIMIZERS = {"adamw": 2.0, "muon": 1.0, "adafactor": 0.0, "sgd": 1.0}
"""Moments of a parameter. Adafactor has sums of rows and of columns, which are small."""

MOMENTS = {"float32": 4.0, "bfloat16": 2.0}
"""Types of moments, and their bytes."""


@dataclass(frozen=True)
class Configuration:
    """The way in which a training step is spread over devices."""

    # sequences of a step over all devices, tokens of each, and sequences of a microbatch on each group of tp x cp x pp
    batch: int
    sequence: int
    microbatch: int = 1
    # devices along each axis: data parallelism, data parallelism with sharded parameters, tensor, pipeline, context and
    # expert parallelism. Experts are spread over devices of the other axes but pp, so ep adds none
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # devices that share the matrices of an expert; 0: those of tp
    load: float = 1.0  # tokens of the busiest device's experts, over the mean; with a fixed capacity, its factor
    interleave: int = 1  # stages on each submesh
    schedule: str = "1f1b"  # a name of `multimesh.schedules`; it says nothing where pp is 1
    sequence_parallel: bool = True  # whether what lies between the products of tensor parallelism is sharded as well
    # values that the backward pass computes again: "none"; "selective" (attention); "minimal" (all but the results of
    # matrix products, as MaxText's); "alternate" (every second product, and all that is no product or attention, as
    # torchtitan's "op"); "latent" (heads of latent attention, from the compressed ones); MaxText's
    # "save_dot_except_mlp", "save_out_proj" and "save_qkv_proj", which keep the results of some products; or "full"
    recompute: str = "none"
    recomputed: float = 1.0  # share of the layers that do so; the others keep everything
    # results of a layer that "full" keeps, as JAX's policies name them: "context" is of attention, "mlpwi" gate and up.
    # Empty: it keeps the input and computes all again, as Megatron does
    saved: tuple[str, ...] = ()
    # state that data parallelism shards beside the batch: "none", "optimizer" (its state, ZeRO-1), or "parameters"
    # (with gradients and state: ZeRO-3, FSDP), also over dp and cp
    sharded: str = "none"
    within: int = 0  # neighboring devices, as of a node, that share the optimizer's state; 0: all of data parallelism
    gather_once: bool = False  # sharded parameters are gathered once a step and stay, not once for each microbatch
    reduce_once: bool = False  # gradients of microbatches are summed before fsdp scatters them: in memory, as long
    # whether what the layers keep for the backward pass, and the optimizer's state, wait in the host's memory
    offload: bool = False
    offload_optimizer: bool = False
    optimizer: str = "adamw"
    moments: str = "float32"  # type of the optimizer's moments
    precision: str = "bf16"  # of the products of the layers
    layers: tuple[int, ...] = ()  # of each stage; empty: about equal

    def __post_init__(self) -> None:
        """Check each field, and that the batch is made of whole microbatches."""
        for name in ("batch", "sequence", "microbatch", *AXES, "interleave"):
            checks.integer(f"configuration: {name}", getattr(self, name), 1)
        for name in ("etp", "within"):
            checks.integer(f"configuration: {name}", getattr(self, name), 0)
        choices = {"recompute": RECOMPUTE, "sharded": SHARDED, "precision": PRECISIONS, "optimizer": OPTIMIZERS}
        for name, values in {**choices, "moments": MOMENTS, "schedule": schedules.names()}.items():
            if getattr(self, name) not in values:
                raise checks.refuse(f"configuration: {name}", f"one of {', '.join(values)}", getattr(self, name))
        for name, is_valid, text in (
            ("saved", {*self.saved} <= {*SAVED}, f"some of {', '.join(SAVED)}"),
            ("recomputed", 0 <= self.recomputed <= 1, "a share from 0 to 1"),
            ("load", 1 <= self.load < float("inf"), "a number of at least 1"),
            ("within", not self.within or self.replicas % self.within == 0, f"a divisor of {self.replicas} replicas"),
            ("layers", len(self.layers) in (0, self.stages), f"those of {self.stages} stages, pp x interleave"),
        ):
            if not is_valid:
                raise checks.refuse(f"configuration: {name}", text, getattr(self, name))
        if self.ep > 1 and (self.replicas * self.tp) % (self.ep * self.expert_tp):
            raise UsageError(
                f"configuration: ep {self.ep} x etp {self.expert_tp} does not divide the {self.replicas * self.tp} "
                "devices of a submesh"
            )
        if self.batch % (self.microbatch * self.dp * self.fsdp):
            raise UsageError(
                f"configuration: a batch of {self.batch} is not made of whole microbatches of {self.microbatch} "
                f"on dp {self.dp} x fsdp {self.fsdp}"
            )

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's moments for a parameter."""
        return OPTIMIZERS[self.optimizer] * MOMENTS[self.moments]

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Devices that hold the same part of the model, or share it by FSDP."""
        return self.dp * self.fsdp * self.cp

    @property
    def expert_tp(self) -> int:
        """Devices that share the matrices of an expert."""
        return self.etp or self.tp

    @property
    def expert_replicas(self) -> float:
        """Devices that hold the same experts, or share them by FSDP."""
        return self.replicas * self.tp / (self.ep * self.expert_tp)

    @property
    def shards(self) -> int:
        """Devices that share the parameters of a layer beyond tensor parallelism."""
        return self.fsdp * (self.dp * self.cp if self.sharded == "parameters" else 1)

    @property
    def state_shards(self) -> int:
        """Devices that share the state of the optimizer."""
        if self.sharded == "none":
            return self.fsdp
        return max(self.fsdp, self.within) if self.within else self.replicas

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pp * self.interleave

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return self.batch // (self.microbatch * self.dp * self.fsdp)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a device, before tensor parallelism."""
        return self.microbatch * self.sequence / self.cp

    def count_layers(self, total: int) -> tuple[int, ...]:
        """Return the number of layers of each stage, of so many in total: as given, or equal.

        Where equal ones need it, the embedding and the head count as a layer each: 126 layers on 64 stages are 1, 2,
        ..., 2, 1. Otherwise the first stages have a layer more.
        """
        number, more = divmod(total, self.stages)
        if self.layers or not more:
            return self.layers or (number,) * self.stages
        if (total + 2) % self.stages == 0:
            return (number, *(number + 1,) * (self.stages - 2), number)
        return (number + 1,) * more + (number,) * (self.stages - more)

    def shown(self) -> str:
        """Return the axes longer than 1, and the microbatch: ``dp 8 tp 4 pp 4 x 2, microbatch 1``."""
        axes = ((name, getattr(self, name)) for name in ("dp", "fsdp", "tp", "cp", "ep", "pp"))
        parts = [f"{name} {size}" for name, size in axes if size > 1]
        if self.interleave > 1:
            parts.append(f"x {self.interleave}")
        return f"{' '.join(parts) or '1 device'}, microbatch {self.microbatch}"

    def replace(self, **fields: object) -> Configuration:
        """Return a copy with other fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def with_policy(self, **fields: object) -> Configuration:
        """Return a copy with other fields, which the caller has checked: a search makes a hundred thousand."""
        copy = object.__new__(Configuration)
        copy.__dict__.update(self.__dict__, **fields)
        return copy
