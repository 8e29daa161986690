"""Steps of MaxText pipelines beside MaxText's own programs, as XLA compiles them for GPUs that are not there.

``python maxtext/tests/program_table.py [NAME...]`` compiles all cases, or some, and renews their part of programs.json.
It needs the group compile-gpu, and takes two to ten minutes a case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("programs.json")
USUAL = "--gpus 1 --batch-size 16 --sequence-length 2048 --attention cudnn_flash_te --remat full"
CASES = {
    "llama2-7b": "--nodes 4 --device h100 --num-layers 4 --pp 2 --tp 2",
    "llama3-8b interleaved": (
        "--nodes 4 --device b200 --num-layers 4 --pp 2 --tp 2 --sequence-parallel --interleave 2 --schedule interleaved"
    ),
    "llama3-8b cp": "--nodes 8 --device h100 --num-layers 2 --pp 2 --cp 2 --tp 2 --attention dot_product",
    "llama3-8b fsdp": "--nodes 8 --device h100 --num-layers 16 --pp 2 --fsdp 4",
    "llama3-8b scanned": "--nodes 4 --device h100 --num-layers 4 --pp 2 --dp 2 --scan-layers",
    "llama3-70b": "--nodes 32 --device h100 --num-layers 4 --pp 4 --tp 8 --sequence-parallel",
    "gpt3-175b": "--nodes 32 --device h100 --num-layers 8 --pp 8 --tp 4 --sequence-parallel --schedule zb-h1",
    "qwen3-14b fsdp": "--nodes 8 --device h100 --num-layers 2 --pp 2 --fsdp 4",
    "qwen3-14b fsdp tp": "--nodes 8 --device h100 --num-layers 12 --pp 2 --fsdp 2 --tp 2",
    "qwen3-0.6b": "--nodes 8 --device b200 --num-layers 8 --pp 4 --dp 2 --schedule dualpipe-v --interleave 2",
    "gemma2-9b": "--nodes 8 --device b200 --num-layers 2 --pp 2 --fsdp 2 --tp 2 --attention dot_product",
    "gemma3-12b": "--nodes 8 --device h100 --num-layers 6 --pp 2 --tp 4 --attention dot_product",
    "mixtral-8x7b": "--nodes 8 --device h100 --num-layers 2 --pp 2 --ep 4",
    "qwen3-30b-a3b": "--nodes 8 --device b200 --num-layers 2 --pp 2 --ep 4",
}
"""Flags of `maxtext/run.py` beside `USUAL` and the model, which the name begins with: real widths, few layers."""

GOALS = {"flops": 1.001, "collectives": 1.02, "accessed": 1.05, "peak": 1.0}
"""The most that each size of ours may be of that of MaxText's one program."""

ABOVE: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {"collectives": 1.3},
}
"""What is above its goal, and by how much at most; docs/performance.md names the causes."""

SIZES = ("flops", "collectives", "accessed", "copied", "peak")


def compile_case(name: str, folder: Path) -> dict[str, Any]:
    """Return the command's costs of a case, with ``memory``: the error of each stage's forecast, as a share."""
    job = ["--model-name", name.split()[0], *USUAL.split(), *CASES[name].split(), "--output", str(folder)]
    command = [
        sys.executable,
        str(ROOT / "maxtext/run.py"),
        *["--forecast", "--compile", "--backend", "spmd", "--json"],
        *job,
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{name}: {process.stderr}")
    document = json.loads(process.stdout)
    needs = zip(document["forecast"], document["compiled"], strict=True)
    memory = [round(forecast["total"] / need["total"] - 1, 3) for forecast, need in needs]
    return {"programs": {name: select(costs) for name, costs in document["programs"].items()}, "memory": memory}


def select(costs: dict[str, float]) -> dict[str, float]:
    """Return the sizes of a program that are compared, with those of all collectives as one."""
    names = {
        "flops": "flops",
        "accessed": "bytes accessed",
        "copied": "bytes copied",
        "copies": "copies",
        "peak": "peak",
    }
    others = {*names.values(), "seconds"}
    sizes = {size: costs[name] for size, name in names.items()}
    return sizes | {"collectives": sum(costs[name] for name in costs.keys() - others)}


def ratios(record: dict[str, Any], to: str = "program") -> dict[str, float]:
    """Return the sizes of a case as multiples of those of one of MaxText's own programs."""
    costs, reference = record["programs"]["multimesh"], record["programs"].get(to)
    return {size: round(costs[size] / reference[size], 3) for size in SIZES if reference[size]} if reference else {}


def load_table() -> dict[str, Any]:
    """Return the table on file."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def main(names: Iterable[str]) -> None:
    """Renew the file."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            record = compile_case(name, Path(folder))
        print(name, ratios(record), ratios(record, "pipeline"), record["memory"], flush=True)
        table = load_table() | {"jax": version("jax"), name: record}
        order = {key: table[key] for key in ("jax", *CASES) if key in table}
        FILE.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(sys.argv[1:] or CASES)
