"""Suggestions: the best configurations, their table, and what is to be pasted.

That is a line of MaxText's launcher, and the lines of a program of one's own. `maxtext/tests/test_suggesting.py` has
the launcher, which is no part of this package, read and check them.
"""

from __future__ import annotations

import itertools
import operator
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from multimesh.core.text import amount, columns

from multimesh_planner import models
from multimesh_planner.configuration import Configuration
from multimesh_planner.space import SHARE, Training
from multimesh_planner.step import Step
from multimesh_planner.transformer import Transformer

_WIDTH = 100  # of the table
_LEFT = ("", "schedule", "type", "gather", "host", "remat", "bound by", "exactly")  # columns of words
_USUAL = {"1", "-", "bf16", ""}  # a column in which no configuration has anything else is left out
_AXES = {name: name for name in ("dp", "fsdp", "tp", "cp", "ep", "pp")} | {"interleave": "v", "microbatch": "mb"}
_PARTS = {
    "matrix products": "products",
    "tensor parallelism": "TP traffic",
    "context parallelism": "CP traffic",
    "expert parallelism": "EP traffic",
    "sharded parameters": "FSDP",
}
UNMEASURED = {
    "zb-v": "its authors alone measured it, on up to 32 A100 (arXiv 2401.10241)",
    "interleaved-zb": "no run of it on GPUs was published",
    "eager-1f1b": "no run of it on GPUs was published",
}
"""Schedules of which no published training run can be compared with a forecast, and what is known of them."""

_REMAT = {"none": "minimal_with_context", "selective": "minimal", "alternate": "minimal", "latent": "minimal"}
"""Policies of MaxText that are nearest to those that it lacks."""

_NAMES = {"deepseek-v3": "deepseek3-671b", "kimi-k2": "kimi-k2-1t", "llama3.2-1b": "", "grok-1": ""}
"""MaxText's names of models where they are others; empty: it has none, and flags give the sizes."""

_QUANTIZED = {"bf16": "", "fp8": "quantization=fp8_full use_qwix_quantization=true"}
_OPTIMIZERS = ("adamw", "muon", "sgd")  # of MaxText
_DATA = ("seconds", "band", "tokens_per_second", "utilization", "bubble", "bytes", "checked", "memory_band", "bound")


@dataclass(frozen=True, kw_only=True)
class Option(Step):
    """A simulated configuration: its `Step`, and how far it may be off."""

    # band, memory_band: half the width of the band around ``seconds``, and around ``bytes``, relative
    band: float
    memory_band: float
    checked: str = ""  # further remarks, such as that the plan of the whole step needs as many bytes

    @property
    def memory_parts(self) -> dict[str, float]:
        """Parts of ``bytes``, by name."""
        return vars(max(self.memory, key=lambda part: part.total))

    def may_not_fit(self, limit: float) -> bool:
        """Return whether the memory is within its own error of the limit."""
        return self.bytes * (1 + self.memory_band) > limit


@dataclass(frozen=True)
class Suggestions:
    """The best configurations, the fastest first; ``str`` is a table of 100 columns at most."""

    title: str  # the space of configurations
    options: tuple[Option, ...]
    limit: float  # bytes of a device that may be used
    # how many configurations were considered, and how many simulated: bounds show that others are slower or do not fit
    considered: int
    simulated: int
    notes: tuple[str, ...] = ()  # effects that the cost model does not see
    simplest: Configuration | None = None  # of those about as fast as the fastest; None: it is the fastest
    roomy: Configuration | None = None  # the fastest that fits even if memory is forecast too low; None: the suggested

    @property
    def fastest(self) -> Option:
        """The fastest."""
        return self.options[0]

    @property
    def best(self) -> Option:
        """The simplest of those that are about as fast as the fastest."""
        return next((option for option in self.options if option.how == self.simplest), self.fastest)

    def with_options(self, options: Sequence[Option], notes: Sequence[str] = ()) -> Suggestions:
        """Return a copy with other options, and further notes."""
        return replace(self, options=tuple(options), notes=(*self.notes, *notes))

    def __str__(self) -> str:
        head = f"{self.title}; up to {amount(self.limit, 'bytes')} of a device"
        parts = self._table()
        for name in ("bubble", "tok/s/dev", "MFU"):  # where there are too many columns
            if sum(max(map(len, (head, *cells))) + 1 for head, cells in parts) > _WIDTH + 1:
                parts = [part for part in parts if part[0] != name]
        words = tuple(number for number, (head, _) in enumerate(parts) if head in _LEFT)
        table = [line.rstrip() for line in columns(parts, texts=words, gap=" ")]
        notes = [line for note in self.notes for line in _wrap(f"note: {note}")]
        legend = [line for text in self.legend() for line in _wrap(text)]
        return "\n".join([head, "", *table, "", *legend, *([""] if notes else []), *notes])

    def legend(self) -> Iterator[str]:
        """Yield lines that explain the table."""
        best = self.best
        number, roomy = self.options.index(best) + 1, [n for n, o in enumerate(self.options, 1) if o.how == self.roomy]
        yield "mb: sequences of a microbatch; v: stages of a submesh; GB: of the fullest stage's devices"
        yield f"{self.considered} configurations, of which bounds leave {self.simulated} to be simulated"
        reason = "the fastest" if best is self.fastest else "the simplest of those within 5 % of the fastest"
        if best.checked:
            reason = "its exact forecast fits"
        low, high = (max(0.0, 1 + sign * best.band) * best.seconds for sign in (-1, 1))
        yield f"> {number} is suggested: {reason}, {low:.3g} to {high:.3g} s by the software that runs it"
        shares = sorted((share for share in best.shares if share[1] > 0.01 * best.seconds), key=lambda s: -s[1])
        parts = (f"{name} {100 * seconds / best.seconds:.0f} %" for name, seconds in shares)
        yield f"{number}, by its {best.seconds:.4g} s: {', '.join(parts)}"
        sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in best.memory_parts.items() if size > 5e7)
        yield f"GB of {number}: {sizes}, within {100 * best.memory_band:.0f} %"
        if any(option.may_not_fit(self.limit) for option in self.options):
            yield "GB with ?: may not fit, as the limit is within the error of the forecast"
        if best.may_not_fit(self.limit) and not best.checked:
            after = "none fits even then: try it before you rely on it"
            yield f"{number} may not fit; {f'{roomy[0]} fits even then' if roomy else after}"
        for name in dict.fromkeys(option.how.schedule for option in self.options if _is_unmeasured(option.how)):
            yield f"{name}*: {UNMEASURED[name]}"
        if best.how.layers and best.how.pp > 1:
            groups = ((size, len(list(group))) for size, group in itertools.groupby(best.how.layers))
            layers = (f"{count} x {size}" if count > 1 else str(size) for size, count in groups)
            yield f"layers of the stages of {number}: {', '.join(layers)}"

    def to_json(self) -> dict[str, Any]:
        """Return the suggestions as data for JSON."""
        suggestions = [
            {name: getattr(option, name) for name in _DATA}
            | {"how": asdict(option.how), "shares": dict(option.shares)}
            | {"memory_parts": tuple(option.memory_parts.items()), "may_not_fit": option.may_not_fit(self.limit)}
            for option in self.options
        ]
        data = {name: getattr(self, name) for name in ("title", "limit", "considered", "simulated", "notes")}
        return {**data, "suggestions": suggestions, "suggested": self.options.index(self.best)}

    def _table(self) -> list[tuple[str, Sequence[str]]]:
        best = self.best
        numbers = {id(option): number for number, option in enumerate(self.options, 1)}
        cells: dict[str, Callable[[Option], object]] = {
            "": lambda o: f"{'>' if o is best else ' '}{numbers[id(o)]:2}",
            **{head: operator.attrgetter(f"how.{name}") for name, head in _AXES.items()},
            "schedule": lambda o: f"{o.how.schedule}{'*' * _is_unmeasured(o.how)}" if o.how.pp > 1 else "-",
            "type": lambda o: o.how.precision,
            "gather": lambda o: "once" if o.how.gather_once else "-",
            "host": lambda o: "+".join(["acts"] * o.how.offload + ["state"] * o.how.offload_optimizer) or "-",
            "remat": lambda o: o.how.recompute,
            "step s": lambda o: f"{o.seconds:.4g}±{100 * o.band:.0f}%",
            "tok/s/dev": lambda o: (
                f"{o.tokens_per_second:,.0f}" if o.tokens_per_second >= 100 else f"{o.tokens_per_second:.3g}"
            ),
            "MFU": lambda o: f"{100 * o.utilization:.1f}%",
            "bubble": lambda o: f"{100 * o.bubble:.1f}%",
            "GB": lambda o: f"{o.bytes / 1e9:.1f}{'?' * o.may_not_fit(self.limit)}",
            "bound by": lambda o: _PARTS.get(o.bound, o.bound),
            "exactly": lambda o: o.checked,
        }
        table = [(head, [str(cell(option)) for option in self.options]) for head, cell in cells.items()]
        return [part for part in table if part[0] == "mb" or {*part[1]} - _USUAL]


def describe_how(how: Configuration) -> str:
    """Return a configuration in words."""
    return ", ".join(
        [how.shown()] + [how.schedule] * (how.pp > 1) + [f"recompute {how.recompute}"] * (how.recompute != "none")
    )


def _is_unmeasured(how: Configuration) -> bool:
    return how.pp > 1 and how.schedule in UNMEASURED


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def paste(job: Training, suggestions: Suggestions, nodes: int) -> str:
    """Return the text to paste for the suggestions of a job on so many nodes.

    Where MaxText's launcher cannot run the suggested one, its line is that of the fastest which it can run.
    """
    best, options = suggestions.best, suggestions.options
    reason, number = find_obstacle(job, best.how), options.index(best) + 1
    able = next((n for n, option in enumerate(options, 1) if not find_obstacle(job, option.how)), 0)
    heading, command = "to be pasted, for MaxText:", f"none: {reason}"
    if not reason or able:
        command = write_command(job, options[able - 1].how if reason else best.how, nodes)
    if reason and able:
        heading = f"to be pasted, for MaxText, number {able}; it cannot run number {number}: {reason}:"
    return "\n".join([heading, "", command, "", "or in a program of your own:", "", *_write_program(job, best.how)])


def find_obstacle(job: Training, how: Configuration) -> str:
    """Return the reason why MaxText's launcher cannot run a configuration, with a remedy; empty: it can."""
    model = job.model
    has_other_layers = model.kv_rank or model.window or model.shared_ffn or model.dense_layers or model.predicted
    hint = "search again with"
    obstacles = {
        f"its experts have devices of their own; {hint} --dp {how.ep}, or a multiple": how.dp % how.ep,
        "run.py is for GPUs, and a program on TPUs takes the lines below": job.device.generation.startswith("tpu"),
        f"run.py's pipelines cannot keep the optimizer's state in the host's memory; {hint} --pp 1, or without "
        "--offload": how.offload_optimizer and how.pp > 1,
        f"run.py shards parameters over --fsdp alone; {hint}out --sharded parameters": how.sharded == "parameters",
        f"without a pipeline, run.py has no ZeRO beside --fsdp; {hint} --dp 1, or --sharded none": (
            how.sharded == "optimizer" and how.pp == 1 and how.fsdp > 1 and how.dp > how.ep
        ),
        f"run.py trains with {', '.join(_OPTIMIZERS)}, in bf16 or fp8; {hint} --optimizer and --precision of these": (
            how.optimizer not in _OPTIMIZERS or how.precision not in _QUANTIZED
        ),
        f"MaxText has no model {model.name}, and no flags for its attention and experts; write its sizes as a "
        "configuration of MaxText, and use run.py --suggest --maxtext-config FILE": (
            has_other_layers and not _name_model(model)
        ),
    }
    return next(iter(_select(obstacles)), "")


def _select(texts: Mapping[str, object]) -> list[str]:
    """Return the texts whose conditions hold."""
    return [text for text, holds in texts.items() if holds]


def _name_model(model: Transformer) -> str:
    """Return MaxText's name of a public model; empty where it has none, or the sizes are others."""
    public = model.name in models.names() and models.model(model.name) == model
    return _NAMES.get(model.name, model.name) if public else ""


def write_command(job: Training, how: Configuration, nodes: int) -> str:
    """Return the line of MaxText's launcher that runs a configuration: its flags, and settings of MaxText."""
    model, name = job.model, _name_model(job.model)
    sizes = {
        f"--num-layers {model.layers} --model-dims {model.hidden} --mlp-dims {model.ffn}": True,
        f"--num-heads {model.heads} base_num_kv_heads={model.kv_heads} head_dim={model.head_size:.0f}": True,
        f"vocab_size={model.vocabulary}": True,
        shlex.quote("mlp_activations=['gelu']"): not model.gated,
        "logits_via_embedding=true": model.tied,
        f"decoder_block=mixtral num_experts={model.experts} num_experts_per_tok={model.active}": model.experts,
        f"base_moe_mlp_dim={model.expert}": model.experts,
    }
    axes = {name: getattr(how, name) for name in ("fsdp", "tp", "cp", "ep", "pp", "interleave")}
    words = {
        f"maxtext/run.py --nodes {nodes} --gpus {job.gpus}": True,
        **({f"--model-name {name}": True} if name else sizes),
        f"--batch-size {how.batch} --sequence-length {how.sequence} --microbatch-size {how.microbatch}": True,
        **{f"--{axis} {size}": size > 1 for axis, size in {"dp": how.dp // how.ep, **axes}.items()},
        f"--schedule {how.schedule}": how.pp > 1,
        f"--partition {','.join(map(str, how.layers))}": how.layers and how.pp > 1,
        f"--remat {'minimal_offloaded' if how.offload else _REMAT.get(how.recompute, how.recompute)}": True,
        "--sequence-parallel": how.sequence_parallel and how.tp > 1,
        f"--zero {2 if how.pp > 1 else 1}": how.sharded == "optimizer" and how.dp > how.ep,
        "--gather-once": how.gather_once,
        "--attention cudnn_flash_te": how.cp > 1,  # which attends over the parts of other devices
        f"--fbmem {int(job.limit / 2**20)}": job.limit > SHARE * job.device.memory,  # MiB
        f"opt_type={how.optimizer}": how.optimizer != "adamw",
        f"mu_dtype={how.moments}": how.moments != "float32",
        "optimizer_memory_host_offload=true": how.offload_optimizer,
        _QUANTIZED[how.precision]: how.precision != "bf16",
    }
    return " ".join(_select(words))


def _write_program(job: Training, how: Configuration) -> list[str]:
    """Return the lines of a program that makes the meshes, and the pipeline with its schedule; and what they lack."""
    axes = [(name, getattr(how, name)) for name in ("dp", "fsdp", "cp", "tp") if getattr(how, name) > 1] or [("dp", 1)]
    names, sizes = repr(tuple(name for name, _ in axes)), ", ".join(str(size) for _, size in axes)
    rows = how.microbatch * how.dp * how.fsdp
    more = f", interleave={how.interleave}" if how.interleave > 1 else ""
    lines = [
        f"meshes = [Mesh(d, {names}) for d in np.array(jax.devices()).reshape({how.pp}, {sizes})]",
        f"loss = mm.pipeline(loss, meshes{more})",
        f'grads = mm.microbatch(jax.grad(loss), argnum=1, size={rows}, schedule="{how.schedule}", reduce="mean")',
        "step = mm.jit(lambda params, batch: grads(params, batch))",
    ]
    if how.pp == 1:
        lines = [f"mesh = Mesh(np.array(jax.devices()).reshape({sizes}), {names})  # one stage: no pipeline"]
    duties = {
        "shard its arrays over the axes": how.replicas * how.tp > 1,
        f"spread experts over ep {how.ep} devices of them": how.ep > 1,
        f"mark {','.join(map(str, how.layers))} layers as stages with mm.task (mm.pipeline cuts by costs)": (
            how.layers and how.pp > 1
        ),
        f"recompute as {how.recompute} (jax.checkpoint)": how.recompute != "none",
        "shard the optimizer's state over dp (ZeRO-1)": how.sharded == "optimizer" and how.dp > 1,
        "gather parameters once a step": how.gather_once,
        "keep activations in the host's memory": how.offload,
        "keep the optimizer's state in the host's memory": how.offload_optimizer,
        f"multiply in {how.precision}": how.precision != "bf16",
        f"start with XLA_PYTHON_CLIENT_MEM_FRACTION={min(1.0, job.limit / job.device.memory):.2f}": (
            job.limit > SHARE * job.device.memory
        ),
    }
    needed = "; ".join(_select(duties))
    return [*lines, f"# what the program must do itself: {needed}"] if needed else lines
