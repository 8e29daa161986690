"""The parsed command line of ``maxtext/run.py``, with the type of every flag. It imports no JAX and reads no file."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from multimesh_maxtext.command.flags import GROUPS
from multimesh_maxtext.command.values import GRID_AXES, Axes
from multimesh_maxtext.errors import UsageError, raise_all


class Options(argparse.Namespace):
    """The parsed flags; ``None`` means "not given" wherever the default depends on other flags or on the model."""

    # processes and devices
    nodes: int
    gpus: int
    cpus: int | None
    spawn: bool
    max_restarts: int | None
    fallback: str | tuple[Axes, ...] | None
    show_grids: bool
    start_timeout: float | None
    silence_timeout: float | None
    compile_timeout: float | None
    transfer_timeout: float | None
    stall_timeout: float | None
    # parallelism
    dp: int
    fsdp: int
    tp: int
    cp: int
    pp: int
    ep: int
    interleave: int
    partition: tuple[int, ...] | str | None
    sequence_parallel: bool | None
    gather_once: bool | None
    zero: int
    # training loop
    num_steps: int
    batch_size: int | None
    microbatch_size: int
    schedule: str | None
    custom_schedule_path: Path | None
    seed: int
    # backend
    backend: str
    # model
    maxtext_config: Path | None
    model_name: str | None
    num_layers: int | None
    model_dims: int | None
    mlp_dims: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    sequence_length: int
    attention: str
    attention_type: str | None
    remat: str
    scan_layers: bool | None
    use_iota_embed: bool | None
    logits_dot_in_fp32: bool | None
    settings: list[str]
    # data
    text: list[Path] | None
    use_tfds_dataset: bool | None
    dataset_path: str | None
    dataset_name: str | None
    tokenizer_path: str | None
    # outputs
    output: Path | None
    overwrite: bool
    metrics_file: Path | None
    metrics_hook: str | None
    prometheus: Path | None
    dry_run: bool
    json: bool
    verify: bool
    check: bool | None
    profile: bool | None
    # checkpoints and evaluation
    checkpoint: Path | None
    checkpoint_every: int | None
    keep_checkpoints: int
    resume: bool
    export: Path | None
    eval_every: int | None
    eval_steps: int | None
    # memory and runtime
    forecast: bool
    compile: bool
    precompile: Path | None
    precompiled: Path | None
    suggest: bool
    budget: float | None
    precision: str | None
    picture: Path | None
    confirm: bool
    device_memory: int | None
    device: str | None
    fbmem: int | None
    # XLA
    collective_matmul: int | None
    latency_hiding_scheduler: bool | None
    xla_pipelining: bool | None
    xla_loop_buffering: bool | None
    xla_ar_threshold: int | None
    xla_ag_threshold: int | None
    xla_rs_threshold: int | None
    use_nccl_comm_split: bool | None
    debug_nccl: bool | None
    # dumps
    dump: Path | None
    dump_only: bool | None
    dump_mpmd_passes: bool | None
    dump_all_passes: bool | None
    dump_hlo: bool
    hlo: Path | None
    debug: str
    # compiler options of MultiMesh
    autoshard: bool | None
    replicate_small_params: bool | None
    fuse_tasks: bool | None
    only_fuse_loop_tasks: bool | None
    # the original's runtime
    zcmem: int | None
    sysmem: int | None
    host_offload_min_reuse_distance: int | None
    compile_topology_num_slices: int | None
    network: str | None
    hoist_loop_convert: bool | None
    load_balance_embeddings: bool | None
    load_balance_decoder_norm: bool | None
    realm: list[str]

    def has(self, name: str) -> bool:
        """Say whether a flag without a default was given, other than as ``--no-X``; 0 is a value."""
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def domains(self) -> int:
        """Number of tensor-parallel domains that hold different rows of the batch: dp x fsdp x ep."""
        return self.dp * self.fsdp * self.ep

    @property
    def parallelism(self) -> int:
        """Number of devices that the parallelism flags ask for: dp x fsdp x tp x cp x pp x ep."""
        return self.domains * self.tp * self.cp * self.pp

    @property
    def grid(self) -> str:
        """The axes that are longer than 1: ``dp 2 pp 4``."""
        return " ".join(f"{name} {getattr(self, name)}" for name in GRID_AXES if getattr(self, name) > 1) or "1 device"

    @property
    def staged(self) -> bool:
        """Whether each stage has kernels of its own. With one stage, any backend is MaxText as it is."""
        return self.backend == "multimesh" and self.pp > 1

    @property
    def platform(self) -> str:
        """``"gpu"`` where the devices are GPUs, else ``"cpu"``."""
        return "gpu" if self.gpus else "cpu"


DESCRIPTION = """\
  maxtext/run.py --cpus 8 --dp 2 --tp 2 --pp 2 --batch-size 8 --microbatch-size 2
  maxtext/run.py --text my-notes.md --num-steps 50

Train a MaxText model. The devices form a grid of dp x fsdp x tp x cp x pp x ep; the global batch is cut into rows for
each of its dp x fsdp x ep domains, and each domain works through its rows in microbatches.

KEY=VALUE arguments go to MaxText as they are (learning_rate=3e-4, dtype=float32, num_experts=8, ...)."""

EPILOG = """\
exit codes:
    0  every step ran, the loss is finite and falling
    1  any other error
    2  flags that do not fit together
    3  something that this backend cannot do
    4  MaxText, a package or a device is missing
   10  the trainer failed
   11  the trainer stopped early
   12  a loss is not finite
   13  the loss is not falling
   14  losses or gradient norms differ (--verify)
   15  a checkpoint cannot be read, written or continued from
   16  more memory is needed than a device or a machine has
   17  one of several processes was killed, stopped or out of reach
   18  a signal ended the run, after a checkpoint
  130  interrupted
  141  nobody reads the output any more"""


_REALM = re.compile(r"--eager-.+|-[a-z]+:.+|-(logfile|level|errlevel|cat|tracelog)(=.*)?")
"""Flags of the Realm and Legion runtimes, which had an open list of them."""

_OF_PAIRS = "--fallback"
"""A flag whose value looks like a KEY=VALUE."""

_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
"""A value that begins like a flag."""


class _Parser(argparse.ArgumentParser):
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def parser() -> _Parser:
    """Return the parser of every flag; it raises an `argparse.ArgumentError` for a wrong value."""
    root = _Parser(
        prog="maxtext/run.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in GROUPS:
        add(root)
    return root


@dataclass(frozen=True)
class Parsed:
    """A command line as far as it can be read."""

    options: Options  # flags whose value is wrong have their default
    wrong: tuple[UsageError, ...]  # errors of the words that cannot be read
    doubtful: frozenset[str]  # flags that those words may have meant. Their values are not known.


def parse(argv: Sequence[str]) -> Options:
    """Parse a command line.

    Raises ``UsageError`` for flags that are not known and values of the wrong kind; the message names the nearest flag.
    """
    parsed = read(argv)
    raise_all(parsed.wrong)
    return parsed.options


def read(argv: Sequence[str]) -> Parsed:
    """Parse a command line as far as possible; collect its errors."""
    root = parser()
    realm, rest = _take_realm(argv)
    wrong: list[UsageError] = []
    doubtful: set[str] = set()
    while True:
        try:
            options, others = root.parse_known_args(rest, namespace=Options())
            break
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            wrong.append(UsageError(f"{error.argument_name}: {error.message}{_nearest_choice(error.message)}"))
            doubtful.update(names)
            rest = _without(rest, names)
    options.realm = realm
    options.settings = []
    for before, word in pairwise(["", *others]):
        if word.startswith("-"):
            known = [flag for flag in root.flags() if "*" not in flag]
            near = difflib.get_close_matches(word.split("=")[0], known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "maxtext/run.py --help lists every flag"
            wrong.append(UsageError(f"{word}: no such flag; {hint}"))
            doubtful.update(near)
        elif "=" in word and word.split("=")[0].isidentifier():
            options.settings.append(word)
        elif not before.startswith("-"):  # else it is the value of a flag that is not known
            wrong.append(
                UsageError(f"{word!r} is neither a flag nor a KEY=VALUE for MaxText; write e.g. learning_rate=3e-4")
            )
    if options.backend == "legate":
        options.backend = "multimesh"
    if options.precompile:  # from the shapes alone, as a forecast
        options.forecast, options.compile = True, bool(options.gpus)
    return Parsed(options, tuple(wrong), frozenset(doubtful))


def _nearest_choice(message: str) -> str:
    """Return an addition to argparse's message of a value that is no choice: the nearest one, if any is near."""
    if not (found := re.match(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)):
        return ""
    near = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _take_realm(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate flags of the Realm runtime, with their values, from the rest; return their names, and the rest."""
    realm: list[str] = []
    rest: list[str] = []
    expects_value = False
    for word in argv:
        if _REALM.fullmatch(word):
            realm.append(word.split("=")[0])
            expects_value = "=" not in word
        elif expects_value and (
            _NEGATIVE.fullmatch(word) or (not word.startswith("-") and ("=" not in word or realm[-1] == "-level"))
        ):
            expects_value = False
        else:
            rest.append(word)
            expects_value = False
    return realm, rest


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Leave out flags and the word after each that can only be its value."""
    kept: list[str] = []
    after = ""  # the flag before this word, if it has no value yet
    for word in words:
        named = word.split("=")[0] in flags
        value = "=" not in word or after == _OF_PAIRS
        if not named and not (after and (_NEGATIVE.fullmatch(word) or (value and not word.startswith("-")))):
            kept.append(word)
        after = word if named and "=" not in word else ""
    return kept
