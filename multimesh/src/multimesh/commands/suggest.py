"""``python -m multimesh suggest``: the configurations that suit a model and a cluster. Nothing here imports JAX."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimesh.errors import UsageError
from multimesh.hardware import devices
from multimesh.hardware.devices import Device
from multimesh.hardware.software import Stack, stack
from multimesh.planner import bands, bill, calibration, models, page
from multimesh.planner.bands import UNKNOWN, MeasuredStep
from multimesh.planner.best_first import Option
from multimesh.planner.bill import Bill, Terms
from multimesh.planner.step import forecast
from multimesh.planner.suggesting import Training, fewest, suggest
from multimesh.planner.suggestions import Suggestions
from multimesh.planner.transformer import Transformer

_AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
_FIXES = (*_AXES, "etp", "load", "interleave", "schedule", "microbatch", "recompute", "sharded", "precision")
_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")

SHAPES = (
    *((1.2e9, (16, 2048, 8192, 32, 8)), (8e9, (32, 4096, 14336, 32, 8)), (32e9, (64, 5120, 25600, 64, 8))),
    *((70e9, (80, 8192, 28672, 64, 8)), (405e9, (126, 16384, 53248, 128, 8)), (1e12, (160, 20480, 69632, 160, 8))),
)
"""Parameters of usual models, and their layers, hidden, ffn, heads and kv-heads: Llama 3, Qwen 3, and one beyond."""

_VOCABULARY = 131072  # where only the number of parameters is known


def transformer(options: argparse.Namespace) -> Transformer:
    """Return the sizes that the flags give.

    Raises ``UsageError`` if there are neither sizes nor ``--params``, or both.
    """
    if options.model is not None:
        given = [name for name in (*_SIZES, "params", "experts", "active") if getattr(options, name)]
        if given:
            raise UsageError(f"--model has all sizes; leave out --{given[0].replace('_', '-')}, or --model")
        found = models.model(options.model)
        return dataclasses.replace(found, name=options.name) if options.name else found
    if options.params is not None:
        given = [name for name in _SIZES if getattr(options, name) is not None]
        if given:
            raise UsageError(f"--params stands for all sizes; leave out --{given[0].replace('_', '-')}, or --params")
        return like(options.params)
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if getattr(options, name) is None]
    if missing:
        raise UsageError(f"--{missing[0]} is missing; give the sizes of the model, or --model or --params alone")
    return Transformer(
        options.name or f"{options.layers} layers of {options.hidden}",
        options.layers,
        options.hidden,
        options.ffn or 4 * options.hidden,
        options.heads,
        options.kv_heads or options.heads,
        options.vocab,
        gated=not options.plain_mlp,
        experts=options.experts,
        active=options.active,
        tied=options.tied,
    )


def like(parameters: float) -> Transformer:
    """Return a dense model of so many parameters: the nearest usual model, with more or fewer layers."""
    _, (_, hidden, ffn, heads, keys) = min(
        SHAPES, key=lambda shape: max(shape[0], parameters) / min(shape[0], parameters)
    )
    one = Transformer("", 1, hidden, ffn, heads, keys, _VOCABULARY)
    number = max(1, round((parameters - 2 * one.embedding_parameters) / one.layer_parameters))
    return Transformer(f"{parameters / 1e9:.4g}e9 parameters", number, hidden, ffn, heads, keys, _VOCABULARY)


@dataclass(frozen=True)
class Answer:
    """The result for a device: its suggestions, their terms, and the bill."""

    device: Device
    software: Stack
    devices: int
    suggestions: Suggestions
    bill: Bill | None


def run_search(options: argparse.Namespace) -> dict[str, Any]:
    """Search, print unless ``--json`` is given, and return the table as data."""
    names = options.device.split(",")
    terms = _terms(options, len(names))
    progress = Progress() if sys.stderr.isatty() and not options.json else None
    try:
        found = [_one(options, name, its, progress) for name, its in zip(names, terms, strict=True)]
    finally:
        if progress:
            progress.clear()
    best = min(found, key=lambda each: each.suggestions.best.seconds)
    bills = [each.bill for each in found if each.bill is not None]
    model = transformer(options)
    _write(options, "--picture", options.picture, best.suggestions.to_svg)
    if options.html is not None:
        drawn = page.timeline(model, best.suggestions.best, best.device, best.software)
        text = page.page(best.suggestions, bills, terms[0], drawn)
        _write(options, "--html", options.html, lambda path: Path(path).write_text(text, encoding="utf-8"))
    if not options.json:
        for each in found:
            if options.budget is not None:
                print(describe_reach(each.suggestions.best, each.devices, options.budget))
            print(each.suggestions, end="\n\n" if each is not found[-1] else "\n")
        if terms[0] is not None:
            print("\n" + "\n".join(bill.table(bills, terms[0])))
        for path in (options.picture, options.html):
            if path is not None:
                print(f"wrote {path}")
    data = {"devices": best.devices, **best.suggestions.to_json(), "bills": [each.to_json() for each in bills]}
    if len(found) > 1:
        data["by_device"] = {each.device.name: each.suggestions.to_json() for each in found}
    return data


def _one(options: argparse.Namespace, name: str, terms: Terms | None, progress: Progress | None) -> Answer:
    """Search for one device."""
    on = devices.device(name, options.devices_file)
    usual = "maxtext-tpu" if on.generation.startswith("tpu") else "modern"
    software = stack(options.software or usual)
    if options.network is not None:
        on = dataclasses.replace(on, network=options.network)
    job = training(options, on, software)
    calibrated = None
    if options.calibrate is not None:
        calibrated = calibration.read(options.calibrate, on, software)
        job = dataclasses.replace(job, device=calibrated.device(on), software=calibrated.stack(software))
    count = options.gpus * options.nodes
    if options.budget is not None:
        count, _ = fewest(job, count, options.gpus, options.budget, progress)
    drawn = options.picture is not None or options.html is not None
    found = suggest(job, count, told=progress, front=drawn)
    notes = list(_notes(options, job, found.best))
    best = list(found.options)
    if calibrated is not None:
        notes.append(str(calibrated))
        if calibrated.run is not None:
            best = [_with_run(job, option, calibrated.run) for option in best]
            before, after = found.best.band or 0.0, next(o for o in best if o.how == found.best.how).band or 0.0
            unlike = "; your run is not much like the suggestion: measure one that is" if after > before else ""
            notes.append(
                f"the band of the suggestion is {100 * after:.0f} % after your run, {100 * before:.0f} % before{unlike}"
            )
    found = found.changed(best, notes)
    return Answer(job.device, job.software, count, found, bill.bill(found.best, job.device, terms) if terms else None)


def training(options: argparse.Namespace, on: Device, software: Stack) -> Training:
    """Return the training to search for."""
    fixed = {name: getattr(options, name) for name in _FIXES if getattr(options, name) is not None}
    precisions: tuple[str, ...] = ("bf16",)
    if fixed.get("precision") == "any":
        del fixed["precision"]
        precisions = tuple(name for name in devices.PRECISIONS if getattr(on, name))
    if options.sequence_parallel is not None:
        fixed["sequence_parallel"] = options.sequence_parallel
    if options.partition:
        fixed["layers"] = options.partition
    return Training(
        transformer(options),
        options.batch_size or 2 * options.gpus * options.nodes,
        options.sequence_length,
        on,
        options.gpus,
        fixed,
        software,
        limit=options.memory or 0.0,
        least_band=UNKNOWN if options.params is not None else 0.0,
        precisions=precisions,
        offloads=options.offload,
    )


def _with_run(job: Training, option: Option, run: MeasuredStep) -> Option:
    """Return an option with the band after a run of the user's own."""
    step = forecast(job.model, option.how, job.device, job.software)
    return dataclasses.replace(option, band=bands.after_run(step, run))


def _notes(options: argparse.Namespace, job: Training, best: Option) -> Iterator[str]:
    model = job.model
    if options.params is not None:
        yield (
            f"sizes are guessed from --params: {model.layers} layers, hidden {model.hidden}, ffn {model.ffn}, "
            f"{model.heads} heads, {model.kv_heads} for keys, vocabulary {model.vocabulary}"
        )
    yield from bands.warnings(forecast(model, best.how, job.device, job.software))


def _terms(options: argparse.Namespace, count: int) -> list[Terms | None]:
    """Return the terms of the bill of each device."""
    if options.tokens is None:
        for name in ("price", "power", "goodput"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for the bill; add --tokens, such as --tokens 15e12")
        return [None] * count
    prices = options.price or (None,)
    if len(prices) not in (1, count):
        raise UsageError(f"--price has {len(prices)} prices, --device {count} devices; give one, or as many")
    lost = options.goodput or (0.0, 0.0)
    return [Terms(options.tokens, price, options.power, *lost) for price in (prices * count)[:count]]


def _write(options: argparse.Namespace, flag: str, path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def describe_reach(best: Option, devices: int, budget: float) -> str:
    """Return a sentence that says how many devices reach a number of tokens a second."""
    return f"{devices} devices reach {best.tokens_per_second * devices:,.0f} tokens/s, of {budget:,.0f} wanted\n"


class Progress:
    """A line on a terminal that says which configurations are searched."""

    def __call__(self, simulated: int, what: str) -> None:
        """Write it over the one before."""
        print(f"\r{f'searching: {what}, {simulated} simulated':78.78}", end="", file=sys.stderr, flush=True)

    @staticmethod
    def clear() -> None:
        """Remove it."""
        print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)
