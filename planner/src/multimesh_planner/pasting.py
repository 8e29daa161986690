"""The end of an answer: the line of MaxText's launcher, and the lines of a program of one's own, that run a suggestion.

The launcher is no part of this package: `maxtext/tests/test_suggesting.py` has it read and check these lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from multimesh_planner import models
from multimesh_planner.configuration import Configuration
from multimesh_planner.space import SHARE, Training
from multimesh_planner.suggestions import Suggestions
from multimesh_planner.transformer import Transformer

_REMAT = {"none": "minimal_with_context", "selective": "minimal", "alternate": "minimal", "latent": "minimal"}
"""Policies of MaxText that are nearest to those that it lacks."""

_NAMES = {"deepseek-v3": "deepseek3-671b", "kimi-k2": "kimi-k2-1t", "llama3.2-1b": "", "grok-1": ""}
"""MaxText's names of models where they are others; empty: it has none, and flags give the sizes."""

_QUANTIZED = {"bf16": "", "fp8": "quantization=fp8_full use_qwix_quantization=true"}
_OPTIMIZERS = ("adamw", "muon", "sgd")  # of MaxText


def paste(job: Training, suggestions: Suggestions, nodes: int) -> str:
    """Return what is to be pasted for the suggestions of a job on so many nodes.

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
    program = [*_write_program(best.how), *_list_duties(job, best.how)]
    return "\n".join([heading, "", command, "", "or in a program of your own:", "", *program])


def find_obstacle(job: Training, how: Configuration) -> str:
    """Return why MaxText's launcher cannot run a configuration, with a remedy; empty: it can."""
    return next(_list_obstacles(job, how), "")


def write_command(job: Training, how: Configuration, nodes: int) -> str:
    """Return the line of MaxText's launcher that runs a configuration."""
    return f"maxtext/run.py {' '.join(_list_words(job, how, nodes))}"


def _list_obstacles(job: Training, how: Configuration) -> Iterator[str]:
    """Yield why the launcher cannot run a configuration, with what can be searched in its place."""
    if how.dp % how.ep:
        yield f"its experts have devices of their own; search again with --dp {how.ep}, or a multiple"
    if job.device.generation.startswith("tpu"):
        yield "run.py is for GPUs, and a program on TPUs takes the lines below"
    if how.offload_optimizer and how.pp > 1:
        yield (
            "run.py's pipelines cannot keep the optimizer's state in the host's memory; search again with --pp 1, or "
            "without --offload"
        )
    if how.sharded == "parameters":
        yield "run.py shards parameters over --fsdp alone; search again without --sharded parameters"
    if how.sharded == "optimizer" and how.pp == 1 and how.fsdp > 1 and how.dp > how.ep:
        yield "without a pipeline, run.py has no ZeRO beside --fsdp; search again with --dp 1, or --sharded none"
    if how.optimizer not in _OPTIMIZERS or how.precision not in _QUANTIZED:
        yield (
            f"run.py trains with {', '.join(_OPTIMIZERS)}, in bf16 or fp8; search again with --optimizer and "
            "--precision of these"
        )
    if not _name_model(job.model) and _has_other_layers(job.model):
        yield (
            f"MaxText has no model {job.model.name}, and no flags for its attention and experts; write its sizes as "
            "a configuration of MaxText, and use run.py --suggest --maxtext-config FILE"
        )


def _has_other_layers(model: Transformer) -> bool:
    return bool(model.kv_rank or model.window or model.shared_ffn or model.dense_layers or model.predicted)


def _name_model(model: Transformer) -> str:
    """Return MaxText's name of a public model; empty where it has none, or the sizes are others."""
    public = model.name in models.names() and models.model(model.name) == model
    return _NAMES.get(model.name, model.name) if public else ""


def _list_sizes(model: Transformer) -> Iterator[str]:
    """Yield the words that name a model, or give its sizes."""
    if name := _name_model(model):
        yield f"--model-name {name}"
        return
    yield f"--num-layers {model.layers} --model-dims {model.hidden} --mlp-dims {model.ffn} --num-heads {model.heads}"
    yield f"base_num_kv_heads={model.kv_heads} head_dim={model.head_size:.0f} vocab_size={model.vocabulary}"
    if not model.gated:
        yield shlex.quote("mlp_activations=['gelu']")
    if model.tied:
        yield "logits_via_embedding=true"
    if model.experts:
        yield f"decoder_block=mixtral num_experts={model.experts} num_experts_per_tok={model.active}"
        yield f"base_moe_mlp_dim={model.expert}"


def _list_words(job: Training, how: Configuration, nodes: int) -> Iterator[str]:
    """Yield the words after ``maxtext/run.py``: flags, and settings of MaxText."""
    axes = {name: getattr(how, name) for name in ("fsdp", "tp", "cp", "ep", "pp", "interleave")}
    yield f"--nodes {nodes} --gpus {job.gpus}"
    yield from _list_sizes(job.model)
    yield f"--batch-size {how.batch} --sequence-length {how.sequence} --microbatch-size {how.microbatch}"
    yield from (f"--{axis} {size}" for axis, size in {"dp": how.dp // how.ep, **axes}.items() if size > 1)
    words = {
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
    yield from (word for word, is_needed in words.items() if is_needed)


def _write_program(how: Configuration) -> list[str]:
    """Return the lines of a program that makes the meshes, and the pipeline with its schedule."""
    axes = [(name, getattr(how, name)) for name in ("dp", "fsdp", "cp", "tp") if getattr(how, name) > 1] or [("dp", 1)]
    names, sizes = repr(tuple(name for name, _ in axes)), ", ".join(str(size) for _, size in axes)
    rows = how.microbatch * how.dp * how.fsdp
    more = f", interleave={how.interleave}" if how.interleave > 1 else ""
    if how.pp == 1:
        return [f"mesh = Mesh(np.array(jax.devices()).reshape({sizes}), {names})  # one stage: no pipeline"]
    return [
        f"meshes = [Mesh(d, {names}) for d in np.array(jax.devices()).reshape({how.pp}, {sizes})]",
        f"loss = mm.pipeline(loss, meshes{more})",
        f'grads = mm.microbatch(jax.grad(loss), argnum=1, size={rows}, schedule="{how.schedule}", reduce="mean")',
        "step = mm.jit(lambda params, batch: grads(params, batch))",
    ]


def _list_duties(job: Training, how: Configuration) -> Iterator[str]:
    """Yield one line on what a program of one's own must do itself; nothing where there is nothing."""
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
    if needed := [duty for duty, is_needed in duties.items() if is_needed]:
        yield f"# what the program must do itself: {'; '.join(needed)}"
