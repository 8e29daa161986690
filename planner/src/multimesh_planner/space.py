"""A training, and its configurations on a cluster: what is searched, and what a model's sizes and the user rule out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.schedules.published import PUBLISHED

from multimesh import schedules
from multimesh_planner.configuration import USUAL, Configuration
from multimesh_planner.hardware.devices import Device
from multimesh_planner.hardware.software import Software
from multimesh_planner.hardware.software import software as software_named
from multimesh_planner.step import Step
from multimesh_planner.transformer import Transformer

FIELDS = tuple(field.name for field in dataclasses.fields(Configuration) if field.name not in ("batch", "sequence"))
"""What can be fixed."""

DOMINATED = ("gpipe", "looped-bfs", "kimi-k2", "dualpipe-v", "wavefront", "prefetch-wavefront")
"""Published schedules that are not searched, as another takes no more time and memory. They can be fixed."""

SHARE = 0.75
"""Part of a device's memory that JAX takes by default."""

_AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "microbatch")
T = TypeVar("T")
_MOST_CHUNKS = 12  # stages of a submesh
_PART = 8192  # tokens of a sequence on a device at least, where context parallelism is searched
_NARROW = 4096  # width of an expert that tensor parallelism does not cut
_ALIKE = ("etp", "load", "recomputed", "saved", "sharded", "gather_once", "offload", "optimizer", "moments")


@dataclass(frozen=True)
class Training:
    """A model to train, with the devices that it may use."""

    # model, batch, sequence: as in `multimesh_planner.step_time`
    model: Transformer
    batch: int
    sequence: int
    device: Device
    gpus: int = 0  # of a node; 0: as many as the fast link connects
    # fields of `Configuration` that keep their values; sequence parallelism is on wherever tp is above 1
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    software: Software = dataclasses.field(default_factory=lambda: software_named("nvidia"))  # without its `reserved`
    limit: float = 0.0  # bytes of a device that may be used; 0: what JAX takes by default
    least_band: float = 0.0  # half width of the bands at least
    policies: tuple[str, ...] = USUAL  # of recomputation, the most frugal last
    precisions: tuple[str, ...] = ("bf16",)  # of products, all of which are tried
    sharded: str = "optimizer"  # what data parallelism shards beside the batch: the optimizer costs no time
    offloads: bool = False  # whether activations and the optimizer's state in the host's memory are tried
    sharded_alone: str = ""  # as `sharded`, where there is one stage; empty: the same
    gathers: bool = False  # whether parameters that FSDP shards are also tried gathered once a step, in a pipeline
    run: Step | None = None  # of the user's own, to which constants were fitted
    # flags of the command that allow the host's memory (empty: it has none) and more of a device's, for errors
    flags: tuple[str, str] = ("--offload", "--memory")
    workspace: float = 0.0  # bytes of the limit that the forecast leaves to the kernels

    @property
    def bytes(self) -> float:
        """Bytes of a device that may be used."""
        return (self.limit or SHARE * self.device.memory) - self.workspace


@dataclass(frozen=True, kw_only=True)
class Space(Training):
    """All configurations of a training on so many devices. Tensor parallelism stays within ``device.domain``."""

    devices: int

    def __post_init__(self) -> None:
        """Check the numbers and the names of what is fixed, and that its values can be."""
        for name in ("devices", "batch", "sequence"):
            checks.integer(f"suggest: {name}", getattr(self, name), 1)
        for name in self.fixed:
            if name not in FIELDS:
                raise UsageError(f"suggest: {name!r} cannot be fixed; these can: {', '.join(FIELDS)}")
            if name in _AXES and not (name == "etp" and self.fixed[name] == 0):
                self._size(name)
        for name in ("ep", "etp"):
            if self._size(name) > 1 and not self.model.experts:
                raise UsageError(
                    f"suggest: {name} {self._size(name)} spreads experts, and {self.model.name} has none; leave it out"
                )
        # axes, and layers of stages, need the batch, the devices and each other
        single = {name: value for name, value in self.fixed.items() if name not in (*_AXES, "layers")}
        Configuration(batch=self.batch, sequence=self.sequence).replace(**single)

    def grids(self) -> Iterator[Configuration]:
        """Yield meshes with a microbatch and stages. Bounds can judge them already."""
        fields = {name: value for name, value in self.fixed.items() if name in (*_ALIKE, "offload_optimizer")}
        experts, sizes = self.model.experts, divisors(self.devices)
        # parts of a sequence that keep attention fast, and a layer for each stage
        contexts = self._choose("cp", tuple(cp for cp in sizes if cp == 1 or self.sequence // cp >= _PART))
        pipelines = tuple(pp for pp in self._choose("pp", sizes) if pp <= self.model.layers)
        for tp, cp, pp in itertools.product(self._choose("tp", sizes), contexts, pipelines):
            within = tp * cp <= self.device.domain or "tp" in self.fixed or (cp > 1 and tp <= self.device.domain)
            replicas, over = divmod(self.devices, tp * pp * cp)
            if not within or self.remainders("tp", tp) or over or not replicas or self.batch % replicas:
                continue
            sharded = self.sharded if pp > 1 else self.sharded_alone or self.sharded
            together = self.fixed.get("sequence_parallel", tp > 1 and self.sequence % tp == 0)
            rows = self.batch // replicas
            shapes = [
                {"microbatch": microbatch, "interleave": interleave}
                for microbatch in self._choose("microbatch", divisors(rows))
                for interleave in self._choose("interleave", self._chunks(pp))
                if not rows % microbatch and pp * interleave <= self.model.layers and (pp > 1 or interleave == 1)
            ]
            for fsdp, ep in itertools.product(
                self._choose("fsdp", divisors(replicas)), self._choose("ep", divisors(replicas) if experts else (1,))
            ):
                dp, over = divmod(replicas, fsdp)
                if over or self.remainders("fsdp", fsdp) or self.fixed.get("dp", dp) != dp or self.remainders("ep", ep):
                    continue
                etp = 1 if experts and ep > 1 and self.model.expert < _NARROW else 0
                if ep > 1 and (replicas * cp * tp) % (ep * int(str(fields.get("etp", etp) or tp))):
                    continue
                one = Configuration(self.batch, self.sequence, dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp)
                axes = {"sharded": sharded if dp * cp > 1 else "none", "ep": ep, "etp": etp}
                mesh = one.replace(**{**axes, "sequence_parallel": together, **fields})
                yield from (mesh.with_policy(**shape) for shape in shapes)

    def within(self, grid: Configuration) -> Iterator[Configuration]:
        """Yield the configurations of a grid, but for the layers of its stages."""
        names = list_schedules(grid.interleave, str(self.fixed.get("schedule", "")))
        if grid.pp == 1:
            names = self._choose("schedule", ("1f1b",))
        for precision, recompute, name in itertools.product(
            self._choose("precision", self.precisions), self._choose("recompute", self.policies), names
        ):
            how = grid.with_policy(recompute=recompute, schedule=name, precision=precision)
            if self.offloads:  # the optimizer's state, activations or both in the host's memory
                activations = (False, True) if recompute in ("none", self.policies[-1]) else (False,)
                for state, one in itertools.product((False, True), activations):
                    if state or one:
                        yield how.with_policy(offload=one, offload_optimizer=state)
            if self.gathers and grid.pp > 1 and grid.fsdp > 1 and "gather_once" not in self.fixed:
                yield how.with_policy(gather_once=True)
            yield how

    def _choose(self, name: str, values: tuple[T, ...]) -> tuple[T, ...]:
        """Return the value to which a field is fixed alone, or all of these."""
        return (self.fixed[name],) if name in self.fixed else values  # type: ignore[return-value]

    def _size(self, name: str) -> int:
        """Return the value to which a size is fixed; 1 where it is free."""
        return checks.integer(f"suggest: {name}", self.fixed.get(name, 1), 1)

    def _chunks(self, pp: int) -> tuple[int, ...]:
        """Return the numbers of stages on a submesh for which stages have about equal numbers of layers."""
        layers = self.model.layers
        even = (v for v in range(3, _MOST_CHUNKS + 1) if not layers % (pp * v) or not (layers + 2) % (pp * v))
        return (1, 2, *even) if pp > 1 else (1,)

    def remainders(self, axis: str, size: int) -> str:
        """Name the sizes that an axis of this length must divide and does not; empty if there is none."""
        model = self.model
        heads = {"attention heads": model.heads, "key/value heads": model.kv_heads}
        sizes = {
            "tp": {**heads, "ffn": model.ffn, "vocabulary": model.vocabulary},
            "fsdp": {"hidden": model.hidden},
            "ep": {"experts": max(1, model.experts)},
        }[axis]
        return ", ".join(f"{name} ({number})" for name, number in sizes.items() if number % size)

    def impossible(self) -> str:
        """Return the reason why there is no configuration at all, with a remedy."""
        for axis in ("tp", "fsdp", "ep"):
            size = self._size(axis)
            if sizes := self.remainders(axis, size):
                return f"{axis} {size} does not divide {sizes}; fix another {axis}"
        product = math.prod(map(self._size, ("dp", "fsdp", "tp", "pp", "cp")))
        if self.devices % product:
            return f"the fixed axes make {product} devices, which do not divide {self.devices}; fix fewer of them"
        stages = self._size("pp") * self._size("interleave")
        if stages > self.model.layers:
            return f"{self.model.layers} layers cannot make {stages} stages; fix a smaller pp or interleave"
        return (
            f"no axes of {self.devices} devices divide a batch of {self.batch} and the model; use another batch, or "
            "other devices"
        )


def spread(job: Training, devices: int) -> Space:
    """Return the space of a training on so many devices, with the bytes that it may use as its limit."""
    on = job.device
    if 0 < job.gpus < on.domain <= 8:  # larger domains span nodes
        on = dataclasses.replace(on, domain=job.gpus)
    software = dataclasses.replace(job.software, reserved=0.0)
    return Space(**{**vars(job), "device": on, "software": software}, devices=devices)


def list_schedules(interleave: int, name: str = "") -> tuple[str, ...]:
    """Return the published schedules that are searched where a submesh has so many stages, or the one that is fixed."""
    candidates = [one for one in PUBLISHED if one.name not in DOMINATED and (one.usual > 1) == (interleave > 1)]
    fitting = [schedules.get(name)] if name else candidates
    return tuple(one.name for one in fitting if one.chunks in (None, interleave) and not one.usual > interleave == 1)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, in order."""
    small = [n for n in itertools.takewhile(lambda n: n * n <= number, itertools.count(1)) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
