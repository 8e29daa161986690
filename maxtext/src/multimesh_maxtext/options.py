"""What the command line of ``maxtext/run.py`` asked for, with the type of every flag. No JAX, no file is read."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from multimesh_maxtext.errors import UsageError
from multimesh_maxtext.flags import GROUPS


class Options(argparse.Namespace):
    """The parsed flags; ``None`` means "not given" wherever the default depends on other flags or on the model."""

    # processes and devices
    nodes: int
    gpus: int
    cpus: int | None
    spawn: bool
    # parallelism
    dp: int
    fsdp: int
    tp: int
    pp: int
    ep: int
    interleave: int
    sequence_parallel: bool
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
    sequence_length: int
    attention: str
    attention_type: str | None
    remat: str
    scan_layers: bool | None
    use_iota_embed: bool
    logits_dot_in_fp32: bool
    load_balance_decoder_norm: bool
    settings: list[str]
    # data
    text: list[Path] | None
    use_tfds_dataset: bool
    dataset_path: str | None
    dataset_name: str | None
    tokenizer_path: str | None
    # outputs
    output: Path | None
    metrics_file: Path | None
    dry_run: bool
    json: bool
    verify: bool
    profile: bool
    # checkpoints and evaluation
    checkpoint: Path | None
    checkpoint_every: int | None
    resume: bool
    eval_every: int | None
    eval_steps: int | None
    # memory and runtime
    forecast: bool
    device_memory: int | None
    fbmem: int | None
    zcmem: int | None
    sysmem: int | None
    eager: list[str]
    network: str | None
    # XLA
    collective_matmul: bool
    latency_hiding_scheduler: bool
    xla_pipelining: bool
    xla_loop_buffering: bool
    xla_ar_threshold: int | None
    xla_ag_threshold: int | None
    xla_rs_threshold: int | None
    hoist_loop_convert: bool
    use_nccl_comm_split: bool
    debug_nccl: bool
    # dumps
    dump: Path | None
    dump_only: bool
    dump_mpmd_passes: bool
    dump_all_passes: bool
    hlo: bool
    debug: str
    # compiler options of MultiMesh
    autoshard: bool
    replicate_small_params: bool
    fuse_tasks: bool
    only_fuse_loop_tasks: bool
    host_offload_min_reuse_distance: int | None

    def has(self, name: str) -> bool:
        """Say whether a flag without a default was given; 0 is a value."""
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def domains(self) -> int:
        """Number of tensor-parallel domains that hold different rows of the batch: dp x fsdp x ep."""
        return self.dp * self.fsdp * self.ep

    @property
    def parallelism(self) -> int:
        """Number of devices that the parallelism flags ask for: dp x fsdp x tp x pp x ep."""
        return self.domains * self.tp * self.pp

    @property
    def staged(self) -> bool:
        """Whether stages are programs of their own; one stage is MaxText as it is, whatever the backend."""
        return self.backend == "multimesh" and self.pp > 1

    @property
    def platform(self) -> str:
        """``"gpu"`` where the devices are GPUs, else ``"cpu"``."""
        return "gpu" if self.gpus else "cpu"


DESCRIPTION = """\
Train a MaxText model. The devices form a grid of dp x fsdp x tp x pp x ep; the global batch is cut into rows for each
of its dp x fsdp x ep domains, and each domain works through its rows in microbatches.

  maxtext/run.py --cpus 8 --dp 2 --tp 2 --pp 2 --batch-size 8 --microbatch-size 2
  maxtext/run.py --text my-notes.md --num-steps 50

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
   16  more memory is needed than a device has
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message + "; maxtext/run.py --help lists every flag")


def parser() -> _Parser:
    """Return the parser of every flag."""
    root = _Parser(
        prog="maxtext/run.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in GROUPS:
        add(root)
    return root


def parse(argv: Sequence[str]) -> Options:
    """Parse a command line.

    Raises
    ------
    UsageError
        For a flag that is not known or a value of the wrong kind; the message names the nearest flag.
    """
    root = parser()
    eager, rest = _take_eager(argv)
    options, unknown = root.parse_known_intermixed_args(rest, namespace=Options(eager=eager))
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], root.flags(), n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "maxtext/run.py --help lists every flag"
        raise UsageError(f"{unknown[0]}: no such flag; {hint}")
    for setting in options.settings:
        if not setting.split("=")[0].isidentifier() or "=" not in setting:
            raise UsageError(
                f"{setting!r} is neither a flag nor a KEY=VALUE for MaxText; write e.g. learning_rate=3e-4"
            )
    return options


def _take_eager(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate ``--eager-NAME [VALUE]`` from the rest: the Realm runtime had an open list of them."""
    eager: list[str] = []
    rest: list[str] = []
    expects_value = False
    for word in argv:
        if word.startswith("--eager-"):
            eager.append(word.split("=")[0])
            expects_value = "=" not in word
        elif expects_value and not word.startswith("-"):
            expects_value = False
        else:
            rest.append(word)
            expects_value = False
    return eager, rest
