"""What ``--backend multimesh`` cannot place on stages yet, found in the flags and in MaxText's configuration."""

from __future__ import annotations

from typing import Any

from multimesh.errors import UnsupportedError
from multimesh_maxtext.model import Model
from multimesh_maxtext.options import Options

_LATER = (
    "load_balance_decoder_norm",
    *("autoshard", "replicate_small_params", "fuse_tasks", "only_fuse_loop_tasks"),
    *("host_offload_min_reuse_distance",),
)
"""Flags that the backend does not honour yet."""

_ABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "decoder_block": (
        (
            *("llama2", "default", "mistral", "gpt3", "mixtral"),
            *("gemma", "gemma2", "qwen2", "qwen3", "qwen3_moe"),
        ),
        "its layers are no plain sequence, or were never tried",
    ),
    "inhomogeneous_layer_cycle_interval": ((1,), "its layers come in groups"),
    "global_parameter_scale": ((1,), "it changes the number of layers"),
    "mhc_expansion_rate": ((1,), "its streams were never tried"),
    "pure_nnx": ((True,), "only NNX models have the hooks"),
    "pure_nnx_decoder": ((True,), "only NNX models have the hooks"),
    "engram_layers": (([], None), "they read tokens inside of layers"),
    "mtp_num_layers": ((0,), "they come after the last stage"),
    "use_multimodal": ((False,), "the vision encoder has no stage"),
    "enable_diloco": ((False,), "its state has another shape"),
    "quantization": (("", None), "its state is not placed"),
    "num_vocab_tiling": ((1,), "its loop crosses the last stage"),
    "parameter_memory_host_offload": ((False,), "host memory is not placed"),
    "optimizer_memory_host_offload": ((False,), "host memory is not placed"),
    "shard_optimizer_over_data": ((False,), "it moves the whole state to one mesh"),
    "shard_mode": (("auto",), "explicit shardings name one mesh"),
    "opt_type": (("adamw", "adam_pax", "sgd", "muon"), "its state was never placed"),
    "compile_xla_flags": (("",), "it is for one program"),
    "compiled_trainstep_file": (("",), "it holds one program"),
    "elastic_enabled": ((False,), "it changes the devices"),
}
"""MaxText's setting to the values that stages can run with, and why not others."""


def check_placeable(options: Options, model: Model) -> None:
    """Raise for a pipeline that the backend cannot run yet.

    Raises
    ------
    UnsupportedError
        Naming the flag or the setting, why, and what to use.
    """
    for name in _LATER:
        if options.has(name):
            raise UnsupportedError(f"--backend multimesh has no --{name.replace('_', '-')} yet; leave it out")
    for key, (values, reason) in _ABLE.items():
        value = model.resolved.get(key, values[0])
        if value not in values:
            raise UnsupportedError(
                f"--backend multimesh cannot train with {key}={value} yet: {reason}; "
                f"use {key}={values[0]} or --backend spmd"
            )
