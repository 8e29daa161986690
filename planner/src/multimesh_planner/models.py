"""Public models by name, and models of a ``config.json`` of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimesh.errors import UsageError

from multimesh_planner import tables
from multimesh_planner.transformer import Transformer

_PLAIN = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "phi", "starcoder2")  # MLPs without a gate
_OTHER = ("mamba", "ssm", "rwkv", "recurrent", "hybrid")  # words of layers that are no attention
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "head": ("head_dim",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "dense_layers": ("first_k_dense_replace",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_head": ("qk_rope_head_dim",),
    "value_head": ("v_head_dim",),
    "predicted": ("num_nextn_predict_layers",),
    "window": ("sliding_window",),
}
"""Fields of `Transformer`, and their names in configurations, the first that is there counts."""


def names() -> tuple[str, ...]:
    """Return the names of the public models of the table."""
    return tuple(tables.read_table("models.toml"))


def model(name: str) -> Transformer:
    """Return a public model, or that of a file or folder with a ``config.json`` of Hugging Face.

    Raises ``UsageError`` if there is neither a model of this name nor such a file, or the file has no transformer.
    """
    table = tables.read_table("models.toml")
    if name.lower() in table:
        return Transformer(name.lower(), **table[name.lower()])
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"model: there is no {name!r}; name a file config.json, or one of {', '.join(table)}")
    try:
        return of_config(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"model: {file} cannot be read: {error}") from None


def of_config(config: object, file: str = "config.json") -> Transformer:
    """Return the model that a configuration of Hugging Face describes.

    Raises ``UsageError`` if sizes are missing or no numbers, or some layers are no attention.
    """
    if not isinstance(config, dict):
        raise UsageError(f"model: {file} is no JSON object of sizes")
    if isinstance(text := config.get("text_config"), dict):
        config = {**config, **text}

    def number(*keys: str) -> int:
        """Return the first number of some keys; 0: there is none."""
        value = next((config[key] for key in keys if config.get(key) is not None), 0)
        if isinstance(value, bool | list) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise UsageError(f"model: {file}: {keys[0]} must be a whole number, got {value!r}")
        return int(value)

    kind = str(config.get("model_type", ""))
    other = [key for key in (*config, kind) if any(word in key.lower() for word in _OTHER) and config.get(key, True)]
    if other:
        raise UsageError(f"model: {file} has layers that are no attention ({other[0]}); no forecast knows them")
    fields: dict[str, Any] = {field: number(*keys) for field, keys in _KEYS.items()}
    if missing := [_KEYS[field][0] for field in ("layers", "hidden", "heads", "vocabulary") if not fields[field]]:
        raise UsageError(f"model: {file} states no {missing[0]}")
    fields["ffn"] = fields["ffn"] or 4 * fields["hidden"]
    if fields["kv_rank"]:
        fields |= {"kv_heads": fields["heads"], "head": number("qk_nope_head_dim") + fields["rope_head"]}
    if fields["experts"] < 2:
        fields |= {"experts": 0, "active": 0, "dense_layers": 0, "expert_ffn": 0}
    else:
        one, every = fields["expert_ffn"] or fields["ffn"], number("decoder_sparse_step", "moe_layer_freq") or 1
        dense = config.get("mlp_only_layers") or [n for n in range(fields["layers"]) if (n + 1) % every]
        fields |= {
            "active": fields["active"] or 1,
            "shared_ffn": number("shared_expert_intermediate_size") or one * number("n_shared_experts"),
            "dense_layers": max(fields["dense_layers"], len(dense) if isinstance(dense, list) else 0),
        }
    if fields["window"] and config.get("use_sliding_window") is not False:  # layers of local attention
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and kinds:
            fields["windowed"] = sum("sliding" in str(kind) for kind in kinds) / len(kinds)
        else:
            fields["windowed"] = 1 - 1 / pattern if (pattern := number("sliding_window_pattern")) else 1.0
    else:
        fields["window"] = 0
    name = str(config.get("_name_or_path") or kind or Path(file).parent.name or "model").rstrip("/").split("/")[-1]
    tied = bool(config.get("tie_word_embeddings", kind in ("gpt2", "mpt", "bloom")))
    return Transformer(name, gated=kind not in _PLAIN, tied=tied, **fields)
