"""``maxtext/run.py --suggest``: the planner's search for a model of MaxText, printed as a command line."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import multimesh
from multimesh import planner
from multimesh_maxtext import errors
from multimesh_maxtext.command.check_flags import check_job, find_wrong_settings
from multimesh_maxtext.command.command_line import CommandLine, write_words
from multimesh_maxtext.command.environment import usable_memory
from multimesh_maxtext.command.flags import DEFAULTS, DEVICES, FLAGS, Flags
from multimesh_maxtext.command.forecasting import DROPPING, FIELDS, planner_fields, run_forecast
from multimesh_maxtext.command.job import UNLIKE, Model, Paths, describe_model, transformer
from multimesh_planner import Configuration, Option, Suggestions
from multimesh_planner.suggestions import describe_how

POLICIES = ("minimal", "save_dot_except_mlp", "save_qkv_proj", "full")
"""Policies of MaxText that are searched; all are also names of `Configuration.recompute`."""

_SEARCH = ("suggest", "dry_run", "json", "device")  # flags that the suggested command lines have not
_WORKSPACE = 3e9  # bytes of the kernels of a stage, about
_TRIES = 3  # exact forecasts, of 10 to 60 s each


@dataclass
class Request:
    """A command line that asks for suggestions."""

    flags: Flags
    names: frozenset[str]  # of its flags, also of those with their default: --zero 0 stays
    maxtext: Path  # the folder that holds MaxText's package
    model: Model  # its sizes
    console: Console = field(default_factory=lambda: Console(stderr=True, quiet=True))
    refused: list[str] = field(default_factory=list)  # errors of configurations that would be refused

    def training(self, limit: float) -> planner.Training:
        """Return the planner's task. A device may use ``limit`` bytes; 0: JAX's usual part of its memory."""
        flags, names = self.flags, self.names & FIELDS.keys()
        if self.model.experts > 1:
            names -= {"dp"}  # in the planner it is that of dp and ep together; see `accepts`
        return planner.Training(
            transformer(self.model),
            flags.batch_size or 2 * flags.nodes * flags.gpus,
            flags.sequence_length,
            planner.device(flags.device or "h100"),
            flags.gpus if flags.gpus > 1 else 0,  # one process per GPU says nothing of nodes
            planner_fields(flags, self.model, names),
            replace(planner.software("maxtext"), masks_groups=self.model.product == "ragged_dot"),
            limit,
            planner.UNKNOWN if self.model.resolved.get("decoder_block") in UNLIKE else 0.0,
            POLICIES,
            sharded_alone="none",  # MaxText's own ZeRO-1 rounds to bfloat16
            gathers=True,
            flags=("", "--fbmem"),
            workspace=_WORKSPACE,
        )

    def change(self, how: Configuration) -> Flags:
        """Return the flags of a configuration: those of the command line, and what they leave open."""
        usual = "interleaved" if how.interleave > 1 else "1f1b"
        values: dict[str, Any] = {name: getattr(how, attribute) for name, attribute in FIELDS.items()} | {
            "dp": how.dp // how.ep,
            "schedule": how.schedule if how.pp > 1 and how.schedule != usual else None,
            # which attends over the parts of other devices
            "attention": "cudnn_flash_te" if how.cp > 1 else self.flags.attention,
            "zero": 2 if how.sharded == "optimizer" and how.dp > how.ep else 0,
            "partition": how.layers or None,
            "batch_size": how.batch,
            "sequence_parallel": (how.sequence_parallel and how.tp > 1) or None,
            "gather_once": how.gather_once or None,
        }
        values = {name: value for name, value in values.items() if name not in self.names}
        return replace(self.flags, **values, **{name: DEFAULTS[name] for name in _SEARCH})

    def plan(self, how: Configuration, text: str) -> int | None:
        """Return the bytes of the fullest device by the exact forecast, as ``--forecast``; None: of one stage."""
        flags = replace(self.change(how), forecast=True, device=self.flags.device)
        if not flags.staged:
            return None
        job = check_job(CommandLine(flags), self.maxtext / "maxtext")
        with tempfile.TemporaryDirectory(prefix="multimesh-suggest-") as folder:
            output = Path(folder)
            paths = Paths(sys.executable, self.maxtext.resolve(), output, output / "metrics.jsonl")
            needs = run_forecast(job, paths, None, self.console, text)["forecast"]
        return max(need["total"] for need in needs)

    def accepts(self, how: Configuration) -> bool:
        """Return whether the launcher accepts a configuration, by all checks of a command line."""
        if how.dp % how.ep or ("dp" in self.names and how.dp // how.ep != self.flags.dp):
            return False
        try:
            check_job(CommandLine(self.change(how)), self.maxtext / "maxtext")
        except errors.MissingPartError:
            return True  # the cluster may have what this machine has not
        except errors.LauncherError as error:
            self.refused.append(str(error).splitlines()[0])
            return False
        return True

    def list_remedies(self) -> Iterator[str]:
        """Yield flags and settings that save memory, and that the command line has not."""
        if self.model.product == "ragged_dot":
            yield DROPPING
        if "remat" in self.names and self.flags.remat != "full":
            yield "--remat full"


def run(parsed: CommandLine, argv: Sequence[str], maxtext: Path) -> int:
    """Search, forecast the best exactly but with ``--dry-run``, and print; return the exit code."""
    flags, words = parsed.flags, {word.split("=")[0] for word in argv}
    errors.raise_all(parsed.wrong or [*_find_wrong(flags), *find_wrong_settings(flags, maxtext / "maxtext")])
    names = frozenset(name for name, flag in FLAGS.items() if words & {flag.option, f"--no-{flag.option[2:]}"})
    console, model = Console(stderr=True, quiet=flags.json), describe_model(flags, maxtext / "maxtext")
    request = Request(flags, names, maxtext, model, console)
    training = request.training(float(usable_memory(flags) or 0))
    try:
        with console.status("searching"):
            suggestions = planner.suggest(training, flags.nodes * flags.gpus, accepts=request.accepts)
    except multimesh.UsageError as error:
        reason = f"; {request.refused[0]}" if request.refused else ""
        full = error.exit_code == errors.DoesNotFitError.exit_code
        text = " or ".join([str(error).removeprefix("suggest: "), *(request.list_remedies() if full else ())])
        raise (errors.DoesNotFitError if full else errors.FlagError)(f"--suggest: {text}{reason}") from None
    if not flags.dry_run:
        suggestions = check_plans(request, training, suggestions)
    notes = [f"left out, as it would be refused: {reason}" for reason in dict.fromkeys(request.refused)]
    if model.experts > 1:
        notes.append("the column dp counts the devices of ep too, an axis of its own in run.py: --dp is dp / ep")
    suggestions = suggestions.with_options(suggestions.options, notes)
    best = suggestions.best
    command = f"maxtext/run.py {shlex.join(write_words(request.change(best.how)))}"
    if flags.json:
        print(json.dumps({**suggestions.to_json(), "command": command, "exit_code": 0}))
    else:
        compiles = "" if best.how.pp > 1 else " --compile"
        exact = f"memory is estimated; with --forecast{compiles} --device {flags.device} the line below checks it"
        print(f"{suggestions}\n\n{'memory of the suggested was forecast exactly' if best.checked else exact}")
        print(f"\nthe best, to be pasted:\n\n{command}")
    return 0


def check_plans(request: Request, training: planner.Training, suggestions: Suggestions) -> Suggestions:
    """Forecast the suggested exactly, and suggest the first that fits; at most three.

    The next is the best of a search in as much less memory as the estimate was too low; where that finds none, the one
    of the table that needs least.

    Raises ``DoesNotFitError`` where none fits.
    """
    flags, option, notes = request.flags, suggestions.best, list[str]()
    limit, devices = float(usable_memory(flags) or 0), flags.nodes * flags.gpus
    checked: dict[Configuration, Option] = {}

    def accepts(how: Configuration) -> bool:
        return how not in checked and request.accepts(how)

    for number in range(1, _TRIES + 1):
        text = f"forecasting the memory of {option.how.shown()} exactly, {number} of at most {_TRIES}"
        try:
            needed = request.plan(option.how, text)
        except errors.LauncherError as error:
            notes.append(f"its memory could not be forecast exactly: {error}")
            needed = None
        verdict = f"{'fits' if needed <= limit else 'no'}, {needed / 1e9:.1f} GB" if needed else ""
        checked[option.how] = replace(option, checked=verdict)
        if needed is None or needed <= limit:
            options = {other.how: other for other in suggestions.options} | checked
            ranked = sorted(options.values(), key=lambda other: other.seconds)
            return replace(suggestions, simplest=option.how).with_options(ranked, notes)
        less = limit * option.bytes / needed + training.workspace
        try:
            option = planner.suggest(replace(training, limit=less), devices, accepts=accepts).best
        except multimesh.UsageError:  # estimates of unlike grids may be off by less
            grids = {how.shown() for how in checked}
            others = [other for other in suggestions.options if other.how.shown() not in grids]
            if not others:
                break
            option = min(others, key=lambda other: other.bytes)
    tried = "; ".join(f"{describe_how(how)}: {other.checked}" for how, other in checked.items())
    remedies = [*request.list_remedies(), "more --nodes"]
    if flags.fbmem is None and flags.device_memory is None:
        remedies.insert(-1, f"--fbmem {int(0.92 * DEVICES[flags.device or 'h100'])} (MiB)")
    raise errors.DoesNotFitError(
        f"--suggest: by exact forecasts none fits into the {limit / 1e9:.1f} GB that JAX may use of a device "
        f"({tried}); use {' or '.join(remedies)}"
    )


def _find_wrong(flags: Flags) -> list[errors.LauncherError]:
    if not flags.device or not flags.gpus:
        return [errors.FlagError("--suggest is for GPUs; add --gpus N, --nodes N and --device, such as --device h100")]
    if flags.backend != "multimesh" or flags.forecast:
        option = "--forecast" if flags.forecast else "--backend"
        return [
            errors.UnsupportedError(f"--suggest is for pipelines of MultiMesh, and nothing else; leave out {option}")
        ]
    if flags.schedule in ("auto", "custom") or flags.partition == "auto":
        return [
            errors.FlagError("--suggest finds --schedule and --partition itself; leave them out, or name one of each")
        ]
    return []
