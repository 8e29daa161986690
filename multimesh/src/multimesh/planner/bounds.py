"""Lower bounds of a step's seconds and bytes, which no table of a schedule can beat. They need no simulation."""

from __future__ import annotations

from collections.abc import Iterator

from multimesh import schedules
from multimesh.hardware.software import Stack
from multimesh.planner import footprint, layer, loop, stage_layers, step
from multimesh.planner.best_first import Bounded, Option
from multimesh.planner.configuration import Configuration
from multimesh.planner.layer import LayerParts
from multimesh.planner.space import Space

_CLOSE = 1e-3  # a partition that is faster by less is not worth a flag


class Transformers:
    """CostModel of the configurations of a space, for `multimesh.planner.best_first.Search`.

    Parameters
    ----------
    space
        The space of configurations.
    software
        The software that runs it.
    limit
        Bytes of a device. A mesh whose parameters alone need more is left out early.
    least_band
        Half width of the bands at least, for models that the cost model does not know.
    """

    def __init__(self, space: Space, software: Stack, limit: float, least_band: float = 0.0) -> None:
        self.space, self.software, self.limit, self.least_band = space, software, limit, least_band
        self._device = space.device.with_software(software.year)
        self._parts: dict[tuple[object, ...], LayerParts] = {}
        self._after: dict[tuple[object, ...], float] = {}
        self._balanced: dict[tuple[object, ...], tuple[int, ...]] = {}

    def candidates(self) -> Iterator[Bounded]:
        """Yield every configuration, with its bounds. One stands for all those of a mesh that certainly do not fit."""
        for grid in self.space.grids():
            hows = tuple(self.space.within(grid))
            if not hows:
                continue
            most = (how for how in hows if how.recompute == hows[-1].recompute)  # recomputed
            frugal = [Bounded(cut, 0.0, self._least(cut, 1)) for how in most for cut in self._cuts(how)]
            least = min(frugal, key=lambda bounded: bounded.bytes, default=None)
            if least is not None and least.bytes > self.limit:
                yield least
                continue
            for how in hows:
                yield from self._worth(map(self._bounded, self._cuts(how)))

    def _bounded(self, how: Configuration) -> Bounded:
        least = self._least(how, self._in_flight(how))
        return Bounded(how, self.seconds(how) if least <= self.limit else 0.0, least)

    def _worth(self, cuts: Iterator[Bounded]) -> Iterator[Bounded]:
        """Yield the first cut into stages, and those that are clearly faster or follow one that does not fit."""
        before: Bounded | None = None
        for cut in cuts:
            if before is None or before.bytes > self.limit or cut.seconds < (1 - _CLOSE) * before.seconds:
                yield cut
            before = cut

    def bytes(self, how: Configuration) -> float:
        """Return the bytes of the fullest device."""
        return max(held.total for held in footprint.peak_bytes(self.space.model, how, self.software))

    def option(self, how: Configuration) -> Option:
        """Simulate a step."""
        return Option.of_step(step.forecast(self.space.model, how, self.space.device, self.software), self.least_band)

    def seconds(self, how: Configuration) -> float:
        """Return a lower bound of a step: a submesh waits for its first microbatch, runs all, and the last goes back.

        Where the schedule splits the backward pass, weight gradients may be all that is left at the end.
        """
        model, parts = self.space.model, self.parts(how)
        sizes, count, each = stage_layers.layers(model, how), how.microbatches, parts.blocked + parts.hop
        after, slower = self._beside(how), 1 + step.stragglers(how, self._device, self.software)
        if how.pp == 1:
            return count * sum(s.total for s in stage_layers.times(model, how, parts)) * slower + after
        if model.dense_layers:
            of = stage_layers.times(model, how, parts)
            return loop.least_seconds(how.schedule, how.pp, count, of, parts.hop, parts.blocked) * slower + after
        schedule = schedules.get(how.schedule)
        places = stage_layers.placement(how, schedule.placement(how.pp))
        work = [2 * how.interleave * parts.blocked] * how.pp
        for size, row in zip(sizes, places, strict=True):
            work[row] += size * parts.layer.total
        work[places[0]] += parts.embedding.total
        work[places[-1]] += parts.head.total
        longest = ahead = behind = 0.0
        for row in range(how.pp):
            longest = max(longest, count * work[row] + ahead + (0.0 if schedule.splits else behind))
            ahead += sizes[row] * parts.layer.forward + each
            behind += sizes[row] * (parts.layer.backward + parts.layer.weights) + each
            if row == 0:
                ahead += parts.embedding.forward
                behind += parts.embedding.backward + parts.embedding.weights
        return longest * slower + after

    def parts(self, how: Configuration) -> LayerParts:
        """Return seconds of a layer and of the other parts. Only some fields change them."""
        key = (
            *(how.microbatch, how.tp, how.cp, how.ep, how.etp, how.fsdp, how.pp > 1, how.interleave > 1),
            *(how.recompute, how.precision, how.offload, how.microbatches if how.gather_once else 0),
            *(how.sequence_parallel, how.dp if how.sharded == "parameters" else 0),
        )
        if key not in self._parts:
            self._parts[key] = layer.parts(self.space.model, how, self._device, self.software)
        return self._parts[key]

    def _beside(self, how: Configuration) -> float:
        key = how.dp, how.fsdp, how.cp, how.pp, how.sharded, id(self.parts(how))
        if key not in self._after:
            self._after[key] = sum(step.after(self.space.model, how, self._device, self.software, self.parts(how)))
        return self._after[key]

    def _least(self, how: Configuration, in_flight: int) -> float:
        """Return the fewest bytes of the fullest device among the first and the last submesh."""
        if how.pp == 1:
            return self.bytes(how)
        least = (
            {0: in_flight} if schedules.get(how.schedule).placement(how.pp)[-1] == 0 else {0: in_flight, how.pp - 1: 1}
        )
        return max(held.total for held in footprint.of_rows(self.space.model, how, self.software, least))

    @staticmethod
    def _in_flight(how: Configuration) -> int:
        """Return a lower bound of the activations of stages that the first submesh holds at once."""
        p, v, m = how.pp, how.interleave, how.microbatches
        if v == 1:
            return {"1f1b": min(m, p), "zb-h1": min(m, p), "eager-1f1b": min(m, 2 * p - 1)}.get(how.schedule, 1)
        if how.schedule in ("1f1b", "interleaved", "interleaved-zb") and m >= p:
            return min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
        return 1

    def _cuts(self, how: Configuration) -> Iterator[Configuration]:
        """Yield the configuration with layers for its stages: equal ones if these divide, and balanced ones."""
        if "layers" in self.space.fixed:
            sizes = self.space.fixed["layers"]
            if isinstance(sizes, tuple) and len(sizes) == how.stages:
                yield how.changed(layers=sizes)
            return
        each, over = divmod(self.space.model.layers, how.stages)
        if not over:
            yield how
        if how.pp == 1:
            return
        route = schedules.get(how.schedule).placement(how.pp)
        parts = self.parts(how)
        key = id(parts), how.pp, how.interleave, route
        if key not in self._balanced:
            self._balanced[key] = stage_layers.balance(self.space.model, how, parts, route)
        sizes = self._balanced[key]
        if over or set(sizes) != {each}:
            yield how.changed(layers=sizes)
