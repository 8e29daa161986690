"""The flags of ``maxtext/run.py``: each is declared once, as a field of `Flags` with a `Flag` that describes it.

The parser, ``--help``, the reference, the checks of pairs of flags and the translation are made of these.
"""
# ruff: noqa: RUF009 - the functions that declare a flag return a field

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from multimesh import planner, schedules

BACKENDS = ("multimesh", "spmd", "cuda", "cpu", "legate")

SCHEDULES = (*schedules.names(), "auto", "custom")

ATTENTION = ("autoselected", "dot_product", "flash", "cudnn_flash_te", "cudnn_flash_jax")

REMAT = (  # MaxText also reads "none", and recomputes everything
    *("full", "minimal", "minimal_flash", "minimal_with_context", "minimal_with_quantization"),
    *("minimal_with_context_and_quantization", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi"),
    *("save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "qkv_proj_offloaded", "minimal_offloaded", "custom"),
)

DEVICES = {name: int(planner.device(name).memory) // 2**20 for name in planner.devices()}
"""Accelerators, and MiB of their memory as their drivers show them."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def count(minimum: int) -> Callable[[str], int]:
    """Return the type of whole numbers of at least ``minimum``."""

    def whole_number(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= minimum:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")

    return whole_number


def partition(text: str) -> str | tuple[int, ...]:
    """Return the layers of each piece, or ``auto``."""
    if text == "auto":
        return text
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor numbers of layers; write e.g. 3,3,2")
    return tuple(map(int, text.split(",")))


def parse_size(text: str) -> int:
    """Return bytes: ``80GiB``, ``24 GB``; ``1e9`` is none."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 80GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


GROUPS = {
    "backend": ("processes and devices", ""),
    "dp": ("parallelism", "dp x fsdp x tp x cp x pp x ep must equal the devices of all processes"),
    "num_steps": ("training loop", "microbatches = batch size / (dp x fsdp x ep x microbatch size)"),
    "model_name": ("model and data", "without --model-name: a small llama that trains on a laptop"),
    "output": ("outputs", ""),
    "checkpoint": ("checkpoints", "steps are counted from 0, as in the metrics file: checkpoint N is after step N"),
    "forecast": ("memory and forecasts", ""),
    "replicate_small_params": ("compilers", "for GPUs, but for the first; thresholds are bytes"),
}
"""Groups of the help: the first flag of each, its name, and a line about it."""

COMMON = ("model_name", "text", "num_steps", "batch_size", "nodes", "gpus", "dp", "tp", "pp", "output")
"""The flags on the first screen of the help."""

GRID_AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep", "interleave")


@dataclass(frozen=True)
class Flag:
    """A record of a flag. Its name, its type and its default are those of its field."""

    help: str
    value: str  # its value in the help; empty: a switch
    read: Callable[[str], Any] | None  # makes the value of its text; None: as it is
    choices: tuple[Any, ...] = ()
    option: str = ""  # its name as users write it: ``--batch-size``
    several: bool = False  # whether it takes all words that follow
    # needs: flags without one of which it says nothing; excludes: flags that it does not go with, and why
    needs: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    pipeline: str = ""  # why only pipelines of MultiMesh can honour it
    only: str = ""  # "gpu", "pipeline" or "run": elsewhere it has no effect, which a warning says
    setting: str = ""  # MaxText's setting that gets its value
    decides: tuple[str, ...] = ()  # others of MaxText's settings that follow from it, which `translate` computes
    xla: tuple[str, ...] = ()  # XLA's flags that it sets on GPUs
    xla_default: object = None  # their value where the flag is not given; None: they are left out
    xla_staged: bool = False  # that value is for a pipeline of MultiMesh alone
    trainer: str = ""  # field of `TrainerConfig` that has its value


def _flag(text: str, value: str, read: Any = None, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"flag": Flag(text, value, read, **more)})


def _number(text: str, default: int | None = None, least: int = 1, value: str = "N", **more: Any) -> Any:
    return _flag(text, value, count(least), default, **more)


def _switch(text: str, default: bool | None = None, **more: Any) -> Any:
    return _flag(text, "", None, default, **more)


def _path(text: str, value: str = "FILE", **more: Any) -> Any:
    return _flag(text, value, Path, **more)


def _name(text: str, choices: tuple[Any, ...] = (), value: str = "NAME", **more: Any) -> Any:
    return _flag(text, value, choices=choices, **more)


def _xla_switch(text: str, *xla: str, usual: str = "on", **more: Any) -> Any:
    names = tuple(f"--xla_gpu_enable_{name}" for name in xla)
    return _switch(f"{text} (default {usual})", only="gpu", xla=names, xla_default=True, **more)


def _threshold(operations: str, xla: str, size: int) -> Any:
    text, flag = f"combine {operations} up to this size (default {size})", f"--xla_gpu_{xla}_combine_threshold_bytes"
    return _number(text, least=0, value="BYTES", only="gpu", xla=(flag,), xla_default=size)


_CIRCULAR = "it runs MaxText's own circular pipeline"
_BATCH = ("gradient_accumulation_steps", "per_device_batch_size")
_TENSOR = ("ici_tensor_parallelism", "ici_tensor_sequence_parallelism")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A command line as given; ``None`` means "not given" wherever the default depends on other flags or the model."""

    backend: str = _name(
        "who runs a pipeline: 'multimesh', kernels of its own for every stage; 'spmd', MaxText's own in one "
        "program; 'cuda' and 'cpu' are spmd on that platform, 'legate' is multimesh. Without --pp all are MaxText",
        BACKENDS,
        default="multimesh",
        read=lambda name: "multimesh" if name == "legate" else name,
    )
    nodes: int = _number("processes in all; one per GPU is usual on a cluster", 1)
    gpus: int = _number("GPUs per process; 0: train on CPU devices", 0, 0, decides=("hardware",))
    cpus: int | None = _number(
        "CPU devices per process without --gpus (default: as the parallelism asks for)", decides=("hardware",)
    )
    spawn: bool = _switch("start all --nodes processes here, not one of them under srun or mpirun", False)
    check: bool | None = _switch(
        "train only if `python -m multimesh check --quick` passes; --output gets the nodes at fault (default off)",
        excludes={"export": "that trains nothing"},
    )

    dp: int = _number("data parallelism: copies of the model for rows of the batch", 1, setting="ici_data_parallelism")
    fsdp: int = _number("data parallelism that shards parameters and moments", 1, setting="ici_fsdp_parallelism")
    tp: int = _number("tensor parallelism: heads and feed-forward width split over devices", 1, decides=_TENSOR)
    cp: int = _number("context parallelism: sequences split over devices", 1, setting="ici_context_parallelism")
    pp: int = _number(
        "pipeline parallelism: stages of the layers", 1, decides=("ici_pipeline_parallelism",), trainer="stages"
    )
    ep: int = _number("expert parallelism: experts split over devices", 1, setting="ici_expert_parallelism")
    interleave: int = _number("pieces per stage: less waiting, more transfers", 1, needs=("pp",), trainer="interleave")
    partition: tuple[int, ...] | str | None = _flag(
        "layers of each piece; auto: about equal costs, with the logits (default: equal numbers, or auto where pp x "
        "interleave does not divide the layers)",
        "auto|N,N,...",
        partition,
        pipeline="its pieces have as many layers each",
    )
    sequence_parallel: bool | None = _switch(
        "shard activations between tensor-parallel blocks along the sequence (default off)", needs=("tp",)
    )
    zero: int = _name(
        "1: moments of the optimizer are laid out over dp too, each device updates its part; 2: gradients as well",
        (0, 1, 2),
        "0|1|2",
        read=count(0),
        default=0,
        needs=("dp",),
        decides=("shard_optimizer_over_data",),
        trainer="zero",
    )
    gather_once: bool | None = _switch(
        "gather parameters of --fsdp, and reduce gradients, once a step; both then lie whole on a device (default off)",
        needs=("fsdp",),
        pipeline="it gathers parameters where XLA does",
        trainer="gather_once",
    )

    num_steps: int = _number("optimizer steps", 10, setting="steps")
    batch_size: int | None = _number("sequences of a step over all devices (default: 2 x devices)", decides=_BATCH)
    microbatch_size: int = _number(
        "sequences a tensor-parallel domain works on at once: batch 1024, dp 8 and size 4 make 32", 1, decides=_BATCH
    )
    schedule: str | None = _name(
        "order of the microbatches in a pipeline (default 1f1b, with --interleave interleaved); auto measures kernels "
        "and takes the shortest order that fits, also into --device-memory. Names: " + ", ".join(SCHEDULES),
        SCHEDULES,
        pipeline=_CIRCULAR,
    )
    custom_schedule_path: Path | None = _path(
        "JSON table of --schedule custom: cells per stage, F0 the next forward of piece 0, B0 its backward",
        pipeline=_CIRCULAR,
    )
    seed: int = _number(
        "seed of parameters and of the data's order", 0, 0, setting="init_weights_seed", decides=("data_shuffle_seed",)
    )

    model_name: str | None = _name(
        "a model of MaxText (llama3-8b, gpt3-175b, ...); the size flags override it", decides=("model_name",)
    )
    maxtext_config: Path | None = _path("MaxText configuration to start from in place of its base.yml")
    num_layers: int | None = _number(
        "decoder layers (default: the model's, or 2 x pp x interleave)", setting="base_num_decoder_layers"
    )
    model_dims: int | None = _number("width of the model (default: the model's, or 256)", setting="base_emb_dim")
    mlp_dims: int | None = _number(
        "feed-forward width (default: 4 x --model-dims, else the model's, or 256)", setting="base_mlp_dim"
    )
    num_heads: int | None = _number(
        "attention heads, also of keys and values (default: the model's, or 4)", setting="base_num_query_heads"
    )
    sequence_length: int = _number("tokens in a sequence", 128, setting="max_target_length")
    attention: str = _name(
        "attention kernel; dot_product runs everywhere, cudnn_flash_te is cudnn_flash_jax where TransformerEngine is "
        f"missing: {', '.join(ATTENTION)}",
        ATTENTION,
        default="autoselected",
        setting="attention",
    )
    remat: str = _name(
        f"what the backward pass recomputes, not keeps: {', '.join(REMAT)} (minimal_flash is minimal_with_context)",
        REMAT,
        "POLICY",
        default="minimal",
        decides=("remat_policy",),
    )
    scan_layers: bool | None = _switch(
        "compile one layer and scan over it: other parameters (default: unroll, but MaxText's own pipeline only scans)",
        decides=("scan_layers",),
    )
    text: tuple[Path, ...] = _path(
        "train on these UTF-8 files, a token a byte, offline (default: data of dataset_type=, or a synthetic batch)",
        default=(),
        several=True,
        decides=("dataset_type", "olmo_index_path"),
    )

    output: Path | None = _path(
        "folder for all that is written (default: a fresh temporary one)", "DIR", decides=("base_output_directory",)
    )
    overwrite: bool = _switch(
        "remove the run that --output holds, and begin anew",
        False,
        needs=("output",),
        excludes={"resume": "that goes on with the run which this removes"},
    )
    metrics_file: Path | None = _path(
        "a JSON object for each step (default: metrics.jsonl in the output folder)", decides=("metrics_file",)
    )
    metrics_hook: str | None = _name(
        "call this function with the record of each step and evaluation", value="MODULE:FUNCTION", only="run"
    )
    prometheus: Path | None = _path("write the newest step there, for node_exporter's textfile collector", "FILE.prom")
    dry_run: bool = _switch("print the exact command, environment and configuration, start nothing", False)
    json: bool = _switch("print one JSON object for machines instead of progress and table", False)
    verify: bool = _switch(
        "train once more without the pipeline, both in float32 unless dtype= is given; every step must agree to 1e-5",
        False,
        only="run",
        excludes={"checkpoint": "this trains twice from step 0 to compare"},
        pipeline="it is what a pipeline is compared with",
    )
    profile: bool | None = _switch(
        "profile some steps (xplane), and draw timelines (default off)", only="run", decides=("profiler",)
    )
    dump: Path | None = _path(
        "write the step's plan, and its program after every pass; without a pipeline XLA's programs", "DIR", only="run"
    )
    dump_only: bool | None = _switch(
        "with --dump: compile, dump, do not train (default off)",
        needs=("dump",),
        pipeline="MaxText compiles when it trains; use --num-steps 1",
        trainer="dump_only",
    )
    debug: str = _name(
        "how much JAX and XLA log: none, info, debug, spew", ("none", "info", "debug", "spew"), "LEVEL", default="none"
    )
    debug_nccl: bool | None = _switch("let NCCL log what it does", only="gpu")

    checkpoint: Path | None = _path(
        "write checkpoints here, every checkpoint_period=100 steps and at the end; max_num_checkpoints_to_keep=5 stay",
        "DIR",
        only="run",
        decides=("enable_autocheckpoint",),
    )
    resume: bool = _switch(
        "go on from the newest checkpoint, with any grid or backend; or from step 0", False, needs=("checkpoint",)
    )
    export: Path | None = _path(
        "write the newest checkpoint's parameters for MaxText's tools, train nothing; --no-scan-layers: layer by layer",
        "DIR",
        needs=("checkpoint",),
    )

    forecast: bool = _switch(
        "print the memory that each stage will need, and how long devices wait, with none of them; train nothing",
        False,
        pipeline="no plan, but with --compile",
    )
    compile: bool = _switch(
        "with --forecast: compile for --device, which need not be here; with --backend spmd MaxText's own programs too",
        False,
        needs=("forecast",),
    )
    suggest: bool = _switch(
        "find the fastest parallelism, schedule, microbatch size, remat and partition for --nodes x --gpus of "
        "--device, print the best that fits by --forecast (--dry-run: by estimates) to be pasted; what is set stays",
        False,
    )
    device: str | None = _name(
        f"with --forecast or --suggest: estimate the step on these GPUs: {', '.join(DEVICES)}",
        tuple(DEVICES),
        read=str.lower,
        needs=("forecast", "suggest"),
    )
    device_memory: int | None = _flag(
        "refuse a run whose forecast needs more on a device, e.g. 80GiB (default: what JAX takes of a GPU or --device)",
        "SIZE",
        parse_size,
        pipeline="it has no plan to forecast from",
    )
    fbmem: int | None = _number(
        "GPU memory to reserve, in GB below 1000, else in MB (default: JAX's own share)", least=0, only="gpu"
    )

    replicate_small_params: bool | None = _switch(
        "keep parameters with fewer elements than a batch has tokens whole on devices (default off)", only="pipeline"
    )
    collective_matmul: int | None = _number(
        "overlap matrix products from this size with the gather or scatter of operands (default: do not)",
        least=0,
        value="MIB",
        only="gpu",
        xla=("--xla_gpu_threshold_for_windowed_einsum_mib",),
    )
    latency_hiding_scheduler: bool | None = _xla_switch("hide collectives by computation", "latency_hiding_scheduler")
    xla_pipelining: bool | None = _xla_switch(
        "pipeline collectives of a loop over its iterations",
        *("pipelined_all_reduce", "pipelined_all_gather", "pipelined_reduce_scatter"),
        usual="on in a pipeline; in one program it repeats the work of microbatches",
        xla_staged=True,
    )
    xla_loop_buffering: bool | None = _xla_switch("double-buffer loops", "while_loop_double_buffering")
    use_nccl_comm_split: bool | None = _xla_switch("make communicators of subsets by splitting", "nccl_comm_splitting")
    xla_ar_threshold: int | None = _threshold("all-reduces", "all_reduce", 2**32)
    xla_ag_threshold: int | None = _threshold("all-gathers", "all_gather", 2**32)
    xla_rs_threshold: int | None = _threshold("reduce-scatters", "reduce_scatter", 2**25)

    settings: tuple[str, ...] = ()  # KEY=VALUE arguments
    replaced: tuple[str, ...] = ()  # flags that became one of them
    ignored: tuple[str, ...] = ()  # names without effect

    @functools.cached_property
    def used(self) -> tuple[str, ...]:
        """The flags that say something: other than their default, and other than ``--no-X``; 0 may be a value."""
        values = vars(self)
        return tuple([name for name in FLAGS if values[name] != DEFAULTS[name] and values[name] is not False])

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The KEY=VALUE arguments as YAML reads them; what is no YAML stays as it is written."""
        values: dict[str, Any] = {}
        for key, value in (setting.split("=", 1) for setting in self.settings):
            values[key] = value
            with contextlib.suppress(yaml.YAMLError, ValueError):  # such as a date that is none
                values[key] = yaml.safe_load(value)
        return values

    @property
    def buckets(self) -> dict[str, str]:
        """The settings that name a bucket, and its kind."""
        return {key: str(value)[:2] for key, value in self.values.items() if str(value).startswith(("gs://", "s3://"))}

    @property
    def dataset(self) -> str:
        """MaxText's ``dataset_type``: by default ``synthetic``."""
        return "olmo_grain" if self.text else str(self.values.get("dataset_type", "synthetic"))

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

    @functools.cached_property
    def staged(self) -> bool:
        """Return whether each stage has kernels of its own. With one stage, any backend is MaxText as it is."""
        return self.backend == "multimesh" and self.pp > 1

    @property
    def platform(self) -> str:
        """``"gpu"`` where the devices are GPUs, else ``"cpu"``."""
        return "gpu" if self.gpus else "cpu"


DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Flags)}
"""The value of each field where a flag is not given."""


def _complete(name: str, flag: Flag) -> Flag:
    """Return the description of a flag with its name as users write it, and its default in the help."""
    usual = DEFAULTS[name]
    shown = f" (default {usual})" if flag.value and usual not in (None, ()) else ""
    return replace(flag, option=f"--{name.replace('_', '-')}", help=f"{flag.help}{shown}")


FLAGS = {item.name: _complete(item.name, item.metadata["flag"]) for item in fields(Flags) if item.metadata}
"""Each flag, by the name of its field."""
