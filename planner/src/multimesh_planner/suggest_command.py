"""``python -m multimesh suggest``: the configurations that suit a model and a cluster. Nothing here imports JAX."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from multimesh.commands import values
from multimesh.errors import UsageError

from multimesh import schedules
from multimesh_planner import bands, calibration, models
from multimesh_planner.configuration import AXES, MOMENTS, OPTIMIZERS, RECOMPUTE, SHARDED
from multimesh_planner.hardware import devices
from multimesh_planner.hardware.software import software, software_names
from multimesh_planner.search import suggest
from multimesh_planner.space import Training
from multimesh_planner.suggestions import Suggestions, paste
from multimesh_planner.transformer import Transformer

SUMMARY = "find the configurations that suit a model and a cluster"
ABOUT = (
    """\
  python -m multimesh suggest --model llama3-70b --nodes 8
  python -m multimesh suggest --model deepseek-v3 --nodes 128 --sequence-length 4096 --batch-size 8192
  python -m multimesh suggest --model config.json --nodes 8 --tp 8 --optimizer muon --moments bfloat16 --offload

Find the fastest ways to spread the training of a transformer over a cluster: axes of the mesh, schedule, microbatch,
recomputation, layers of the stages. What a flag fixes stays. Seconds are forecasts, with the band in which measured
runs of sources lay that the forecast had not seen. A run of your own narrows it most: --calibrate. Needs neither
devices nor JAX. maxtext/run.py --suggest does the same for MaxText's models.

A device of your own, as a TOML file:

"""
    + devices.EXAMPLE
)

EXIT_CODES = """\
    0  there are configurations that fit
    2  flags that do not fit together
   16  no configuration fits into memory"""

_AXES = (*AXES, "etp", "interleave", "microbatch")
_FIXES = (*_AXES, "load", "schedule", "recompute", "sharded", "precision", "optimizer", "moments", "sequence_parallel")
_SIZES = {
    "layers": "decoder layers",
    "hidden": "width of the model",
    "ffn": "width of the MLP, of each expert (default: 4 x hidden)",
    "heads": "heads of attention",
    "kv_heads": "heads of keys and values (default: as --heads)",
    "vocab": "tokens of the vocabulary",
    "experts": "experts of a layer",
    "active": "experts that a token passes",
}

_EVERY = 2.0  # seconds between lines of progress
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"(\d*\.?\d+(?:e[+-]?\d+)?)\s*([kmgbt]?)(b?)(?:/s)?", re.IGNORECASE)


def size_of(examples: str, unit: str = "") -> Callable[[str], float]:
    """Return a type of numbers such as ``70e9`` and ``80GB``. After a number, ``Gb`` are bits of a network."""

    def parse(text: str) -> float:
        match = _NUMBER.fullmatch(text.strip())
        number = float(match[1]) * _SCALES[match[2].lower()] if match else 0.0
        if match and unit == "network" and match[3] == "b":
            number /= 8
        if not 1e6 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least 1e6, such as {examples}, got {text!r}")
        return number

    return parse


def add_flags(command: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    number: dict[str, Any] = {"type": values.positive, "metavar": "N"}
    public, accelerators = ", ".join(models.names()), ", ".join(devices.device_names())
    classes = "; ".join(f"{name}: {software(name).about}" for name in software_names())
    memory, network = size_of("72e9 or 72GB"), size_of("50e9 bytes, 50GB or 400Gb a second", "network")

    flag = command.add_argument_group("model").add_argument
    flag("--model", metavar="NAME", help=f"a file config.json of Hugging Face or its folder, or one of {public}")
    for name, words in _SIZES.items():
        flag(f"--{name.replace('_', '-')}", help=words, **number)
    flag("--plain-mlp", action="store_true", help="the MLP has no gate: two matrices in place of three")
    flag("--tied", action="store_true", help="the head is the embedding transposed")

    flag = command.add_argument_group("cluster and batch").add_argument
    words = "JSON file of a run of yours, to which three constants are fitted: what makes a forecast most certain"
    flag("--calibrate", type=Path, metavar="FILE", help=words)
    flag("--device", metavar="NAME", default="h100", help=f"{accelerators}; default h100")
    flag("--devices-file", type=Path, metavar="FILE", help="TOML file of further devices, as above")
    flag("--network", type=network, metavar="BYTES", help="that a device sends to other nodes in a second: 50e9, 400Gb")
    flag("--software", metavar="NAME", help=f"what runs it: {classes} (default: nvidia, and maxtext on TPUs)")
    flag("--gpus", default=8, help="GPUs of a node (default: 8)", **number)
    flag("--nodes", default=1, help="default: 1", **number)
    flag("--sequence-length", default=8192, help="default: 8192", **number)
    flag("--batch-size", help="sequences of a step (default: 2 x devices)", **number)
    flag("--memory", type=memory, metavar="BYTES", help="of a device that may be used (default: 3/4, as JAX takes)")

    flag = command.add_argument_group("what stays as you say; all else is searched").add_argument
    for name in _AXES:
        flag(f"--{name}", **number)
    flag("--schedule", type=values.schedule, metavar="NAME", help=", ".join(schedules.names()))
    flag("--recompute", choices=RECOMPUTE, help="what the backward pass computes again")
    flag("--sharded", choices=SHARDED, help="beside the batch (default: optimizer, ZeRO-1)")
    flag("--precision", choices=(*devices.PRECISIONS, "any"), help="default bf16; any: all it has")
    flag("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    flag("--moments", choices=MOMENTS, help="type of the optimizer's moments (default: float32)")
    flag("--offload", action="store_true", help="try also activations and the optimizer's state in the host's memory")
    words = "of the busiest experts, over the mean"
    flag("--load", type=values.at_least(1, float, "a number"), metavar="X", help=words)
    flag("--sequence-parallel", action=argparse.BooleanOptionalAction, help="default: where tp > 1")
    flag("--partition", type=values.sizes, metavar="N,N,...", help="layers of each stage")

    words = "one JSON object instead of the table"
    command.add_argument_group("output").add_argument("--json", action="store_true", help=words)


def transformer(options: argparse.Namespace) -> Transformer:
    """Return the model that the flags name, or whose sizes they give.

    Raises ``UsageError`` if there is neither, or both.
    """
    sizes = {name: getattr(options, name) for name in _SIZES if getattr(options, name)}
    if options.model is not None:
        if sizes:
            raise UsageError(f"--model has all sizes; leave out --{next(iter(sizes)).replace('_', '-')}, or --model")
        return models.model(options.model)
    if missing := [name for name in ("layers", "hidden", "heads", "vocab") if name not in sizes]:
        raise UsageError(f"--{missing[0]} is missing; give the sizes of the model, or --model alone")
    sizes = {"ffn": 4 * options.hidden, "kv_heads": options.heads, "vocabulary": sizes.pop("vocab"), **sizes}
    name = f"{options.layers} layers of {options.hidden}"
    return Transformer(name, **sizes, gated=not options.plain_mlp, tied=options.tied)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Search, print unless ``--json`` is given, and return the table as data."""
    job, calibrated = training(options), None
    if options.calibrate is not None:
        calibrated = calibration.read(options.calibrate, job.device, job.software)
        fitted = {name: getattr(calibrated, name) for name in ("device", "software", "run")}
        job = dataclasses.replace(job, **fitted)
    count, progress = options.gpus * options.nodes, Progress()
    suggestions = suggest(job, count, progress=progress)
    suggestions = suggestions.with_options(suggestions.options, list(_notes(options, job, suggestions, calibrated)))
    end = paste(job, suggestions, options.nodes)
    if not options.json:
        text, encoding = f"{suggestions}\n\n{end}", sys.stdout.encoding or "utf-8"
        print(text if encoding.lower().startswith("utf") else text.replace("±", "+-"))
    return {"devices": count, **suggestions.to_json(), "paste": end}


def training(options: argparse.Namespace) -> Training:
    """Return the training to search for."""
    on = devices.device(options.device, options.devices_file)
    if options.network is not None:
        on = dataclasses.replace(on, network=options.network)
    fixed = {name: getattr(options, name) for name in _FIXES if getattr(options, name) is not None}
    precisions: tuple[str, ...] = ("bf16",)
    if fixed.get("precision") == "any":
        del fixed["precision"]
        precisions = tuple(name for name in devices.PRECISIONS if getattr(on, name))
    if options.partition:
        fixed["layers"] = options.partition
    return Training(
        transformer(options),
        options.batch_size or 2 * options.gpus * options.nodes,
        options.sequence_length,
        on,
        options.gpus,
        fixed,
        software(options.software or ("maxtext" if on.generation.startswith("tpu") else "nvidia")),
        limit=options.memory or 0.0,
        precisions=precisions,
        offloads=options.offload,
    )


def _notes(
    options: argparse.Namespace, job: Training, suggestions: Suggestions, calibrated: calibration.Calibration | None
) -> Iterator[str]:
    best = suggestions.best
    if calibrated is None:
        yield "one run of yours makes the forecast most certain: --calibrate FILE (python -m multimesh suggest --help)"
    else:
        yield str(calibrated)
        after, before = best.band, bands.band(best)
        unlike = "" if after < before else "; your run is not like the suggestion: measure one that is"
        yield f"the band of the suggestion is {100 * after:.0f} % after your run, {100 * before:.0f} % before{unlike}"
    if options.software is None:
        yield f"forecast with the software {job.software.name} ({job.software.about}); --software names another"
    if best.how.tokens > job.software.loss_tokens:
        yield f"memory counts logits of {job.software.loss_tokens:.0f} tokens at a time: compute the loss in blocks"
    if job.model.experts:
        yield "the column dp counts the devices of ep too, an axis of its own in run.py: its --dp is dp / ep"
        yield "XLA's product of experts in run.py copies rows for each expert: run.py --suggest counts these bytes"
    yield from bands.warnings(best)


class Progress:
    """A line on standard error every 2 s, that says which configurations are searched."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, simulated: int, stage: str) -> None:
        """Write it, if it is time."""
        if time.monotonic() - self.last > _EVERY:
            self.last = time.monotonic()
            print(f"searching: {stage}, {simulated} simulated", file=sys.stderr, flush=True)
