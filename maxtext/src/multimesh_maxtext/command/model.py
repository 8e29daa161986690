"""The MaxText that will train, and the sizes of its model: flags over its model file over its base configuration."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

from multimesh.schedules import LayerCosts
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.settings import read_values
from multimesh_maxtext.command.text import BYTE_VOCABULARY
from multimesh_maxtext.errors import MissingPartError, UsageError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both are safe; the C one takes a tenth of the time

SMALL = {
    "base_emb_dim": 256,
    "base_mlp_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "learning_rate": 1e-3,
}
"""Sizes of the model where none is named, in place of base.yml's 1.1 billion parameters."""

ORIGINAL: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral-small": (
        "mixtral-8x7b",
        {
            "base_emb_dim": 128,
            "base_mlp_dim": 512,
            "base_moe_mlp_dim": 512,
            "base_num_decoder_layers": 8,
            "base_num_query_heads": 16,
            "base_num_kv_heads": 8,
            "head_dim": 32,
            "num_experts": 4,
            "vocab_size": 256,
        },
    ),
    "gpt3-24layers": ("gpt3-175b", {"base_num_decoder_layers": 24}),
    "gpt3-xl": (
        "gpt3-175b",
        {
            "base_emb_dim": 2048,
            "base_mlp_dim": 2048,
            "base_num_decoder_layers": 24,
            "base_num_query_heads": 24,
            "base_num_kv_heads": 24,
            "vocab_size": 32768,
        },
    ),
}
"""Models that the original MultiMesh adds to MaxText: the model of MaxText that each is like, and its own sizes."""

_SIZES = (
    *("base_num_decoder_layers", "base_emb_dim", "base_mlp_dim", "base_num_query_heads", "base_num_kv_heads"),
    "vocab_size",
)
"""Settings without which a model has no size."""


@dataclass(frozen=True)
class Model:
    """Sizes that the parallelism must divide.

    ``name`` is MaxText's name of the model, empty for none. ``settings`` are the settings that MaxText gets beside it.
    ``resolved`` are all settings from files and flags.
    """

    name: str
    layers: int
    embedding: int
    mlp: int
    query_heads: int
    kv_heads: int
    experts: int
    vocabulary: int
    settings: Mapping[str, Any]
    resolved: Mapping[str, Any]

    def layer_costs(self, sequence: int, *, shards: int = 1) -> list[LayerCosts]:
        """Estimate what each decoder layer costs; the embedding counts to the first and the logits to the last.

        ``time`` is operations a token: six a parameter, and those of causal attention; to look an embedding up takes
        none. ``held`` are bytes on each of ``shards`` devices: 16 a parameter, of itself, its gradient and two moments.
        """
        width = self.resolved.get("head_dim") or self.embedding // self.query_heads
        parameters = 2 * self.embedding * width * (self.query_heads + self.kv_heads)
        gates = len(self.resolved.get("mlp_activations") or ["silu"])
        parameters += (gates + 1) * self.embedding * self.mlp
        attention = self.query_heads * width * sequence  # half of the pairs of tokens
        ends = self.vocabulary * self.embedding
        last = self.layers - 1
        return [
            LayerCosts(
                6.0 * (parameters + attention + (ends if n == last else 0)),
                16.0 * (parameters + ends * ((n == 0) + (n == last))) / shards,
            )
            for n in range(self.layers)
        ]


def find_maxtext(root: Path | None) -> Path:
    """Return the folder that holds MaxText's package ``maxtext``, to be put on ``PYTHONPATH``.

    ``root``: the repository's folder, whose patched ``third_party/maxtext`` comes before an installed MaxText.

    Raises ``MissingPartError`` where there is neither.
    """
    places = [str(root / "third_party/maxtext/src")] if root else []
    for place in [*places, *sys.path]:
        found = PathFinder.find_spec("maxtext", [place])
        # This repository's own folder maxtext/ has no __init__.py: a namespace, not the trainer.
        if found and found.origin:
            return Path(found.origin).parent.parent
    raise MissingPartError("MaxText is not here (third_party/maxtext is empty); run ./bootstrap.sh --group run")


def has_package(name: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def describe_model(options: Options, package: Path) -> Model:
    """Return the model's sizes.

    ``options``: the parsed flags.
    ``package``: MaxText's package folder; its ``configs`` are read.

    Raises ``UsageError`` for a model that MaxText does not know or a configuration file that cannot be read.
    """
    base_file = options.maxtext_config or package / "configs/base.yml"
    base = _read(base_file, package)
    name, own = ORIGINAL.get(options.model_name or "", (options.model_name or "", {}))
    named = {**_load_model(name, package), **own} if name else {}
    settings = {**own, **_settings(options, named, plain=not named and options.maxtext_config is None)}
    sizes = {**base, **named, **settings, **read_values(options.settings)}
    missing = [key for key in _SIZES if key not in sizes]
    if missing:
        raise UsageError(
            f"--maxtext-config {base_file}: it has no {', '.join(missing)}; begin it with base_config: base.yml, or "
            f"add {missing[0]}=VALUE"
        )
    for key in (*_SIZES, "head_dim", "num_experts"):
        if not str(sizes.get(key, 1)).isdecimal() or int(sizes.get(key, 1)) < 1:
            raise UsageError(f"{key}={sizes[key]}: it is a size, a whole number of at least 1")
    needs_kernel = sizes.get("use_ring_of_experts") or "megablox" in read_values(options.settings)
    if interprets_experts(options, sizes) and not needs_kernel:
        settings["megablox"] = sizes["megablox"] = False
    return Model(
        name=name,
        layers=int(sizes["base_num_decoder_layers"]),
        embedding=int(sizes["base_emb_dim"]),
        mlp=int(sizes["base_mlp_dim"]),
        query_heads=int(sizes["base_num_query_heads"]),
        kv_heads=int(sizes["base_num_kv_heads"]),
        experts=int(sizes.get("num_experts", 1)),
        vocabulary=int(sizes["vocab_size"]),
        settings=settings,
        resolved=sizes,
    )


def interprets_experts(options: Options, settings: Mapping[str, Any]) -> bool:
    """Return whether Pallas interprets the kernel by which MaxText multiplies experts: on GPUs, as it is for TPUs."""
    own = settings.get("sparse_matmul") and settings.get("megablox") and not settings.get("use_tokamax_gmm")
    return bool(options.gpus and int(settings.get("num_experts", 1)) > 1 and own)


def _settings(options: Options, named: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    settings: dict[str, Any] = dict(SMALL) if plain else {}
    if plain:
        settings["base_num_decoder_layers"] = 2 * options.pp * options.interleave
        if options.text:
            settings["vocab_size"] = BYTE_VOCABULARY
    for key, value in (
        ("base_num_decoder_layers", options.num_layers),
        ("base_emb_dim", options.model_dims),
        ("base_mlp_dim", options.mlp_dims or (options.model_dims and 4 * options.model_dims)),
        ("base_num_query_heads", options.num_heads),
        ("base_num_kv_heads", options.num_kv_heads or options.num_heads),
        ("head_dim", options.head_dim),
        ("vocab_size", options.vocab_size),
        ("attention_type", options.attention_type),
    ):
        if value is not None:
            settings[key] = value
    wide = settings.get("base_mlp_dim")
    if wide and named.get("base_moe_mlp_dim") == named.get("base_mlp_dim", 0):  # its experts are as wide
        settings["base_moe_mlp_dim"] = wide
    if not options.head_dim and (plain or (options.model_dims and options.num_heads)):
        width = settings["base_emb_dim"], settings["base_num_query_heads"]
        if width[0] % width[1]:
            raise UsageError(
                f"{width[1]} heads do not divide {width[0]} model dims; change --num-heads or --model-dims"
            )
        settings["head_dim"] = width[0] // width[1]
    return settings


def _load_model(name: str, package: Path) -> dict[str, Any]:
    models = package / "configs/models"
    file = models / f"{name}.yml"
    if not file.is_file():
        known = sorted([*(path.stem for path in models.glob("*.yml")), *ORIGINAL])
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
        raise UsageError(f"--model-name {name}: MaxText has no such model; near it are {', '.join(near)}")
    return _read(file, package)


@functools.lru_cache(maxsize=8)
def _load(text: str) -> Any:
    """Parse YAML, once for each text: a search reads the same model's file many times."""
    return yaml.load(text, _LOADER)  # noqa: S506


def _read(file: Path, package: Path) -> dict[str, Any]:
    try:
        loaded = _load(file.read_text(encoding="utf-8"))
        above = loaded.get("base_config")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise UsageError(f"--maxtext-config {file}: cannot be read as a MaxText configuration ({error})") from error
    if not above:
        return dict(loaded)
    beside = file.parent / above
    return {**_read(beside if beside.is_file() else package / "configs" / above, package), **loaded}
