"""Small models of Hugging Face form, beside MaxText: a script with parts that run in different Pythons.

``make`` and ``loss`` need torch and transformers; ``convert`` and ``logits`` need MaxText.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, LENGTH, ROWS = 384, 32, 2
NAMES = {"llama": "llama3.1-8b", "mixtral": "mixtral-8x7b"}
"""What MaxText's tools call a model of this kind."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def configuration(kind: str) -> Any:
    """The configuration of the small model, with the rotations of the published one."""
    import transformers

    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, **EXPERTS, rope_theta=1e6)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return transformers.LlamaConfig(
        **SIZES, rope_theta=500_000.0, rope_scaling={"rope_type": "llama3", **scaling}, max_position_embeddings=131072
    )


def settings(kind: str) -> list[str]:
    """MaxText's settings of the small model."""
    names = {
        "hidden_size": "base_emb_dim",
        "intermediate_size": "base_mlp_dim",
        "num_hidden_layers": "base_num_decoder_layers",
        "num_attention_heads": "base_num_query_heads",
        "num_key_value_heads": "base_num_kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
    }
    words = [f"{name}={SIZES[key]}" for key, name in names.items()]
    wide = SIZES["intermediate_size"]
    moe = [f"base_moe_mlp_dim={wide}", "num_experts=4", "num_experts_per_tok=2", "sparse_matmul=false"]
    return words + (moe if kind == "mixtral" else [])


def make(kind: str, folder: Path) -> None:
    """Write a model with random weights, tokens, and the logits of the tokens."""
    import torch
    import transformers

    torch.manual_seed(0)
    classes = {"llama": transformers.LlamaForCausalLM, "mixtral": transformers.MixtralForCausalLM}
    model = classes[kind](configuration(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from zero, so that each of them shows in the logits
            parameter.add_(0.05 * torch.randn(parameter.shape))
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        logits = model(tokens).logits
    model.save_pretrained(folder)
    np.savez(folder / "logits.npz", tokens=tokens.numpy(), logits=logits.numpy())


def convert(kind: str, folder: Path, target: Path, scan: str) -> None:
    """Run MaxText's to_maxtext, which knows only the sizes of published models, for this one."""
    from maxtext.checkpoint_conversion.utils import hf_model_configs

    hf_model_configs.HF_MODEL_CONFIGS[NAMES[kind]] = configuration(kind)
    sys.argv = ["to_maxtext", _base(), f"model_name={NAMES[kind]}", *settings(kind), "override_model_config=true"]
    sys.argv += [f"hf_model_path={folder}", f"base_output_directory={target}", "save_dtype=float32"]
    sys.argv += [f"scan_layers={scan}", "skip_jax_distributed_system=true", "hardware=cpu", "attention=dot_product"]
    runpy.run_module("maxtext.checkpoint_conversion.to_maxtext", run_name="__main__", alter_sys=True)


def logits(kind: str, folder: Path, parameters: Path, scan: str) -> None:
    """Write MaxText's logits of the same tokens."""
    import jax.numpy as jnp
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    words = ["", _base(), f"model_name={NAMES[kind]}", *settings(kind), "override_model_config=true", "dtype=float32"]
    words += [f"load_parameters_path={parameters}", f"scan_layers={scan}", "skip_jax_distributed_system=true"]
    words += ["hardware=cpu", "attention=dot_product", f"max_target_length={LENGTH}", f"per_device_batch_size={ROWS}"]
    config = pyconfig.initialize([*words, "run_name=logits", "enable_checkpointing=true", "matmul_precision=highest"])
    result = model_creation_utils.from_pretrained(config)
    model = result[0] if isinstance(result, tuple) else result
    tokens = jnp.asarray(np.load(folder / "logits.npz")["tokens"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    values = model(tokens, positions, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False)
    np.save(folder / "maxtext.npy", np.asarray(values))


def loss(folder: Path, rows: Path) -> None:
    """Print the mean loss of rows of tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    tokens = torch.from_numpy(np.load(rows).astype(np.int64))
    with torch.no_grad():
        print(float(model(tokens, labels=tokens).loss))


def sample(folder: Path, tokenizer: Path, text: Path) -> None:
    """Print as JSON what a model says after a prompt, and its mean loss on a text."""
    import torch
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    torch.manual_seed(0)
    prompt = words("A pipeline", return_tensors="pt", add_special_tokens=False).input_ids
    tokens = words(text.read_text(), return_tensors="pt", add_special_tokens=False).input_ids[:, : 2 * LENGTH]
    with torch.no_grad():
        continuation = model.generate(prompt, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=0)
        value = model(tokens, labels=tokens).loss
    print(json.dumps({"text": words.decode(continuation[0]), "loss": float(value)}))


def to_huggingface(maxtext: Path, parameters: Path, target: Path, tokenizer: Path, scan: str = "false") -> None:
    """Run MaxText's to_huggingface on parameters of a small llama."""
    tool: list[object] = [sys.executable, "-m", "maxtext.checkpoint_conversion.to_huggingface"]
    tool += [maxtext / "maxtext/configs/base.yml", "--override_model_architecture", f"--hf_model_path={tokenizer}"]
    tool += [f"model_name={NAMES['llama']}", *settings("llama"), "override_model_config=true", f"scan_layers={scan}"]
    tool += ["skip_jax_distributed_system=true", f"load_parameters_path={parameters}"]
    tool += [f"base_output_directory={target}", "hardware=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(maxtext), "JAX_PLATFORMS": "cpu"}
    subprocess.run(list(map(str, tool)), env=environment, check=True, capture_output=True)


def flags(words: Sequence[str]) -> list[str]:
    """The sizes among settings of MaxText, as the flags of ``run.py`` that decide them."""
    flag_of = {
        "base_emb_dim": "--model-dims",
        "base_mlp_dim": "--mlp-dims",
        "base_num_decoder_layers": "--num-layers",
        "base_num_query_heads": "--num-heads",
    }
    pairs = [word.partition("=") for word in words if not word.startswith("base_moe_mlp_dim=")]  # as --mlp-dims
    return [
        part for key, _, value in pairs for part in ([flag_of[key], value] if key in flag_of else [f"{key}={value}"])
    ]


def _base() -> str:
    import maxtext

    return str(Path(maxtext.__file__).parent / "configs/base.yml")


if __name__ == "__main__":
    part, first, *arguments = sys.argv[1:]
    if part in ("loss", "sample"):
        {"loss": loss, "sample": sample}[part](*map(Path, (first, *arguments)))
    else:
        {"make": make, "convert": convert, "logits": logits}[part](first, *map(Path, arguments[:2]), *arguments[2:])
