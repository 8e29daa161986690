"""How a model is spread over devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from multimesh import schedules
from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.hardware.devices import PRECISIONS

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
NARROW = ("attention", "head")


@dataclass(frozen=True)
class Configuration:
    """How a training step is spread over devices.

    Attributes
    ----------
    batch, sequence
        Sequences of a step over all devices, and tokens of each.
    microbatch
        Sequences of a microbatch on each group of ``tp * cp * pp`` devices.
    dp, fsdp, tp, pp, cp, ep
        Devices along each axis: data parallelism, data parallelism with sharded parameters, tensor, pipeline, context
        and expert parallelism. Experts are spread over devices of the other axes but pp, so ep adds none.
    etp
        Devices that share the matrices of an expert; 0: those of tp.
    load
        Tokens of the busiest device's experts, over the mean; with a fixed capacity, its factor.
    interleave
        Stages on each submesh.
    schedule
        A name of `multimesh.schedules`; it says nothing where pp is 1.
    sequence_parallel
        Whether what lies between the products of tensor parallelism is sharded over tp as well.
    recompute
        Values that the backward pass computes again: ``none``, ``selective`` (attention), ``minimal`` (all but the
        results of matrix products, as MaxText's policy of that name), ``alternate`` (every second matrix product, and
        all that is no product or attention, as torchtitan's selective ``op``), ``latent`` (heads of latent attention,
        from the compressed ones), MaxText's ``save_dot_except_mlp``, ``save_out_proj`` and ``save_qkv_proj``, which
        keep the results of some products, or ``full``.
    recomputed
        Share of the layers that do so; the others keep everything.
    saved
        Results of a layer that ``full`` keeps, as JAX's policies name them: its ``input``, ``query``, ``key``,
        ``value``, ``context`` (of attention), ``out``, ``mlpwi`` (gate and up) and ``mlpwo``. Empty: it keeps the
        input and computes all again, as Megatron does.
    sharded
        State that data parallelism shards beside the batch: ``none``, ``optimizer`` (its state, ZeRO-1), or
        ``parameters`` (with gradients and state: ZeRO-3, FSDP), also over dp and cp.
    within
        Neighboring devices that share the state of the optimizer among them, such as those of a node; 0: all that data
        parallelism has.
    gather_once
        Whether sharded parameters are gathered once a step and stay, in place of once for each microbatch.
    offload
        Whether what the layers keep for the backward pass waits in the host's memory.
    precision
        Of the products of the layers: ``bf16``, ``fp8`` or ``fp4``.
    narrow
        Further parts in fp8: ``attention`` between its projections, ``head``.
    layers
        Layers of each stage; empty: spread by `stages`.
    """

    batch: int
    sequence: int
    microbatch: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    load: float = 1.0
    interleave: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    recompute: str = "none"
    recomputed: float = 1.0
    saved: tuple[str, ...] = ()
    sharded: str = "none"
    within: int = 0
    gather_once: bool = False
    offload: bool = False
    precision: str = "bf16"
    narrow: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check each field, and that the batch is made of whole microbatches."""
        for name in ("batch", "sequence", "microbatch", "dp", "fsdp", "tp", "pp", "cp", "ep", "interleave"):
            checks.whole(f"configuration: {name}", getattr(self, name), 1)
        for name, known in (
            ("recompute", RECOMPUTE),
            ("sharded", SHARDED),
            ("precision", PRECISIONS),
            ("schedule", schedules.names()),
        ):
            if getattr(self, name) not in known:
                raise checks.refuse(f"configuration: {name}", f"one of {', '.join(known)}", getattr(self, name))
        if not {*self.saved} <= {*SAVED}:
            raise checks.refuse("configuration: saved", f"some of {', '.join(SAVED)}", self.saved)
        checks.whole("configuration: etp", self.etp, 0)
        checks.whole("configuration: within", self.within, 0)
        if self.within and self.replicas % self.within:
            raise UsageError(f"configuration: within {self.within} does not divide the {self.replicas} replicas")
        if not {*self.narrow} <= {*NARROW}:
            raise checks.refuse("configuration: narrow", f"some of {', '.join(NARROW)}", self.narrow)
        if not 0 <= self.recomputed <= 1:
            raise checks.refuse("configuration: recomputed", "a share from 0 to 1", self.recomputed)
        if not 1 <= self.load < float("inf"):
            raise checks.refuse("configuration: load", "a number of at least 1", self.load)
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
        if self.layers and len(self.layers) != self.pp * self.interleave:
            raise UsageError(
                f"configuration: layers of {len(self.layers)} stages, but pp x interleave is {self.stages}"
            )

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

    def shown(self) -> str:
        """Return the axes longer than 1, and the microbatch: ``dp 8 tp 4 pp 4 x 2, microbatch 1``."""
        axes = ((name, getattr(self, name)) for name in ("dp", "fsdp", "tp", "cp", "ep", "pp"))
        parts = [f"{name} {size}" for name, size in axes if size > 1]
        if self.interleave > 1:
            parts.append(f"x {self.interleave}")
        return f"{' '.join(parts) or '1 device'}, microbatch {self.microbatch}"

    def changed(self, **fields: object) -> Configuration:
        """Return a copy with other fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]
