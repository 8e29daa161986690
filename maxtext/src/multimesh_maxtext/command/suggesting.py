"""``maxtext/run.py --suggest``: the configurations that suit a model of MaxText and a cluster, as command lines."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import multimesh
from multimesh import planner
from multimesh.planner import Configuration, Option, Suggestions
from multimesh_maxtext.command import memory
from multimesh_maxtext.command.checks import UNLIKE, Job
from multimesh_maxtext.command.inspecting import forecast
from multimesh_maxtext.command.launch import forecasting
from multimesh_maxtext.command.model import Model, describe_model
from multimesh_maxtext.command.options import Options, Parsed, read
from multimesh_maxtext.command.settle import settle
from multimesh_maxtext.command.sizes import precision, recompute, transformer
from multimesh_maxtext.command.translate import Paths
from multimesh_maxtext.errors import (
    DoesNotFitError,
    FileError,
    LauncherError,
    MissingPartError,
    UnsupportedError,
    UsageError,
    raise_all,
)
from multimesh_maxtext.handoff import Forecast

POLICIES = ("minimal", "save_dot_except_mlp", "save_qkv_proj", "full")
"""Policies of MaxText that are searched; all are also names of `Configuration.recompute`."""

FP8 = ("quantization=fp8_full", "use_qwix_quantization=true")
"""Settings of MaxText for products in fp8, as pipelines were compared with it."""

_AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep", "interleave")
_OURS = {
    "--suggest": 0,
    "--confirm": 0,
    "--no-confirm": 0,
    "--json": 0,
    "--budget": 1,
    "--picture": 1,
    "--device": 1,
    "--precision": 1,
}
"""Flags that the suggested command lines have not, and how many values follow."""

_CONTEXT_ATTENTION = "cudnn_flash_te"  # a kernel that attends over the parts of other devices

_CONFIRMED, _TRIED = 3, 6  # plans that must suffice, and that are made at most
_WORKSPACE = 3e9  # bytes of the kernels of a stage, about


@dataclass
class Asked:
    """A command line that asks for suggestions."""

    # options, argv: the flags, parsed and as words
    options: Options
    argv: tuple[str, ...]
    maxtext: Path  # the folder that holds MaxText's package
    model: Model  # its sizes
    refused: list[str] = field(default_factory=list)  # errors of configurations that would be refused

    @property
    def given(self) -> frozenset[str]:
        """Flags of the command line."""
        return frozenset(word.split("=")[0] for word in self.argv if word.startswith("--"))

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.options.batch_size or 2 * self.options.nodes * self.options.gpus

    def fixed(self) -> dict[str, Any]:
        """Return the fields of `Configuration` that flags fix."""
        o = self.options
        found = {name: getattr(o, name) for name in _AXES if f"--{name}" in self.given}
        if "dp" in found and self.model.experts > 1:
            del found["dp"]  # there it is that of dp and ep together; see `accepts`
        if "--microbatch-size" in self.given:
            found["microbatch"] = o.microbatch_size
        if "--remat" in self.given:
            found["recompute"] = recompute(o.remat)
        if o.schedule:
            found["schedule"] = o.schedule
        if isinstance(o.partition, tuple):
            found["layers"] = o.partition
        if o.sequence_parallel is not None:
            found["sequence_parallel"] = o.sequence_parallel
        if "--zero" in self.given:
            found["sharded"] = "optimizer" if o.zero else "none"
        if o.gather_once is not None:
            found["gather_once"] = o.gather_once
        found["precision"] = o.precision or precision(self.model)
        return found

    def words(self, how: Configuration, nodes: int | None = None) -> list[str]:
        """Return the flags of a configuration, after what was given."""
        o = self.options
        flags: list[tuple[str, object, object]] = [
            ("--dp", how.dp // how.ep, 1),
            *((f"--{name}", getattr(how, name), 1) for name in ("fsdp", "tp", "cp", "pp", "ep", "interleave")),
            ("--microbatch-size", how.microbatch, 1),
            ("--schedule", how.schedule, "interleaved" if how.interleave > 1 else "1f1b") if how.pp > 1 else ("", 0, 0),
            ("--attention", _CONTEXT_ATTENTION if how.cp > 1 else "", ""),
            ("--zero", 2 if how.sharded == "optimizer" and how.dp > how.ep else 0, 0),
            ("--remat", how.recompute, "minimal"),
            ("--partition", ",".join(map(str, how.layers)), ""),
            ("--batch-size", self.batch, None),
        ]
        words = list(_without(self.argv, {**_OURS, "--nodes": 1} if nodes else _OURS))
        more = ["--nodes", str(nodes)] if nodes else []
        for flag, value, usual in flags:
            if value != usual and flag not in self.given:
                more += [flag, str(value)]
        if how.sequence_parallel and how.tp > 1 and o.sequence_parallel is None:
            more.append("--sequence-parallel")
        if how.gather_once and o.gather_once is None:
            more.append("--gather-once")
        if o.precision == "fp8" and precision(self.model) != "fp8":
            more += FP8
        at = words.index("--text") if "--text" in words else len(words)
        return [*words[:at], *more, *words[at:]]

    def settled(self, how: Configuration, nodes: int | None = None) -> Job:
        """Return the job of a configuration, after all checks of a command line."""
        return settle(read(self.words(how, nodes)), self.maxtext / "maxtext").job

    def accepts(self, how: Configuration, nodes: int | None = None) -> bool:
        """Return whether the launcher accepts a configuration."""
        if "--dp" in self.given and how.dp // how.ep != self.options.dp:
            return False
        try:
            self.settled(how, nodes)
        except MissingPartError:
            return True  # the cluster may have what this machine has not
        except LauncherError as error:
            self.refused.append(str(error).splitlines()[0])
            return False
        return True


def run(parsed: Parsed, argv: Sequence[str], maxtext: Path) -> int:
    """Search, confirm, print; return the exit code."""
    raise_all(parsed.wrong)
    o = parsed.options
    for wrong, error in _wrong(o):
        if wrong:
            raise error
    asked = Asked(o, tuple(argv), maxtext, describe_model(o, maxtext / "maxtext"))
    limit = memory.usable(o)
    console = Console(stderr=True, quiet=o.json)
    try:
        with console.status("searching") as status:

            def told(simulated: int, what: str) -> None:
                status.update(f"searching: {what}, {simulated} simulated")

            training, nodes = make_training(asked, float(limit or 0)), o.nodes
            if o.budget:
                devices, _ = planner.fewest(training, o.nodes * o.gpus, o.gpus, o.budget, told)
                nodes = devices // o.gpus
            other = nodes if nodes != o.nodes else None
            found = planner.suggest(
                training,
                nodes * o.gpus,
                accepts=lambda how: asked.accepts(how, other),
                told=told,
                front=o.picture is not None,
            )
            if o.confirm:
                found = _confirm(asked, found, other, status.update)
    except multimesh.UsageError as error:
        reason = f"; {asked.refused[0]}" if asked.refused else ""
        kind = DoesNotFitError if error.exit_code == DoesNotFitError.exit_code else UsageError
        raise kind(f"--suggest: {str(error).removeprefix('suggest: ')}{reason}") from None
    found = found.changed(found.options, list(_notes(asked, found.best.how)))
    _show(asked, found, asked.words(found.best.how, other), nodes)
    return 0


def _wrong(o: Options) -> Iterator[tuple[object, LauncherError]]:
    yield not o.device, UsageError("--suggest needs to know the GPUs; add --device, such as --device h100")
    yield not o.gpus, UsageError("--suggest needs the GPUs of a process; add --gpus N, and --nodes N")
    yield (
        o.backend != "multimesh",
        UnsupportedError(f"--backend {o.backend} has no use for --suggest: its pipeline is MaxText's; leave it out"),
    )
    yield (
        o.schedule in ("auto", "custom") or o.partition == "auto",
        UsageError("--suggest finds schedule and partition itself; leave out --schedule and --partition, or name one"),
    )
    yield o.forecast, UsageError("--suggest and --forecast are two things to do; choose one")


def make_training(asked: Asked, limit: float) -> planner.Training:
    """Return the planner's task. A device may use ``limit`` bytes; 0: JAX's usual part of its memory."""
    o, sizes = asked.options, transformer(asked.model)
    return planner.Training(
        sizes,
        asked.batch,
        o.sequence_length,
        planner.device(o.device or "h100"),
        o.gpus if o.gpus > 1 else 0,  # one process per GPU says nothing of nodes
        asked.fixed(),
        planner.stack("maxtext"),
        max(0.0, limit - _WORKSPACE),
        planner.UNKNOWN if asked.model.resolved.get("decoder_block") in UNLIKE else 0.0,
        POLICIES,
        sharded_alone="none",  # MaxText's own ZeRO-1 rounds to bfloat16
        gathers=True,
    )


def _confirm(asked: Asked, found: Suggestions, nodes: int | None, told: Any) -> Suggestions:
    """Make the plans of the best, until three suffice; leave out those that need more memory than there is."""
    limit, options, notes = memory.usable(asked.options) or 0, list[Option](), list[str]()
    sufficing, failed = 0, False
    for number, option in enumerate(found.options):
        if sufficing == _CONFIRMED or number == _TRIED or failed:
            options += found.options[number:]
            break
        told(f"making the plan of {option.how.shown()}")
        try:
            job = asked.settled(option.how, nodes)
            if not job.options.staged:
                options.append(replace(option, checked="one stage"))
                continue
            needs = _plan(job, asked).needs
        except LauncherError as error:
            notes.append(f"plans cannot be made here: {error}")
            options.append(option)
            failed = True
            continue
        needed = max(need.total for need in needs)
        if needed > limit:
            sizes = f"{needed / 1e9:.1f} GB, and a device has {limit / 1e9:.1f}"
            notes.append(f"left out, as its plan needs {sizes}: {option.how.shown()}")
            continue
        options.append(replace(option, checked=f"{needed / 1e9:.1f} GB"))
        sufficing += 1
    if not options:
        remedy = "use --remat full, more devices, or a smaller --batch-size"
        raise DoesNotFitError(f"--suggest: {'; '.join(notes)}; {remedy}")
    return found.changed(options, notes)


def _plan(job: Job, asked: Asked) -> Forecast:
    """The forecast of a plan. The kernel of attention that MaxText would select needs a GPU; that of cuDNN does not."""
    if job.options.attention == "autoselected":
        job = replace(job, options=Options(**{**vars(job.options), "attention": "cudnn_flash_jax"}))
    with tempfile.TemporaryDirectory(prefix="multimesh-suggest-") as folder:
        output = Path(folder)
        paths = Paths(sys.executable, asked.maxtext.resolve(), output, output / "metrics.jsonl")
        return forecast(forecasting(job, paths, inherited=os.environ, gpu_memory=None), paths)


def _notes(asked: Asked, how: Configuration) -> Iterator[str]:
    block = asked.model.resolved.get("decoder_block")
    if asked.model.experts > 1:
        yield "the column dp counts the devices of ep too, which run.py has as an axis of its own: --dp is dp / ep"
    if how.cp > 1:
        yield "--cp on GPUs needs TransformerEngine there, which orders the parts of sequences"
    if block in UNLIKE:
        yield f"layers of decoder_block={block} are not alike; the forecast takes them as equal, and its band is wider"
    if "--remat" in asked.given and asked.options.remat != recompute(asked.options.remat):
        yield f"--remat {asked.options.remat} is forecast as {recompute(asked.options.remat)}"
    for reason in dict.fromkeys(asked.refused):
        yield f"left out, as it would be refused: {reason}"


def _show(asked: Asked, found: Suggestions, words: Sequence[str], nodes: int) -> None:
    o, command = asked.options, f"maxtext/run.py {shlex.join(words)}"
    if o.picture:
        try:
            found.to_svg(o.picture)
        except OSError as error:
            raise FileError(f"--picture {o.picture}: {error.strerror}; choose another file") from error
    if o.json:
        print(json.dumps({**found.to_json(), "nodes": nodes, "command": command, "exit_code": 0}))
        return
    if o.budget:
        reached = found.best.tokens_per_second * found.best.how.devices
        print(f"{nodes} nodes reach {reached:,.0f} tokens/s, of {o.budget:,.0f} wanted\n")
    print(found)
    if not any(option.checked for option in found.options):
        print("\nmemory is estimated; without --no-confirm the plans of the three best are made, which is exact")
    print(f"\nthe best, to be pasted:\n\n{command}")
    if o.picture:
        print(f"\nwrote {o.picture}")


def _without(argv: Sequence[str], flags: Mapping[str, int]) -> Iterator[str]:
    """Words of a command line without some flags, and without their values."""
    skip = 0
    for word in argv:
        if skip:
            skip -= 1
            continue
        name, equals, _ = word.partition("=")
        if name in flags:
            skip = 0 if equals else flags[name]
            continue
        yield word
