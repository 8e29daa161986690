"""Published runs as configurations: the columns of the files in ``runs``."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import UsageError
from multimesh.hardware.devices import Device, device
from multimesh.hardware.software import Stack, stack
from multimesh.planner import footprint, layer, models, stage_layers
from multimesh.planner.configuration import NARROW, RECOMPUTE, USUAL, Configuration
from multimesh.planner.footprint import Footprint
from multimesh.planner.transformer import Transformer

from multimesh import schedules

RUNS = Path(__file__).parent / "runs"
FILES = tuple(RUNS / name for name in ("dense.csv", "fresh.csv", "moe.csv", "others.csv"))
"""All published runs; ``schedules.csv`` has others."""

_NEEDED = ("gpus", "seq", "gbs", "mbs", "tp", "pp", "step_s")
_DEVICES = {
    "A100-80": "a100",
    "A100": "a100",
    "A100-40": "a100-40gb",
    "H100-80": "h100",
    "H200-141": "h200",
    "H100-96 (HBM2e, 500 W)": "h100-96",
}
_NETWORKS = {"Jean Zay": 6.25e9}  # bytes a second: four adapters of 100 Gb/s for eight GPUs
_ADAPTERS = re.compile(r"(\d+)x(\d+)Gb")
_SLICES = re.compile(r"(\d+) x v\d+[ep]-\d+")  # of TPUs: each has a torus of its own, and a network joins them
_STACKS = (  # facts of the sources: which software ran
    (r"bigscience", "deepspeed-2021"),
    (r"NeMo for ROCm", "modern"),
    (r"arXiv 2104\.04473|arXiv 2205\.05198", "megatron-2021"),
    (r"nanotron", "nanotron"),
    (r"not compiled", "eager"),
    (r"maxtext|paxml|levanter|marin|jax", "maxtext"),
    (r"torchtitan|llm-foundry|InternEvo|fsdp|pytorch|lightning|colossal|deepspeed", "pytorch"),
    (r"mlcommons|mlperf", "modern-graphs"),  # its configurations read config_common_cg.sh
    (r"nvidia|nemo|megatron", "modern"),
)
_COUNTED = (  # what the memory of a source is, where it is not all that the fullest device holds
    (r"nanotron", "first"),  # trainer.py: torch.cuda.max_memory_allocated() of rank 0
    (r"torchtitan", "tensors"),  # metrics.py: reserved_bytes.all.peak of PyTorch's allocator, the largest of all ranks
)
_LOGITS = (  # bytes of a logit at the peak, counted in a source's code
    (r"loss compiled", 4.0),  # the logits and their gradient in bfloat16
    (r"loss parallel", 18.0),  # PyTorch's tensor/parallel/loss.py: four arrays of float32 and a gap of bfloat16
    (r"loss eager", 14.0),  # bfloat16 and float32, log-softmax, its gradient, with the gap that the first two leave
)
_RECIPES = (  # facts of the recipes that ran models with experts, in the notes of their rows
    ("full graph", "megatron-2026"),
    ("overlap without graphs", "megatron-2025-overlap"),
    ("all-to-all", "megatron-2025-alltoall"),
    ("graphs of", "megatron-2025-graphs"),
    ("no graphs", "megatron-2025"),
)
_DATES = (  # when the software of a release ran
    (r"§\s?(2\d)\.(\d\d)", 0.0),
    (r"container (2\d)\.(\d\d)", 0.0),
    (r"tag v(2\d)\.(\d\d)", 0.0),
    (r"MaxText[^)]*, 20(2\d)-(\d\d)", 0.0),
    (r"training_results_v(\d)\.(\d)", 2020.45),  # a round every half year: 5.1 in autumn 2025
)
_GATED = re.compile(r"llama|mi[sx]tral|qwen|gemma|deepseek|glm|yi-|olmo", re.IGNORECASE)
_MODELS = {
    "deepseekv3": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "kimi_k2": "kimi-k2",
    "gpt oss 120b": "gpt-oss-120b",
    "gpt oss 20b": "gpt-oss-20b",
    "grok1": "grok-1",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
}
"""Models with experts, as the sources write them, and their public configurations."""

_EXPERTS = re.compile(
    r"moe|experts|\d+b[-_ ]?a\d+b|8x\d+b|deepseek.?v|kimi|gpt.?oss|grok|nemotron.?3.?(nano|super|ultra)"
    r"|glm.?4\.5|minimax|llama.?4|dbrx|arctic|ernie|hunyuan",
    re.IGNORECASE,
)
_INTERNAL = Transformer(  # Internal-352B of MegaScale-MoE, by its table of models
    "internal-352b-moe", 60, 4096, 14336, 32, 8, 65536, experts=32, active=3
)


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
    counted
        What these are: ``device`` (all of the fullest device), ``tensors`` (those of PyTorch's allocator there), or
        ``first`` (the same, of a device of the first stage).
    """

    id: str
    source: str
    model: Transformer
    how: Configuration
    device: Device
    stack: Stack
    seconds: float
    memory: float
    counted: str = "device"

    def held(self, memory: Sequence[Footprint]) -> float:
        """Return the bytes of a forecast that are to be compared with those measured."""
        some = memory[:1] if self.counted == "first" else memory
        return max(held.total - (0.0 if self.counted == "device" else held.rest) for held in some)


def read(*files: Path) -> tuple[tuple[Run, ...], dict[str, str]]:
    """Return the runs of some files, and why each other row is none, by its id."""
    runs, others = [], {}
    for file in files:
        seen = {run.id for run in runs}
        with file.open(encoding="utf-8", newline="") as text:
            for number, row in enumerate(csv.DictReader(text)):
                name = row.get("id") or f"row {number}"
                name = f"{name}-{file.stem}" if name in seen else name  # files number their rows apart
                try:
                    runs.append(_run(name, row))
                except (UsageError, ValueError) as error:
                    others[name] = str(error)
    return tuple(runs), others


def prefix(run: Run) -> str:
    """Return the source of a run: the beginning of its id."""
    return run.id.split("-")[0]


def _run(name: str, row: Mapping[str, str]) -> Run:
    note = row.get("note", "")
    missing = [column for column in _NEEDED if not row.get(column)]
    if "CHECK:" in note:
        raise ValueError("disagrees with itself")
    if found := re.search(r"known fault: (.*)", note):
        raise ValueError(f"a fault that its source knows: {found[1]}")
    if "lora" in (row.get("source", "") + note).lower():
        raise ValueError("most of its weights are frozen")
    model = _model(row)
    if missing:
        raise ValueError(f"not stated: {', '.join(missing)}")
    tp, pp, cp, fsdp, ep = (_whole(row, column, 1) for column in ("tp", "pp", "cp", "fsdp", "ep"))
    dp, rest = divmod(_whole(row, "gpus", 0), tp * pp * cp * fsdp)
    if rest:
        raise ValueError("its axes do not make its GPUs")
    on = device(_DEVICES.get(row["gpu"], row["gpu"].split(" ")[0].lower()))
    software = _stack(row, bool(model.experts))
    how = Configuration(
        batch=_whole(row, "gbs", 0),
        sequence=_whole(row, "seq", 0),
        microbatch=_whole(row, "mbs", 1),
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep if model.experts else 1,
        etp=_etp(note, dp * fsdp * cp, tp, ep) if model.experts else 0,
        interleave=_whole(row, "vp", 1),
        schedule="interleaved" if _whole(row, "vp", 1) > 1 else "1f1b",
        sequence_parallel=row["sp"] == "1" or (not row["sp"] and software.fused_attention),
        sharded=_sharded(row["optimizer_sharding"], fsdp),
        gather_once="gathered once" in row["optimizer_sharding"],
        within=int(found[1]) if (found := re.search(r"within (\d+)", row["optimizer_sharding"])) else 0,
        narrow=tuple(part for part in NARROW if f"fp8 {part}" in note),
        load=float(found[1]) if (found := re.search(r"capacity ([\d.]+\d)", note)) else 1.0,
        offload="offload" in row["recompute"] + note,
        precision="fp4" if "FP4" in row["precision"] else "fp8" if "8" in row["precision"] else "bf16",
    )
    on = dataclasses.replace(on, network=_NETWORKS.get(row["system"], on.network))
    if found := _ADAPTERS.search(row["system"]):
        on = dataclasses.replace(on, network=int(found[1]) * int(found[2]) * 1e9 / 8 / on.domain)
    if found := _SLICES.search(row["system"]):
        on = dataclasses.replace(on, domain=how.devices // int(found[1]))
    how = _recomputed(row["recompute"].lower(), model, how, on, software)
    if "nanotron" in row["source"] and how.pp > 1:
        how = how.changed(layers=_by_cost(model, how.pp))
    if model.experts and how.pp > 1:  # their stages are laid out by hand
        parts = layer.parts(model, how, on.with_software(software.year), software)
        route = schedules.get(how.schedule).placement(how.pp)
        how = how.changed(layers=stage_layers.balance(model, how, parts, route))
    memory = float(row["memory_gb"] or 0) * 1e9
    counted = next((what for pattern, what in _COUNTED if re.search(pattern, row["source"], re.IGNORECASE)), "device")
    return Run(name, row["source"], model, how, on, software, float(row["step_s"]), memory, counted)


def _whole(row: Mapping[str, str], column: str, otherwise: int) -> int:
    value = float(row.get(column) or otherwise)
    if value != int(value):
        raise ValueError(f"{column} = {value} is not whole")
    return int(value)


def _model(row: Mapping[str, str]) -> Transformer:
    name = row["model"]
    if _EXPERTS.search(name) or _whole(row, "ep", 1) > 1:
        return _with_experts(name, row)
    missing = [column for column in ("hidden", "heads") if not row.get(column)]
    if missing:
        raise ValueError(f"not stated: {', '.join(missing)}")
    heads, hidden = _whole(row, "heads", 0), _whole(row, "hidden", 0)
    return Transformer(
        name=name,
        layers=_whole(row, "layers", 0) if row.get("layers") else _layers(row, hidden, _whole(row, "pp", 1)),
        hidden=hidden,
        ffn=_whole(row, "ffn", 4 * hidden),
        heads=heads,
        kv_heads=_whole(row, "kv_heads", heads),
        vocabulary=_whole(row, "vocab", 51200),
        head=int(found[1]) if (found := re.search(r"head_dim (\d+)", row["note"])) else 0,
        gated=bool(_GATED.search(name)),
        tied=name.startswith(("mpt", "maxtext")) or "tied" in row["note"],
    )


def _with_experts(name: str, row: Mapping[str, str]) -> Transformer:
    if name == _INTERNAL.name:
        return _INTERNAL
    known = next((public for word, public in _MODELS.items() if name.lower().startswith(word)), None)
    if known is None:
        raise ValueError(f"its experts are not stated, and no public configuration of {name} is known")
    model = models.model(known)
    fewer = {"layers": _whole(row, "layers", model.layers)}
    if "w/o MTP" in row.get("note", ""):
        fewer["predicted"] = 0
    return dataclasses.replace(model, **fewer)


def _etp(note: str, replicas: int, tp: int, ep: int) -> int:
    """Return the devices that share the matrices of an expert: those of tp, unless ep needs them."""
    if found := re.search(r"ETP(\d+)", note):
        return int(found[1])
    return tp if replicas % ep == 0 else 1


def _layers(row: Mapping[str, str], hidden: int, pp: int) -> int:
    """Return the layers of a GPT of so many parameters: the nearest number that pp stages share evenly."""
    if not row.get("params_b"):
        raise ValueError("not stated: layers")
    rest = float(row["params_b"]) * 1e9 - hidden * float(row.get("vocab") or 51200)
    return max(1, round(rest / (12 * hidden**2) / pp)) * pp


def _stack(row: Mapping[str, str], experts: bool) -> Stack:
    source = f"{row['source']} {row['system']}"
    found = next((name for pattern, name in _STACKS if re.search(pattern, source, re.IGNORECASE)), None)
    if found is None:
        found = "pytorch" if row["optimizer_sharding"].startswith(("FSDP", "ZeRO")) else "modern"
    if found == "deepspeed-2021" and "fp32 grad" in row["note"]:
        found = "deepspeed-2022"
    year = _year(row["source"]) or (2025.0 if "msmoe" in row["id"] else 0.0)
    if found == "modern" and experts:
        found = next((stack for word, stack in _RECIPES if word in row["note"]), "megatron-2025-alltoall")
    if found == "maxtext" and row["gpu"].startswith("tpu"):
        found = "maxtext-tpu"
    known = stack(found)
    if logit := next((size for pattern, size in _LOGITS if re.search(pattern, row["note"])), 0.0):
        known = dataclasses.replace(known, logit_bytes=logit)
    if "weight_dtype bfloat16" in row["note"]:
        known = dataclasses.replace(known, parameter_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=4.0)
    if "tokendrop" in row["note"]:  # shapes are known before the step
        known = dataclasses.replace(known, expert_layer=known.expert_layer / 2)
    return dataclasses.replace(known, year=year) if year else known


def _year(source: str) -> float:
    """Return when the software of a release ran, as 2025.5; 0: it is not stated."""
    for pattern, base in _DATES:
        if found := re.search(pattern, source):
            if base:
                return base + int(found[1]) + int(found[2]) / 2
            return 2000 + int(found[1]) + (int(found[2]) - 0.5) / 12
    return 0.0


def _recomputed(text: str, model: Transformer, how: Configuration, on: Device, software: Stack) -> Configuration:
    """Return the run with its recomputation; where none is stated, the least that fits into a device."""
    if text.startswith("saves"):
        return how.changed(recompute="full", saved=tuple(re.findall(r"\w+", text.split(",")[0])[1:]))
    stated = next((name for name in reversed(RECOMPUTE) if name in text), "")
    if stated == "selective" and software.name in ("pytorch", "eager"):
        return how.changed(recompute="alternate")
    if stated:
        return how.changed(recompute=stated)
    for name, share in (*((name, 1.0) for name in USUAL[:-1]), *(("full", n / 4) for n in range(1, 5))):
        tried = how.changed(recompute=name, recomputed=share)
        if max(held.total for held in footprint.peak_bytes(model, tried, software)) <= on.memory:
            return tried
    return how


def _by_cost(model: Transformer, pp: int) -> tuple[int, ...]:
    """Return the layers of nanotron's stages: one ends with the layer that exceeds its share of all products.

    ``models/base.py``: the head counts as a block, and the embedding costs nothing.
    """
    costs = [model.dense_layer_parameters] * model.layers + [model.embedding_parameters]
    sizes, stage = [0] * pp, 0
    for number, done in enumerate(itertools.accumulate(costs)):
        sizes[stage] += number < model.layers
        stage += done > sum(costs) * (stage + 1) / pp
    return tuple(sizes)


def _sharded(text: str, fsdp: int) -> str:
    if text.startswith(("FSDP", "ZeRO-3")):
        return "optimizer" if fsdp > 1 and "over cp" not in text else "parameters"
    return "none" if text == "none" else "optimizer"
