"""The MaxText that will train, and the sizes of its model: flags over its model file over its base configuration."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

import multimesh
from multimesh_maxtext.command.flags import FLAGS, Flags
from multimesh_maxtext.errors import FlagError, MissingPartError
from multimesh_planner import Transformer

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both are safe; the C one takes a tenth of the time

END_OF_DOCUMENT = 256
BYTE_TOKENS = 257

BYTE_VOCABULARY = 384
"""Vocabulary for --text: BYTE_TOKENS rounded up to a multiple of 128, so that tensor parallelism divides it."""

_SIZES = (
    *("base_num_decoder_layers", "base_emb_dim", "base_mlp_dim", "base_num_query_heads", "base_num_kv_heads"),
    "vocab_size",
)
"""Settings without which a model has no size."""

SMALL = {**dict(zip(_SIZES, (2, 256, 256, 4, 4, 1024), strict=True)), "head_dim": 64, "learning_rate": 1e-3}
"""Sizes of the model where none is named, in place of base.yml's 1.1 billion parameters; layers follow the stages."""

EXACT = "float32"
"""Type of the activations with ``--verify``, unless ``dtype=`` says another: two programs that round to bfloat16 differ
by 1e-4, with ``--zero`` and without."""

ORIGINAL: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral-small": (
        "mixtral-8x7b",
        dict(zip(_SIZES, (8, 128, 512, 16, 8, 256), strict=True))
        | {"base_moe_mlp_dim": 512, "head_dim": 32, "num_experts": 4},
    ),
    "gpt3-24layers": ("gpt3-175b", {"base_num_decoder_layers": 24}),
    "gpt3-xl": ("gpt3-175b", dict(zip(_SIZES, (24, 2048, 2048, 24, 24, 32768), strict=True))),
}
"""Models that the original MultiMesh adds to MaxText: the model of MaxText that each is like, and its own sizes."""

RUN_NAME = "train"


def _size(name: str) -> Any:
    """Return a property of `Model`: a setting that is a size."""
    return property(lambda model: int(model.resolved.get(name, 1)))


@dataclass(frozen=True)
class Model:
    """The model, and its sizes that the parallelism must divide."""

    name: str  # MaxText's, empty for none
    settings: Mapping[str, Any]  # that MaxText gets beside the name
    resolved: Mapping[str, Any]  # all settings from files and flags

    layers = _size("base_num_decoder_layers")
    embedding = _size("base_emb_dim")
    mlp = _size("base_mlp_dim")
    query_heads = _size("base_num_query_heads")
    kv_heads = _size("base_num_kv_heads")
    experts = _size("num_experts")
    vocabulary = _size("vocab_size")

    @property
    def product(self) -> str:
        """The product of experts: ``tokamax``, ``megablox`` (for TPUs; Pallas interprets it on GPUs), ``ragged_dot``.

        XLA copies all rows for each expert in `ragged_dot`. Empty: a dense product of a fixed capacity, or no experts.
        """
        if self.experts == 1 or not self.resolved.get("sparse_matmul"):
            return ""
        kernels = {"tokamax": "use_tokamax_gmm", "megablox": "megablox"}
        return next((name for name, setting in kernels.items() if self.resolved.get(setting)), "ragged_dot")

    def layer_times(self, sequence: int) -> list[float]:
        """Estimate the operations of each decoder layer for a token; those of the logits count to the last.

        Six a parameter that it passes, and those of causal attention; to look an embedding up takes none.
        """
        sizes = transformer(self)
        logits = 6.0 * sizes.embedding_parameters
        layer = (sizes.operations(sequence) - logits) / sizes.layers
        return [*[layer] * (sizes.layers - 1), layer + logits]


_LATENT = {
    **{"value_head": "v_head_dim", "query_rank": "q_lora_rank"},
    **{"kv_rank": "kv_lora_rank", "rope_head": "qk_rope_head_dim"},
}
"""The planner's names of the sizes of multi-head latent attention."""


def transformer(model: Model) -> Transformer:
    """Return the model's sizes. Layers that differ from each other count as equal ones, but dense ones at the start."""

    def number(name: str) -> int:
        return int(model.resolved.get(name) or 0)

    sizes: dict[str, Any] = {"kv_heads": model.kv_heads, "head": number("head_dim")}
    if model.resolved.get("attention_type") == "mla":
        sizes = {field: number(name) for field, name in _LATENT.items()} | {"kv_heads": model.query_heads}
        sizes["head"] = number("qk_nope_head_dim") + sizes["rope_head"]
    if model.experts > 1:
        width = max(0, number("base_moe_mlp_dim")) or model.mlp  # -1: as the MLP
        active = min(model.experts, max(1, number("num_experts_per_tok")))
        sizes |= {"experts": model.experts, "active": active, "expert_ffn": width}
        sizes["shared_ffn"] = width * number("shared_experts")
        sizes["dense_layers"] = min(model.layers, number("first_num_dense_layers"))
    return Transformer(
        name=model.name or "this model",
        layers=model.layers,
        hidden=model.embedding,
        ffn=model.mlp,
        heads=model.query_heads,
        vocabulary=model.vocabulary,
        gated=len(model.resolved.get("mlp_activations") or ["silu"]) > 1,
        tied=bool(model.resolved.get("logits_via_embedding")),
        predicted=number("mtp_num_layers"),
        **sizes,
    )


def find_maxtext(root: Path | None) -> Path:
    """Return the folder that holds MaxText's package ``maxtext``, to be put on ``PYTHONPATH``.

    In a repository its patched ``third_party/maxtext`` comes before an installed MaxText.
    """
    places = [str(root / "third_party/maxtext/src")] if root else []
    for place in [*places, *sys.path]:
        spec = PathFinder.find_spec("maxtext", [place])
        # This repository's own folder maxtext/ has no __init__.py: a namespace, not the trainer.
        if spec and spec.origin:
            return Path(spec.origin).parent.parent
    raise MissingPartError("MaxText is not here (third_party/maxtext is empty); run ./bootstrap.sh --group run")


def has_package(name: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


_NUMBERS = {"global_num_kv_heads", "inhomogeneous_layer_cycle_interval", "sliding_window_size"}
"""Other settings that checks compute with."""


def describe_model(flags: Flags, package: Path) -> Model:
    """Return the model and its sizes; ``package``: MaxText's package folder, whose ``configs`` are read."""
    base_file, values = flags.maxtext_config or package / "configs/base.yml", flags.values
    base = _read(base_file, package)
    name, sizes = ORIGINAL.get(flags.model_name or "", (flags.model_name or "", {}))
    models = package / "configs/models"
    if name and not (models / f"{name}.yml").is_file():
        names = sorted([*(path.stem for path in models.glob("*.yml")), *ORIGINAL])
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
        raise FlagError(f"--model-name {name}: MaxText has no such model; near it are {', '.join(near)}")
    named = {**_read(models / f"{name}.yml", package), **sizes} if name else {}
    settings = {**sizes, **_settings(flags, values, named, plain=not named and flags.maxtext_config is None)}
    resolved = {**base, **named, **settings, **values}
    if missing := [key for key in _SIZES if key not in resolved]:
        remedy = f"begin it with base_config: base.yml, or add {missing[0]}=N"
        raise FlagError(f"{base_file}: it has no {missing[0]}; {remedy}")
    for key in (*_SIZES, "head_dim", "num_experts"):
        if not str(value := resolved.get(key, 1)).isdecimal() or int(value) < 1:
            raise FlagError(f"{key}={value}: it is a size, a whole number of at least 1; write {key}=N")
    for key in _NUMBERS & resolved.keys():
        try:
            resolved[key] = int(float(resolved[key] or 0))  # to YAML 1e3 is a string
        except (TypeError, ValueError):
            raise FlagError(f"{key}={resolved[key]}: it is a whole number; write {key}=N") from None
    for key, kind in (("decoder_block", str), ("mlp_activations", list | str)):
        if not isinstance(resolved.get(key, ""), kind):
            raise FlagError(f"{key}={resolved[key]}: it is a name or a list of names; write one that MaxText has")
    model, needs_kernel = Model(name, settings, resolved), resolved.get("use_ring_of_experts") or "megablox" in values
    if flags.gpus and model.product == "megablox" and not needs_kernel:
        settings["megablox"] = resolved["megablox"] = False
    return model


def _settings(flags: Flags, values: Mapping[str, Any], named: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return the settings for the sizes of a model: the small one's if it is ``plain``, and those that flags give."""
    settings: dict[str, Any] = dict(SMALL) if plain else {}
    if flags.verify:
        settings["dtype"] = EXACT
    if plain:
        settings["base_num_decoder_layers"] = 2 * flags.pp * flags.interleave
        if flags.text:
            settings["vocab_size"] = BYTE_VOCABULARY
    for name in ("num_layers", "model_dims", "mlp_dims", "num_heads"):
        if (value := getattr(flags, name)) is not None:
            settings[FLAGS[name].setting] = value
    if flags.num_heads:
        settings["base_num_kv_heads"] = flags.num_heads
    if flags.model_dims and not flags.mlp_dims:
        settings["base_mlp_dim"] = 4 * flags.model_dims
    width = settings.get("base_mlp_dim")
    if width and named.get("base_moe_mlp_dim") == named.get("base_mlp_dim", 0):  # its experts are as wide
        settings["base_moe_mlp_dim"] = width
    if "head_dim" not in values and (plain or (flags.model_dims and flags.num_heads)):
        dims, heads = settings["base_emb_dim"], settings["base_num_query_heads"]
        if dims % heads:
            raise FlagError(f"{heads} heads do not divide {dims} model dims; change --num-heads or --model-dims")
        settings["head_dim"] = dims // heads
    return settings


@functools.lru_cache(maxsize=8)
def _load(text: str) -> Any:
    """Parse YAML, once for each text: a search reads the same model's file many times."""
    return yaml.load(text, _LOADER)  # noqa: S506


def _read(file: Path, package: Path) -> dict[str, Any]:
    try:
        loaded = _load(file.read_text(encoding="utf-8"))
        above = loaded.get("base_config")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise FlagError(f"--maxtext-config {file}: cannot be read as a MaxText configuration ({error})") from error
    if not above:
        return dict(loaded)
    beside = file.parent / above
    return {**_read(beside if beside.is_file() else package / "configs" / above, package), **loaded}


UNLIKE = ("gemma3", "gemma4", "gpt_oss", "deepseek", "llama4", "olmo3", "qwen3_next", "qwen3_5", "envy")
"""Decoder blocks whose layers alternate in a fixed pattern, or begin with dense ones: stages of unlike structure."""


@dataclass(frozen=True)
class Job:
    """A command line that fits together, as `check_job` returns it."""

    flags: Flags
    model: Model
    devices: int
    batch: int
    microbatches: int

    @property
    def mesh_devices(self) -> int:
        """Devices of MaxText's mesh: those of one stage where each stage has kernels of its own."""
        if not self.flags.staged:
            return self.devices
        return self.devices // self.flags.pp or 1  # fewer devices than stages are refused elsewhere

    @property
    def readers(self) -> int:
        """Number of processes that read data: the first ones, which have the devices of MaxText's mesh."""
        return -(-self.mesh_devices * self.flags.nodes // self.devices)

    @property
    def rows(self) -> int:
        """Sequences that go through the model at once: a microbatch, or what MaxText's own pipeline cuts itself."""
        return self.batch if self.flags.pp > 1 and not self.flags.staged else self.batch // self.microbatches

    @property
    def schedule(self) -> str:
        """Name of the schedule: by default 1F1B, interleaved where stages have several pieces."""
        return self.flags.schedule or ("interleaved" if self.flags.interleave > 1 else "1f1b")

    @functools.cached_property
    def pieces(self) -> tuple[int, ...]:
        """Decoder layers of each piece of a stage: equal numbers, those of the user, or about equal costs."""
        flags, layers, number = self.flags, self.model.layers, self.flags.pp * self.flags.interleave
        if isinstance(flags.partition, tuple):
            return flags.partition
        if flags.partition is None and layers % number == 0:
            return (layers // number,) * number
        times, count = self.model.layer_times(flags.sequence_length), self.microbatches
        return multimesh.schedules.partition(times, flags.pp, microbatches=count, chunks=flags.interleave)

    @functools.cached_property
    def route(self) -> tuple[int, ...]:
        """Stage of each piece under ``--schedule auto``; empty: the stages in turn.

        Two pieces a stage may go down the stages and back up. They do where that is estimated shorter, with no more
        activations than the best table of the stages in turn.
        """
        flags = self.flags
        if self.schedule != multimesh.schedules.Auto.name or flags.interleave != 2 or flags.pp == 1:
            return ()
        layers = iter(self.model.layer_times(flags.sequence_length))
        times = [sum(itertools.islice(layers, size)) / 3 for size in self.pieces]
        costs = multimesh.schedules.StageCosts(
            tuple((time, time, time) for time in times), activations=tuple(map(float, self.pieces))
        )
        shape = flags.pp, flags.interleave, self.microbatches
        turned = multimesh.schedules.get("zb-v").placement(flags.pp)
        plain = multimesh.schedules.Auto(costs).choose(*shape).taken
        auto = multimesh.schedules.Auto(costs, memory=max(plain.peaks), route=turned)
        with contextlib.suppress(multimesh.UsageError):  # no table of a V is within that memory
            return turned if auto.choose(*shape).taken.makespan < plain.makespan * (1 - 1e-9) else ()
        return ()

    @property
    def scans_layers(self) -> bool:
        """Return whether MaxText scans over stacks of layers: of all layers, or of each piece of a stage."""
        flags = self.flags
        # The same seed gives other parameters to a scan, so all forms unroll but MaxText's own pipeline, which can't.
        return flags.pp > 1 and not flags.staged if flags.scan_layers is None else flags.scan_layers

    @property
    def uniform(self) -> bool:
        """Return whether all layers have one structure, so that a stack of them can be cut anywhere."""
        resolved = self.model.resolved
        return (
            resolved.get("decoder_block") not in UNLIKE and resolved.get("inhomogeneous_layer_cycle_interval", 1) == 1
        )


def make_job(flags: Flags, model: Model) -> Job:
    """Return the job that flags describe, whether or not it comes out."""
    devices = flags.nodes * (flags.gpus or flags.cpus or flags.parallelism)
    batch = flags.batch_size or 2 * devices
    return Job(flags, model, devices, batch, max(1, batch // (flags.domains * flags.microbatch_size)))


def _path(name: str, doc: str, folder: str = "output") -> Any:
    """Return a property of `Paths`: a file or folder below another of them."""
    return property(lambda paths: getattr(paths, folder) / name, doc=doc)


@dataclass(frozen=True)
class Paths:
    """The folders of a process of a job: the first, of ``rank`` 0, writes into ``output``, the others below that."""

    python: str
    maxtext: Path
    output: Path
    metrics: Path
    rank: int = 0

    package = _path("maxtext", "MaxText's package folder.", "maxtext")
    log = _path("maxtext.log", "MaxText's log.")
    placement = _path("placement.json", "Where every parameter lies, as the hooks of a pipeline write it.")
    forecast = _path("forecast.json", "The memory that each stage will need, as the hooks write it.")
    schedule = _path("schedule.json", "The choice of ``--schedule auto``, as the hooks write it.")
    timelines = _path("timelines", "Timelines of ``--profile``, as the hooks write them.")
    outcome = _path("outcome.json", "Why this process ended, as data.")
    checkpoints = _path(f"{RUN_NAME}/checkpoints", "Where MaxText keeps its checkpoints; a link to ``--checkpoint``.")
    text = _path("text", "The tokens of ``--text``.")
    running = _path(".running", "Locked while a run writes here; after a step it says where its checkpoints are.")
    unfit = _path("unfit-nodes", "The nodes that ``--check`` found at fault, one a line, for ``sbatch --exclude``.")

    def below(self, name: str) -> Paths:
        """Return the paths of something else than a run, which writes in a folder of its own."""
        return replace(self, output=self.output / name, metrics=self.output / name / "metrics.jsonl")

    def of_process(self, rank: int) -> Paths:
        """Return the paths of a process, from those of the first."""
        return replace(self.below(f"process-{rank}"), rank=rank) if rank else self

    @property
    def products(self) -> tuple[str, ...]:
        """Patterns of a run's files in the output folder, but for the folders of other processes."""
        files = (self.outcome, self.placement, self.forecast, self.timelines, self.schedule, self.text)
        logs, picture = f"{self.log.stem}*{self.log.suffix}", self.forecast.with_suffix(".svg").name
        return (*(path.name for path in files), logs, picture, "metrics.jsonl", RUN_NAME, "spmd")
