"""``suggest``: how a pipeline would best spread a function over a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from multimesh import schedules
from multimesh.core import _compat, checks
from multimesh.core.text import amount
from multimesh.errors import DoesNotFitError, UsageError
from multimesh.hardware import kernels
from multimesh.hardware.devices import Device, device
from multimesh.hardware.software import stack
from multimesh.planner import loop, lost
from multimesh.planner.bands import UNKNOWN
from multimesh.planner.best_first import Bounded, Option, Search
from multimesh.planner.configuration import Configuration
from multimesh.planner.pieces import Portion, pieces
from multimesh.planner.products import Times
from multimesh.planner.space import Space
from multimesh.planner.step import OPTIMIZER
from multimesh.planner.suggesting import COUNT, SHARE
from multimesh.planner.suggestions import Suggestions
from multimesh.planner.transformer import Transformer
from multimesh.schedules.partitioning import STATES, LayerCosts, partition

_NOTES = (
    "no run was compared with forecasts of functions: the band is a guess",
    "it sees pipelines and data parallelism, with parameters sharded (fsdp) or not; no tensor parallelism",
    "it takes operations as written: what a library replaces by one kernel, such as attention, counts in parts",
    "the backward of a piece takes as long as its forward, and as long again for its parameters",
)


def suggest(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    devices: int,
    device: str | Device = "h100",
    memory: float | None = None,
    count: int = COUNT,
    **fixed: Any,
) -> Suggestions:
    """Find the fastest ways to train a function as a pipeline on a cluster.

    The function is traced with its derivative. Its operations give the seconds of pieces on the device, and
    `multimesh.schedules.partition` joins pieces to stages. Then the search simulates schedules, stages, microbatches
    and recomputation, as that of `multimesh.planner.suggest`.

    Parameters
    ----------
    fn
        The forward function of a training step, such as a loss: ``fn(params, *batch)``. Marks of tasks are not needed.
    args
        ``(params, *batch)``, as arrays or ``jax.ShapeDtypeStruct``. Leaves of the batch have the rows of a whole step
        along their first dimension.
    devices
        Of the cluster.
    device
        An accelerator, or its name in `multimesh.planner.devices`.
    memory
        Bytes of a device that may be used; None: what JAX takes by default, three quarters.
    count
        How many to find.
    fixed
        Fields of `multimesh.planner.Configuration` that keep a value: ``pp=4``, ``schedule="zb-h1"``, ....

    Returns
    -------
    Suggestions
        ``str`` is a table. Its notes say what the forecast does not see.

    Raises
    ------
    DoesNotFitError
        If no configuration fits into memory.
    UsageError
        If rows, devices and what is fixed leave no configuration.

    Examples
    --------
    >>> found = mm.suggest(loss, (params, batch), devices=64, device="h100")  # doctest: +SKIP
    >>> found.best.how.pp, found.best.how.schedule  # doctest: +SKIP
    (8, 'zb-h1')
    """
    checks.function("suggest: fn", fn)
    given = checks.many("suggest: args", args, "(params, *batch)")
    if len(given) < 2:
        raise UsageError("suggest: args must be (params, *batch), with something in the batch")
    params, *batch = (jax.tree.map(_compat.abstractify, arg) for arg in given)
    sizes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or not min(sizes):
        raise UsageError("suggest: all leaves of the batch must have its rows along their first dimension")
    costs = Functions(
        fn, params, tuple(batch), sizes.pop(), checks.whole("suggest: devices", devices, 1), device, fixed
    )
    limit = SHARE * costs.device.memory if memory is None else float(memory)
    search = Search(costs, limit)
    options = search.best(count)
    if not search.candidates:
        raise UsageError(f"suggest: no configuration of {devices} devices has {costs.rows} rows; use another batch")
    if not options:
        how, needed = search.nearest() or (None, float("nan"))
        where = f"; the nearest, {lost.describe_how(how)}, needs {amount(needed, 'bytes')}" if how else ""
        raise DoesNotFitError(
            f"suggest: nothing fits into {amount(limit, 'bytes')} of a device{where}; use more devices, fewer rows, or "
            "devices with more memory"
        )
    title = f"{getattr(fn, '__name__', 'a function')} on {devices} {costs.device.name}, batch of {costs.rows} rows"
    why = tuple(lost.sentences(search, options[0]))
    return Suggestions(
        title, tuple(options), why, limit, len(search.candidates), search.simulated, unit="rows", notes=_NOTES
    )


class Functions:
    """Costs of the configurations of a function, for `multimesh.planner.best_first.Search`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        params: Any,
        batch: tuple[Any, ...],
        rows: int,
        devices: int,
        name: str | Device,
        fixed: Mapping[str, Any],
    ) -> None:
        self.fn, self.params, self.batch, self.rows = fn, params, batch, rows
        self.device, self.software = device(name), stack("modern")
        self.pieces, self._partition = functools.cache(self._made), functools.cache(self._balanced)
        number = len(self.pieces(1))
        # Only the number of layers means anything in these sizes: pieces take their place.
        model = Transformer("function", number, devices, 1, 1, 1, 1)
        absent = {"tp": 1, "cp": 1, "ep": 1}
        for axis in absent:
            if fixed.get(axis, 1) != 1:
                raise UsageError(f"suggest: {axis} is not searched for functions; leave it out")
        self.space = Space(model, self.device, devices, rows, 1, {**fixed, **absent}, ("none", "full"))

    def _made(self, rows: int) -> tuple[Portion, ...]:
        """Return the pieces of the function on so many rows. Their number does not depend on the rows."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), self.batch)
        return pieces(self.fn, self.params, batch, self.device, self.software.kernel)

    def candidates(self) -> Iterator[Bounded]:
        """Yield all configurations, with the seconds of the longest stage."""
        for grid in self.space.grids():
            number = len(self.pieces(grid.microbatch))
            if grid.stages > number:
                continue
            for how in self.space.within(grid):
                cut = how if "layers" in self.space.fixed else how.changed(layers=self._cut(how))
                if len(cut.layers) == cut.stages and sum(cut.layers) == number:
                    yield Bounded(cut, self._longest(cut), self._state(cut))

    def bytes(self, how: Configuration) -> float:
        """Return the bytes of the fullest device: parameters, gradients, moments, and activations in flight."""
        in_flight: tuple[int, ...] = (how.stages,)
        if how.pp > 1:
            few = min(how.microbatches, 4 * how.pp + how.microbatches % how.pp)
            in_flight = loop.in_flight(how.schedule, how.pp, how.interleave, few)
        full = how.recompute == "full"
        needs = []
        for row, stages in enumerate(self._rows(how)):
            kept = max(sum(p.crossing if full else p.kept for p in stage) for stage in stages)
            again = max(p.kept for stage in stages for p in stage) if full else 0.0
            held = sum(p.parameters for stage in stages for p in stage)
            needs.append(STATES * held / how.fsdp + in_flight[row] * kept + again)
        return max(needs)

    def option(self, how: Configuration) -> Option:
        """Simulate a step."""
        times = self._times(how)
        busy = how.microbatches * sum(t.total for t in times) / how.pp
        span = busy
        if how.pp > 1:
            cut = self._stages(how)
            hop = kernels.send(
                self.device, max(s[-1].crossing for s in cut[:-1]), far=self.space.devices > self.device.domain
            )
            span = loop.seconds(how.schedule, how.pp, how.microbatches, times, hop)
        after = self._after(how)
        seconds = span + sum(after.values())
        work = 3 * sum(p.operations for p in self.pieces(how.microbatch)) * how.microbatches * how.dp * how.fsdp
        plain = how.microbatches * sum(t.total for t in self._times(how, sharded=False)) / how.pp
        shares = {"operations": plain, "sharded parameters": busy - plain, "bubble": span - busy, **after}
        return Option(
            how,
            seconds,
            UNKNOWN,
            self.rows / seconds / how.devices,
            work / seconds / how.devices / self.device.peak("bf16"),
            1 - busy / span,
            self.bytes(how),
            tuple((name, share) for name, share in shares.items() if share > 0),
        )

    def _longest(self, how: Configuration) -> float:
        """Return a lower bound of the seconds of a step, as in `multimesh.planner.bounds`."""
        times, work = self._times(how), [0.0] * how.pp
        for time, row in zip(times, self._places(how), strict=True):
            work[row] += time.total
        splits = how.pp > 1 and schedules.get(how.schedule).splits
        around = [t.forward + (0.0 if splits else t.backward + t.weights) for t in times]
        longest = max(how.microbatches * work[row] + sum(around[:row]) for row in range(how.pp))
        return longest + sum(self._after(how).values())

    def _state(self, how: Configuration) -> float:
        return STATES * max(sum(p.parameters for s in row for p in s) for row in self._rows(how)) / how.fsdp

    def _after(self, how: Configuration) -> dict[str, float]:
        """Return the seconds after the loop, by part: gradients between replicas, and the optimizer."""
        rows = self._rows(how)
        held = max(sum(p.parameters for s in row for p in s) for row in rows) / how.fsdp
        numbers = max(sum(p.numbers for s in row for p in s) for row in rows) / how.fsdp
        reduced = 2 * kernels.gather(self.device, held, how.dp, how.fsdp)
        return {
            "gradients": self.software.exposed_gradients * reduced,
            "optimizer": kernels.move(self.device, OPTIMIZER * numbers),
        }

    def _times(self, how: Configuration, *, sharded: bool = True) -> tuple[Times, ...]:
        """Return the seconds of a microbatch on each stage."""
        found = []
        for stage in self._stages(how):
            forward = sum(p.seconds for p in stage)
            weights = sum(p.seconds for p in stage if p.parameters)
            backward = forward * (2 if how.recompute == "full" else 1)
            if sharded and how.fsdp > 1:
                moved = kernels.gather(self.device, sum(p.parameters for p in stage), how.fsdp)
                forward = self._overlapped(forward, moved)
                backward = self._overlapped(backward + weights, 2 * moved) - weights
            found.append(Times(forward, backward, weights))
        return tuple(found)

    def _overlapped(self, compute: float, transfer: float) -> float:
        return max(compute, transfer) + self.software.exposed_parameters * min(compute, transfer)

    def _cut(self, how: Configuration) -> tuple[int, ...]:
        if how.pp == 1:
            return (len(self.pieces(how.microbatch)),)
        return self._partition(how.microbatch, how.pp, how.interleave, how.microbatches)

    def _balanced(self, rows: int, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
        layers = [LayerCosts(p.seconds) for p in self.pieces(rows)]
        return partition(layers, pp, chunks=chunks, microbatches=microbatches).sizes

    def _stages(self, how: Configuration) -> list[list[Portion]]:
        found, rest = [], list(self.pieces(how.microbatch))
        for size in how.layers:
            found.append(rest[:size])
            rest = rest[size:]
        return found

    def _places(self, how: Configuration) -> tuple[int, ...]:
        route = schedules.get(how.schedule).placement(how.pp) if how.pp > 1 else (0,)
        return tuple(route[stage % len(route)] for stage in range(how.stages))

    def _rows(self, how: Configuration) -> list[list[list[Portion]]]:
        """Return the stages of each submesh."""
        found: list[list[list[Portion]]] = [[] for _ in range(how.pp)]
        for stage, row in zip(self._stages(how), self._places(how), strict=True):
            found[row].append(stage)
        return found
