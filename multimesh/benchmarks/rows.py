"""Published runs as configurations: the columns of ``runs/dense.csv``."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import UsageError
from multimesh.hardware.devices import Device, device
from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer

RUNS = Path(__file__).parent / "runs"

_NEEDED = ("gpus", "hidden", "heads", "seq", "gbs", "mbs", "tp", "pp", "step_s")
_DEVICES = {"A100-80": "a100", "A100": "a100", "A100-40": "a100-40gb", "H100-80": "h100", "H200-141": "h200"}
_NETWORKS = {"Jean Zay": 6.25e9}  # bytes a second: four adapters of 100 Gb/s for eight GPUs
_STACKS = (  # facts of the sources: which software ran
    (r"bigscience", "deepspeed-2021"),
    (r"arXiv 2104\.04473|arXiv 2205\.05198", "megatron-2021"),
    (r"nanotron|torchtitan", "eager"),
)
_GATED = re.compile(r"llama|mi[sx]tral|qwen|gemma|deepseek|glm|yi-", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes
    ----------
    id, source
        Of the row.
    model, how, device, stack
        What ran, on what.
    seconds
        Of a step, measured.
    memory
        Bytes of a device, measured; 0: not stated.
    """

    id: str
    source: str
    model: Transformer
    how: Configuration
    device: Device
    stack: str
    seconds: float
    memory: float


def read(file: Path) -> tuple[tuple[Run, ...], dict[str, str]]:
    """Runs of a file, and why each other row is none, by its id."""
    runs, others = [], {}
    with file.open(encoding="utf-8", newline="") as text:
        for number, row in enumerate(csv.DictReader(text)):
            name = row.get("id") or f"row {number}"
            try:
                runs.append(_run(name, row))
            except (UsageError, ValueError) as error:
                others[name] = str(error)
    return tuple(runs), others


def prefix(run: Run) -> str:
    """The source of a run: the beginning of its id."""
    return run.id.split("-")[0]


def _run(name: str, row: Mapping[str, str]) -> Run:
    note = row.get("note", "")
    missing = [column for column in _NEEDED if not row.get(column)]
    if missing:
        raise ValueError(f"not stated: {', '.join(missing)}")
    if "CHECK:" in note:
        raise ValueError("disagrees with itself")
    if "lora" in (row.get("source", "") + note).lower():
        raise ValueError("most of its weights are frozen")

    def whole(column: str, otherwise: int) -> int:
        value = float(row.get(column) or otherwise)
        if value != int(value):
            raise ValueError(f"{column} = {value} is not whole")
        return int(value)

    heads, hidden = whole("heads", 0), whole("hidden", 0)
    model = Transformer(
        name=row["model"],
        layers=whole("layers", 0) if row.get("layers") else _layers(row, hidden, whole("pp", 1)),
        hidden=hidden,
        ffn=whole("ffn", 4 * hidden),
        heads=heads,
        kv_heads=whole("kv_heads", heads),
        vocabulary=whole("vocab", 51200),
        gated=bool(_GATED.search(row["model"])),
    )
    tp, pp, cp, fsdp = (whole(column, 1) for column in ("tp", "pp", "cp", "fsdp"))
    dp, rest = divmod(whole("gpus", 0), tp * pp * cp * fsdp)
    if rest:
        raise ValueError("its axes do not make its GPUs")
    stack = _stack(row)
    how = Configuration(
        batch=whole("gbs", 0),
        sequence=whole("seq", 0),
        microbatch=whole("mbs", 1),
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        interleave=whole("vp", 1),
        schedule="interleaved" if whole("vp", 1) > 1 else "1f1b",
        sequence_parallel=row["sp"] == "1" or (not row["sp"] and stack == "modern"),
        recompute=next((name for name in ("full", "selective") if name in row["recompute"].lower()), "none"),
        sharded=_sharded(row["optimizer_sharding"], fsdp),
        precision="fp4" if "FP4" in row["precision"] else "fp8" if "8" in row["precision"] else "bf16",
    )
    known = _DEVICES.get(row["gpu"], row["gpu"].split("-")[0].lower())
    on = device(known)
    if row["system"] in _NETWORKS:
        on = dataclasses.replace(on, network=_NETWORKS[row["system"]])
    memory = float(row["memory_gb"] or 0) * 1e9
    return Run(name, row["source"], model, how, on, stack, float(row["step_s"]), memory)


def _layers(row: Mapping[str, str], hidden: int, pp: int) -> int:
    """Layers of a GPT of so many parameters: the nearest number that pp stages share evenly."""
    if not row.get("params_b"):
        raise ValueError("not stated: layers")
    rest = float(row["params_b"]) * 1e9 - hidden * float(row.get("vocab") or 51200)
    return max(1, round(rest / (12 * hidden**2) / pp)) * pp


def _stack(row: Mapping[str, str]) -> str:
    found = next((stack for pattern, stack in _STACKS if re.search(pattern, row["source"])), "modern")
    return "deepspeed-2022" if found == "deepspeed-2021" and "fp32 grad" in row["note"] else found


def _sharded(text: str, fsdp: int) -> str:
    if text.startswith(("FSDP", "ZeRO-3")):
        return "optimizer" if fsdp > 1 else "parameters"
    return "none" if text == "none" else "optimizer"
