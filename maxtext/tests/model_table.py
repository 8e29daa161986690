"""MaxText's whole list of models, each at a tiny size: a pipeline runs it, or refuses it in one line.

``python maxtext/tests/model_table.py --write`` writes the table in ``docs/maxtext-flags.md`` anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from multimesh_maxtext.command.check_flags import check_job
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.job import find_maxtext
from multimesh_maxtext.errors import LauncherError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/maxtext-flags.md"
BEGIN, END = "<!-- models: maxtext/tests/model_table.py --write -->", "<!-- end of models -->"

TINY = "--pp 2 --cpus 2 --num-layers 4 --model-dims 64 --mlp-dims 64 --num-heads 4 head_dim=16 vocab_size=384"

_SMALL = {
    **dict.fromkeys(("num_experts", "gdn_num_value_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "global_num_kv_heads", "gdn_num_key_heads"), 2),
    **dict.fromkeys(("shared_experts", "first_num_dense_layers"), 1),
    **dict.fromkeys(("n_routing_groups", "topk_routing_group"), -1),
    **dict.fromkeys(("base_moe_mlp_dim", "indexer_topk"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "global_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("sliding_window_size", "chunk_attn_window_size"), 8),
    **dict.fromkeys(("gdn_key_head_dim", "gdn_value_head_dim", "gdn_chunk_size"), 8),
    **dict.fromkeys(("moe_expert_input_dim", "attention_output_dim"), 48),
    "mrope_section": "[1,1,0]",  # of 16 / 4 / 2 frequencies
}
"""Sizes without a flag, for the models that set them."""


_WHY = re.compile(r"--backend multimesh cannot train with (.+?) yet: (.+?); use .*")
"""A refusal: the setting, and the reason."""


def names(package: Path) -> list[str]:
    """Names of all models of MaxText."""
    return sorted(path.stem for path in (package / "configs/models").glob("*.yml"))


def tiny(name: str, package: Path) -> list[str]:
    """Return the flags of a tiny pipeline of a model."""
    config = yaml.safe_load((package / f"configs/models/{name}.yml").read_text(encoding="utf-8"))
    wide = config.get("base_moe_mlp_dim") == config.get("base_mlp_dim", 0)  # then --mlp-dims decides both
    small = {key: value for key, value in _SMALL.items() if config.get(key, 1) not in (-1, 0, 1)}
    settings = [f"{key}={value}" for key, value in small.items() if not (wide and key == "base_moe_mlp_dim")]
    return ["--model-name", name, *TINY.split(), *settings, "dtype=float32", "sparse_matmul=false"]


def verdict(name: str, package: Path) -> tuple[str, str]:
    """Return the decoder block of a model, and why a pipeline refuses it; empty if it runs."""
    parsed = read(tiny(name, package))
    try:
        return str(check_job(parsed, package).model.resolved.get("decoder_block")), ""
    except LauncherError as error:
        one_program = check_job(read(["--backend", "spmd", "--cpus", "1", "--model-name", name]), package)
        return str(one_program.model.resolved.get("decoder_block")), str(error)


def group_all(package: Path) -> dict[tuple[str, str], list[str]]:
    """Return the models of each decoder block and verdict; those that run come first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names(package):
        groups.setdefault(verdict(name, package), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: (bool(item[0][1]), item[0])))


def _rows(package: Path) -> Iterator[str]:
    for (block, refusal), group in group_all(package).items():
        text = "; ".join(_WHY.sub(r"`\1`: \2", line) for line in refusal.splitlines()) or "runs"
        yield f"| {block} | {', '.join(group)} | {text} |"


def table() -> str:
    """Return the models, those alike in one row, as Markdown."""
    package = find_maxtext(ROOT) / "maxtext"
    return "\n".join(["| decoder block | models | as a pipeline |", "|---|---|---|", *_rows(package)])


def documented() -> str:
    """Return the table in the document."""
    return DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__" and "--write" in sys.argv:
    before, _, tail = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{tail.partition(END)[2]}", encoding="utf-8")
