"""How far a forecast may be off, by a small table of what forecasts of runs that no constant was fitted to were off.

``bands.csv`` has a row for a class of software, a generation of devices, and experts or not; ``*`` stands for any. A
band is the 92nd percentile of ``|measured / forecast - 1|``, with the constants fitted without the source of each run,
times ``1 + 2 / n`` of ``n`` sources: a run lies inside where ``forecast x (1 +- band)``, as it is printed, has it.
``published.csv`` has the fastest published run of each model, device, precision and number of devices.
``planner/benchmarks/held_out.py`` writes both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from multimesh_planner import tables
from multimesh_planner.step import Step

UNKNOWN = 0.30
"""Half width of a band at least where sizes are guessed, or what runs is no transformer."""

_ABOVE = 1.15  # times the utilization of the fastest published run
_EXPERTS = 4  # times as many experts, or as few, have runs that tell of a model
_FACTOR = 2.0  # of sizes within which a run of the user's own is like a forecast

Key = tuple[str, str, str]


def classify(step: Step, of: str = "seconds") -> Key:
    """Return the class of software, the generation and the kind of model of a step, by which its seconds have a band.

    Software before fused attention is of no class, and PyTorch's is one class, compiled or not. Its ``memory`` has a
    band of its own, and any other that of the one source that published bytes.
    """
    software = step.software.name.removesuffix("-eager") if step.software.fused_attention else "unknown"
    kind = "experts" if step.model.experts else "dense"
    if of == "memory":
        return software if software == "pytorch" else "other", "*", kind
    return software, step.device.generation, kind


def generalize(key: Key) -> Iterator[Key]:
    """Yield a key, and the keys of wider and wider sets of runs that contain its own."""
    software, _, kind = key
    if software != "unknown":
        yield key
        yield software, "*", kind
    yield "*", "*", kind


@functools.cache
def _bands() -> Mapping[tuple[str, ...], float]:
    names = "of", "class", "generation", "kind"
    return {tuple(row[name] for name in names): float(row["band"]) for row in tables.read_table("bands.csv")}


def look_up(of: str, key: Key, widths: Mapping[tuple[str, ...], float] | None = None) -> float:
    """Return the band of the narrowest set of runs that has one: ``of`` is seconds, memory, or run (after a run)."""
    table = _bands() if widths is None else widths
    return next((table[of, *wider] for wider in generalize(key) if (of, *wider) in table), UNKNOWN)


def band(step: Step, run: Step | None = None) -> float:
    """Return half of the width of a forecast's band, as a share of it.

    Where constants were fitted to a ``run`` of the user's own, it is narrower if that is like the forecast.
    """
    width = look_up("seconds", classify(step))
    return min(width, look_up("run", classify(step))) if run is not None and is_like(step, run) else width


def memory_band(step: Step) -> float:
    """Return half of the width of the band of a forecast's bytes, as a share of them."""
    return look_up("memory", classify(step, "memory"))


def is_like(step: Step, run: Step) -> bool:
    """Return whether a run of the user's own tells of a forecast: of one kind in every respect, and of a near size."""
    one, other = (
        (*classify(s), s.device.name, s.how.precision, s.how.recompute, s.how.tp > 1, s.how.pp > 1, s.how.fsdp > 1)
        for s in (step, run)
    )
    sizes = (
        (s.model.hidden, s.how.sequence, s.how.tokens, s.how.devices / 2, s.model.experts or 1) for s in (step, run)
    )
    return one == other and all(max(a, b) <= _FACTOR * min(a, b) for a, b in zip(*sizes, strict=True))


def warnings(step: Step) -> Iterator[str]:
    """Return reasons to doubt a forecast: no published run was as fast, or no run like it was published."""
    model, on, precision = step.model, step.device.name, step.how.precision
    sizes = [str(size) for size in (model.layers, model.hidden, model.experts)]
    least, most = model.experts / _EXPERTS, model.experts * _EXPERTS
    runs = [run for run in tables.read_table("published.csv") if run["device"] == on and run["precision"] == precision]
    runs = [run for run in runs if least <= int(run["experts"]) <= most]
    equal = [run for run in runs if [run["layers"], run["hidden"], run["experts"]] == sizes]
    nearest = min((abs(int(run["devices"]) - step.how.devices) for run in equal), default=0)
    near = [run for run in equal if abs(int(run["devices"]) - step.how.devices) == nearest]
    fastest = max(near or runs, key=lambda run: float(run["utilization"]), default=None)
    if fastest is None:
        kind = f"{least:.0f} to {most:.0f} experts" if model.experts else "a dense MLP"
        yield f"no run of a model with {kind} on {on} in {precision} was published: the forecast was not checked there"
    elif step.utilization > _ABOVE * (utilization := float(fastest["utilization"])):
        of = model.name if equal else f"a model {'with' if model.experts else 'without'} experts"
        yield (
            f"faster than every published run of {of} on {on} in {precision}, on about as many: the fastest, "
            f"{fastest['id']} (batch {fastest['batch']} x {fastest['sequence']} on {fastest['devices']}, "
            f"{float(fastest['seconds']):.4g} s), had {100 * utilization:.0f} % MFU for {100 * step.utilization:.0f} % "
            f"here; at its MFU this step takes {step.seconds * step.utilization / utilization:.4g} s"
        )
