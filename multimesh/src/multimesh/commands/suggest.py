"""``python -m multimesh suggest``: the configurations that suit a model and a cluster. Nothing here imports JAX."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from multimesh.errors import UsageError
from multimesh.hardware import devices
from multimesh.planner.bands import UNKNOWN
from multimesh.planner.best_first import Option
from multimesh.planner.suggesting import Training, fewest, suggest
from multimesh.planner.transformer import Transformer

_AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
_FIXES = (*_AXES, "interleave", "schedule", "microbatch", "recompute", "sharded", "precision")
_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")

SHAPES = (
    *((1.2e9, (16, 2048, 8192, 32, 8)), (8e9, (32, 4096, 14336, 32, 8)), (32e9, (64, 5120, 25600, 64, 8))),
    *((70e9, (80, 8192, 28672, 64, 8)), (405e9, (126, 16384, 53248, 128, 8)), (1e12, (160, 20480, 69632, 160, 8))),
)
"""Parameters of usual models, and their layers, hidden, ffn, heads and kv-heads: Llama 3, Qwen 3, and one beyond."""

_VOCABULARY = 131072  # where only the number of parameters is known


def transformer(options: argparse.Namespace) -> Transformer:
    """The sizes that the flags give.

    Raises
    ------
    UsageError
        If there are neither sizes nor ``--params``, or both.
    """
    if options.params is not None:
        given = [name for name in _SIZES if getattr(options, name) is not None]
        if given:
            raise UsageError(f"--params stands for all sizes; leave out --{given[0].replace('_', '-')}, or --params")
        return like(options.params)
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if getattr(options, name) is None]
    if missing:
        raise UsageError(f"--{missing[0]} is missing; give the sizes of the model, or --params alone")
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
    """A dense model of so many parameters: the usual model that is nearest, with more or fewer layers."""
    _, (_, hidden, ffn, heads, keys) = min(
        SHAPES, key=lambda shape: max(shape[0], parameters) / min(shape[0], parameters)
    )
    one = Transformer("", 1, hidden, ffn, heads, keys, _VOCABULARY)
    number = max(1, round((parameters - 2 * one.embedding_parameters) / one.layer_parameters))
    return Transformer(f"{parameters / 1e9:.4g}e9 parameters", number, hidden, ffn, heads, keys, _VOCABULARY)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Search, print unless ``--json`` is given, and return the table as data."""
    device = devices.device(options.device, options.devices_file)
    fixed = {name: getattr(options, name) for name in _FIXES if getattr(options, name) is not None}
    if options.sequence_parallel is not None:
        fixed["sequence_parallel"] = options.sequence_parallel
    if options.partition:
        fixed["layers"] = options.partition
    count = options.gpus * options.nodes
    job = Training(
        transformer(options),
        options.batch_size or 2 * count,
        options.sequence_length,
        device,
        options.gpus,
        fixed,
        limit=options.memory or 0.0,
        least_band=UNKNOWN if options.params is not None else 0.0,
    )
    progress = Progress() if sys.stderr.isatty() and not options.json else None
    try:
        if options.budget is not None:
            count, _ = fewest(job, count, options.gpus, options.budget, progress)
        found = suggest(job, count, told=progress, front=options.picture is not None)
    finally:
        if progress:
            progress.clear()
    if options.params is not None:
        model = job.model
        found = found.changed(
            found.options,
            [
                f"sizes are guessed from --params: {model.layers} layers, hidden {model.hidden}, ffn {model.ffn}, "
                f"{model.heads} heads, {model.kv_heads} for keys, vocabulary {model.vocabulary}"
            ],
        )
    if options.picture is not None:
        try:
            found.to_svg(options.picture)
        except OSError as error:
            raise UsageError(f"--picture {options.picture}: {error.strerror}") from None
    if not options.json:
        if options.budget is not None:
            print(reached(found.best, count, options.budget))
        print(found)
        if options.picture is not None:
            print(f"wrote {options.picture}")
    return {"devices": count, **found.to_json()}


def reached(best: Option, devices: int, budget: float) -> str:
    """How many devices reach a number of tokens a second."""
    return f"{devices} devices reach {best.tokens_per_second * devices:,.0f} tokens/s, of {budget:,.0f} wanted\n"


class Progress:
    """A line on a terminal that says what is looked for."""

    def __call__(self, simulated: int, what: str) -> None:
        """Write it over the one before."""
        print(f"\r{f'searching: {what}, {simulated} simulated':78.78}", end="", file=sys.stderr, flush=True)

    @staticmethod
    def clear() -> None:
        """Remove it."""
        print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)
