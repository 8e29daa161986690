"""The configurations of a cluster: what is searched, and what a model's sizes and the user rule out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from multimesh import schedules
from multimesh.core import checks
from multimesh.errors import UsageError
from multimesh.hardware.devices import Device
from multimesh.planner.configuration import USUAL, Configuration
from multimesh.planner.transformer import Transformer

FIELDS = tuple(field.name for field in dataclasses.fields(Configuration) if field.name not in ("batch", "sequence"))
"""What can be fixed."""

ONE_STAGE, TWO_STAGES, MORE_STAGES = (
    ("1f1b", "eager-1f1b", "zb-h1", "zb-h2"),
    ("interleaved", "interleaved-zb", "zb-v"),
    ("interleaved", "interleaved-zb"),
)
"""Schedules that are searched, for submeshes of one stage, of two, of more. Others take no less time or memory."""

_MOST_CHUNKS = 12  # stages of a submesh
_PART = 8192  # tokens of a sequence on a device at least, where context parallelism is searched
_NARROW = 4096  # width of an expert that tensor parallelism does not cut
_KEPT = ("etp", "load", "recomputed", "saved", "sharded", "gather_once", "offload", "narrow")


@dataclass(frozen=True)
class Space:
    """All configurations of so many devices."""

    # model, device: the model, and where it runs. Tensor parallelism stays within ``device.domain``.
    model: Transformer
    device: Device
    # devices, batch, sequence: as in `Configuration`
    devices: int
    batch: int
    sequence: int
    # fields of `Configuration` that keep a value. Sequence parallelism is on wherever tp is above 1. Experts that are
    # narrow are not cut by tp
    fixed: Mapping[str, object]
    policies: tuple[str, ...] = USUAL  # of recomputation: those that the software has, the most frugal last
    precisions: tuple[str, ...] = ("bf16",)  # of products, all of which are tried
    # the state that data parallelism shards beside the batch. To shard the optimizer costs no time and less memory.
    sharded: str = "optimizer"
    offloads: bool = False  # whether activations in the host's memory are tried, where nothing is computed again
    sharded_alone: str = ""  # the same where there is one stage; empty: no other
    gathers: bool = False  # whether parameters that FSDP shards are also tried gathered once a step, in a pipeline

    def __post_init__(self) -> None:
        """Check the numbers and the names of what is fixed, and that its values can be."""
        for name in ("devices", "batch", "sequence"):
            checks.whole(f"suggest: {name}", getattr(self, name), 1)
        for name in self.fixed:
            if name not in FIELDS:
                raise UsageError(f"suggest: {name!r} cannot be fixed; these can: {', '.join(FIELDS)}")
        alone = {name: value for name, value in self.fixed.items() if name != "layers"}
        Configuration(batch=self.batch, sequence=self.sequence).changed(**_without_batch(alone))

    def grids(self) -> Iterator[Configuration]:
        """Yield meshes with a microbatch and stages. Bounds can judge them already."""
        for mesh in self._meshes():
            rows = self.batch // (mesh.dp * mesh.fsdp)
            for microbatch in self._sizes("microbatch", divisors(rows)):
                if rows % microbatch:
                    continue
                for interleave in self._sizes("interleave", self._chunks(mesh.pp)):
                    if mesh.pp * interleave <= self.model.layers and (mesh.pp > 1 or interleave == 1):
                        yield mesh.changed(microbatch=microbatch, interleave=interleave)

    def within(self, grid: Configuration) -> Iterator[Configuration]:
        """Yield the configurations of a grid, but for the layers of its stages."""
        names: tuple[str, ...] = ("1f1b",)
        if grid.pp > 1:
            names = {1: ONE_STAGE, 2: TWO_STAGES}.get(grid.interleave, MORE_STAGES)
        fit = tuple(name for name in self._names("schedule", names) if _fits(name, grid))
        for precision in self._names("precision", self.precisions):
            for recompute in self._names("recompute", self.policies):
                for name in fit:
                    how = grid.changed(recompute=recompute, schedule=name, precision=precision)
                    if self.offloads and recompute == "none" and "offload" not in self.fixed:
                        yield how.changed(offload=True)
                    if self.gathers and grid.pp > 1 and grid.fsdp > 1 and "gather_once" not in self.fixed:
                        yield how.changed(gather_once=True)
                    yield how

    def _meshes(self) -> Iterator[Configuration]:
        known = {name: value for name, value in self.fixed.items() if name in _KEPT}
        for tp, cp, pp in itertools.product(
            self._sizes("tp", divisors(self.devices)), self._sizes("cp", self._contexts()), self._pipelines()
        ):
            within = tp * cp <= self.device.domain or "tp" in self.fixed or (cp > 1 and tp <= self.device.domain)
            rest, over = divmod(self.devices, tp * pp * cp)
            if not within or self.undivided("tp", tp) or over or not rest or self.batch % rest:
                continue
            together = self.fixed.get("sequence_parallel", tp > 1 and self.sequence % tp == 0)
            for fsdp in self._sizes("fsdp", divisors(rest)):
                dp, over = divmod(rest, fsdp)
                if over or self.undivided("fsdp", fsdp) or self.fixed.get("dp", dp) != dp:
                    continue
                for ep in self._sizes("ep", divisors(rest) if self.model.experts else (1,)):
                    if (rest * cp) % ep or self.undivided("ep", ep):
                        continue
                    etp = 1 if self.model.experts and ep > 1 and self.model.expert < _NARROW else 0
                    one = Configuration(self.batch, self.sequence, dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp)
                    sharded = (
                        (self.sharded if pp > 1 else self.sharded_alone or self.sharded) if dp * cp > 1 else "none"
                    )
                    fields = {"sharded": sharded, "ep": ep, "etp": etp, "sequence_parallel": together, **known}
                    yield one.changed(**fields)

    def _pipelines(self) -> tuple[int, ...]:
        """Return the numbers of submeshes that have a layer each."""
        return tuple(pp for pp in self._sizes("pp", divisors(self.devices)) if pp <= self.model.layers)

    def _contexts(self) -> tuple[int, ...]:
        """Return the sizes of context parallelism that leave each device a part that keeps attention fast."""
        return tuple(cp for cp in divisors(self.devices) if cp == 1 or self.sequence // cp >= _PART)

    def _sizes(self, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
        return (self._size(name),) if name in self.fixed else values

    def _names(self, name: str, values: tuple[str, ...]) -> tuple[str, ...]:
        return (str(self.fixed[name]),) if name in self.fixed else values

    def _size(self, name: str) -> int:
        """Return the value to which a size is fixed; 1 where it is free."""
        return checks.whole(f"suggest: {name}", self.fixed.get(name, 1), 1)

    def _chunks(self, pp: int) -> tuple[int, ...]:
        """Return the numbers of stages on a submesh for which stages have about equal numbers of layers."""
        if pp == 1:
            return (1,)
        layers = self.model.layers
        even = (v for v in range(3, _MOST_CHUNKS + 1) if not layers % (pp * v) or not (layers + 2) % (pp * v))
        return (1, 2, *even)

    def undivided(self, axis: str, size: int) -> str:
        """Name the size that an axis of this length must divide and does not; empty if there is none."""
        model = self.model
        sizes = {
            "tp": {
                "attention heads": model.heads,
                "key/value heads": model.kv_heads,
                "ffn": model.ffn,
                "vocabulary": model.vocabulary,
            },
            "fsdp": {"hidden": model.hidden},
            "ep": {"experts": max(1, model.experts)},
        }[axis]
        return ", ".join(f"{name} ({number})" for name, number in sizes.items() if number % size)

    def impossible(self) -> str:
        """Say why there is no configuration at all, with a remedy."""
        for axis in ("tp", "fsdp", "ep"):
            size = self._size(axis)
            if found := self.undivided(axis, size):
                return f"{axis} {size} does not divide {found}; fix another {axis}"
        product = 1
        for axis in ("dp", "fsdp", "tp", "pp", "cp"):
            product *= self._size(axis)
        if self.devices % product:
            return f"the fixed axes make {product} devices, which do not divide {self.devices}; fix fewer of them"
        stages = self._size("pp") * self._size("interleave")
        if stages > self.model.layers:
            return f"{self.model.layers} layers cannot make {stages} stages; fix a smaller pp or interleave"
        return (
            f"no axes of {self.devices} devices divide a batch of {self.batch} and the model; use another batch, or "
            "other devices"
        )


def _fits(name: str, grid: Configuration) -> bool:
    """Return whether a schedule has stages as a mesh has."""
    schedule = schedules.get(name)
    chunks = schedule.chunks or grid.interleave
    return grid.pp == 1 or (chunks == grid.interleave and not schedule.usual > grid.interleave == 1)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, in order."""
    small = [n for n in itertools.takewhile(lambda n: n * n <= number, itertools.count(1)) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _without_batch(fixed: Mapping[str, object]) -> dict[str, object]:
    """Fields whose values can be checked alone: axes need a batch that they divide."""
    return {name: 1 if name in ("dp", "fsdp", "microbatch") else value for name, value in fixed.items()}
