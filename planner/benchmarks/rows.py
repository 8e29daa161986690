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
from multimesh_planner import footprint, layer_seconds, models
from multimesh_planner.configuration import RECOMPUTE, USUAL, Configuration
from multimesh_planner.footprint import Footprint
from multimesh_planner.hardware.devices import Device, device
from multimesh_planner.hardware.software import Software, software
from multimesh_planner.transformer import Transformer

from multimesh import schedules

RUNS = Path(__file__).parent / "runs"
FILES = tuple(RUNS / name for name in ("dense.csv", "fresh.csv", "moe.csv", "others.csv", "round5.csv"))
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
_MACHINES = {  # what differs from the device's usual machine, in bytes a second
    "Jean Zay": {  # bigscience, jz/hpc-specs.md: "8 GPUs per node Using NVLink 4 inter-gpu connects, 4 OmniPath links"
        "link": 4 * 25e9,  # of the twelve links of an A100
        "network": 4 * 12.5e9 / 8,
    }
}
_ADAPTERS = re.compile(r"(\d+)x(\d+)Gb")
_SLICES = re.compile(r"(\d+) x v\d+[ep]-\d+")  # of TPUs: each has a torus of its own, and a network joins them
_CLASSES = (  # facts of the sources: which software ran
    (r"maxtext|paxml|levanter|marin|jax", "maxtext"),
    (r"not compiled|nanotron", "pytorch-eager"),
    (r"torchtitan|llm-foundry|InternEvo|fsdp|pytorch|lightning|colossal", "pytorch"),
    (r"mlcommons|mlperf|nvidia|nemo|megatron|bigscience|arXiv 2104\.04473|arXiv 2205\.05198", "nvidia"),
)
_UNFUSED = re.compile(r"bigscience|arXiv 2104\.04473|arXiv 2205\.05198")  # before FlashAttention
_COUNTED = (  # what the memory of a source is, where it is not all that the fullest device holds
    (r"nanotron", "first"),  # trainer.py: torch.cuda.max_memory_allocated() of rank 0
    (r"torchtitan", "tensors"),  # metrics.py: reserved_bytes.all.peak of PyTorch's allocator, the largest of all ranks
)
_LOGITS = (  # bytes of a logit at the peak, counted in a source's code
    (r"loss compiled", 4.0),  # the logits and their gradient in bfloat16
    (r"loss parallel", 18.0),  # PyTorch's tensor/parallel/loss.py: four arrays of float32 and a gap of bfloat16
    (r"loss eager", 14.0),  # bfloat16 and float32, log-softmax, its gradient, with the gap that the first two leave
)
_STATE = {  # bytes of a parameter, its gradient and its copy in float32, where a source says so
    "weight_dtype bfloat16": (2.0, 2.0, 0.0),
    "(?i)bigscience.*fp32 grad": (2.0, 8.0, 8.0),  # Megatron-DeepSpeed sums in float32, since 2022 beside bfloat16
    "(?i)bigscience": (2.0, 2.0, 8.0),
    "Kempner": (2.0, 2.0, 0.0),
    "nanotron": (2.0, 4.0, 4.0),
    "(?i)torchtitan": (4.0, 4.0, 0.0),
}
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
    model, how, device, software
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
    software: Software
    seconds: float
    memory: float
    counted: str = "device"

    def fullest(self, memory: Sequence[Footprint]) -> float:
        """Return the bytes of a forecast that are to be compared with those measured."""
        some = memory[:1] if self.counted == "first" else memory
        return max(part.total - (0.0 if self.counted == "device" else part.libraries) for part in some)


def read(*files: Path) -> tuple[tuple[Run, ...], dict[str, str]]:
    """Return the runs of some files, and why each other row is none, by its id."""
    runs, others = [], {}
    for file in files:
        names = {run.id for run in runs}
        with file.open(encoding="utf-8", newline="") as text:
            for number, row in enumerate(csv.DictReader(text)):
                name = row.get("id") or f"row {number}"
                name = f"{name}-{file.stem}" if name in names else name  # files number their rows apart
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
    if match := re.search(r"known fault: (.*)", note):
        raise ValueError(f"a fault that its source knows: {match[1]}")
    if "lora" in (row.get("source", "") + note).lower():
        raise ValueError("most of its weights are frozen")
    model = _model(row)
    if missing:
        raise ValueError(f"not stated: {', '.join(missing)}")
    tp, pp, cp, fsdp, ep = (_read_count(row, column, 1) for column in ("tp", "pp", "cp", "fsdp", "ep"))
    dp, remainder = divmod(_read_count(row, "gpus", 0), tp * pp * cp * fsdp)
    if remainder:
        raise ValueError("its axes do not make its GPUs")
    on = device(_DEVICES.get(row["gpu"], row["gpu"].split(" ")[0].lower()))
    software = _software(row)
    how = Configuration(
        batch=_read_count(row, "gbs", 0),
        sequence=_read_count(row, "seq", 0),
        microbatch=_read_count(row, "mbs", 1),
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep if model.experts else 1,
        etp=_etp(note, dp * fsdp * cp, tp, ep) if model.experts else 0,
        interleave=_read_count(row, "vp", 1),
        schedule="interleaved" if _read_count(row, "vp", 1) > 1 else "1f1b",
        sequence_parallel=row["sp"] == "1" or (not row["sp"] and software.fused_attention),
        sharded=_sharded(row["optimizer_sharding"], fsdp),
        gather_once="gathered once" in row["optimizer_sharding"],
        reduce_once="reduced once" in row["optimizer_sharding"],
        within=int(match[1]) if (match := re.search(r"within (\d+)", row["optimizer_sharding"])) else 0,
        moments="bfloat16" if "kf" in name else "float32",
        load=float(match[1]) if (match := re.search(r"capacity ([\d.]+\d)", note)) else 1.0,
        offload="offload" in row["recompute"] + note,
        precision="fp4" if "FP4" in row["precision"] else "fp8" if "8" in row["precision"] else "bf16",
    )
    on = dataclasses.replace(on, **_MACHINES.get(row["system"], {}))
    if match := _ADAPTERS.search(row["system"]):
        on = dataclasses.replace(on, network=int(match[1]) * int(match[2]) * 1e9 / 8 / on.domain)
    if match := _SLICES.search(row["system"]):
        on = dataclasses.replace(on, domain=how.devices // int(match[1]))
    how = _recomputed(row["recompute"].lower(), model, how, on, software)
    if "nanotron" in row["source"] and how.pp > 1:
        how = how.replace(layers=_by_cost(model, how.pp))
    if model.experts and how.pp > 1:  # their stages are laid out by hand
        parts = layer_seconds.parts(model, how, on, software)
        route = schedules.get(how.schedule).placement(how.pp)
        how = how.replace(layers=layer_seconds.balance(model, how, parts, route))
    memory = float(row["memory_gb"] or 0) * 1e9
    counted = next((word for pattern, word in _COUNTED if re.search(pattern, row["source"], re.IGNORECASE)), "device")
    return Run(name, row["source"], model, how, on, software, float(row["step_s"]), memory, counted)


def _read_count(row: Mapping[str, str], column: str, otherwise: int) -> int:
    value = float(row.get(column) or otherwise)
    if value != int(value):
        raise ValueError(f"{column} = {value} is not whole")
    return int(value)


def _model(row: Mapping[str, str]) -> Transformer:
    name = row["model"]
    if _EXPERTS.search(name) or _read_count(row, "ep", 1) > 1:
        return _with_experts(name, row)
    missing = [column for column in ("hidden", "heads") if not row.get(column)]
    if missing:
        raise ValueError(f"not stated: {', '.join(missing)}")
    heads, hidden = _read_count(row, "heads", 0), _read_count(row, "hidden", 0)
    return Transformer(
        name=name,
        layers=_read_count(row, "layers", 0) if row.get("layers") else _layers(row, hidden, _read_count(row, "pp", 1)),
        hidden=hidden,
        ffn=_read_count(row, "ffn", 4 * hidden),
        heads=heads,
        kv_heads=_read_count(row, "kv_heads", heads),
        vocabulary=_read_count(row, "vocab", 51200),
        head=int(match[1]) if (match := re.search(r"head_dim (\d+)", row["note"])) else 0,
        gated=bool(_GATED.search(name)),
        tied=name.startswith(("mpt", "maxtext")) or "tied" in row["note"],
    )


def _with_experts(name: str, row: Mapping[str, str]) -> Transformer:
    if name == _INTERNAL.name:
        return _INTERNAL
    public_name = next((public for word, public in _MODELS.items() if name.lower().startswith(word)), None)
    if public_name is None:
        raise ValueError(f"its experts are not stated, and no public configuration of {name} is known")
    model = models.model(public_name)
    changes = {"layers": _read_count(row, "layers", model.layers)}
    if "w/o MTP" in row.get("note", ""):
        changes["predicted"] = 0
    return dataclasses.replace(model, **changes)


def _etp(note: str, replicas: int, tp: int, ep: int) -> int:
    """Return the devices that share the matrices of an expert: those of tp, unless ep needs them."""
    if match := re.search(r"ETP(\d+)", note):
        return int(match[1])
    return tp if replicas % ep == 0 else 1


def _layers(row: Mapping[str, str], hidden: int, pp: int) -> int:
    """Return the layers of a GPT of so many parameters: the nearest number that pp stages share evenly."""
    if not row.get("params_b"):
        raise ValueError("not stated: layers")
    layer_parameters = float(row["params_b"]) * 1e9 - hidden * float(row.get("vocab") or 51200)
    return max(1, round(layer_parameters / (12 * hidden**2) / pp)) * pp


def _software(row: Mapping[str, str]) -> Software:
    source = f"{row['source']} {row['system']}"
    name = next((name for pattern, name in _CLASSES if re.search(pattern, source, re.IGNORECASE)), None)
    if name is None:
        name = "pytorch" if row["optimizer_sharding"].startswith(("FSDP", "ZeRO")) else "unknown"
    of = software(name)
    if logit := next((size for pattern, size in _LOGITS if re.search(pattern, row["note"])), 0.0):
        of = dataclasses.replace(of, logit_bytes=logit)
    if "loss parallel" in row["note"]:  # of all tokens at a time
        of = dataclasses.replace(of, gathers_logits=False, loss_tokens=float("inf"))
    if sizes := next((sizes for pattern, sizes in _STATE.items() if re.search(pattern, source + row["note"])), None):
        of = dataclasses.replace(of, parameter_bytes=sizes[0], gradient_bytes=sizes[1], master_bytes=sizes[2])
    if _UNFUSED.search(source):  # and nothing hides a collective
        return dataclasses.replace(of, fused_attention=False, exposed_tensor=1.0, exposed_gradients=1.0)
    return of


def _recomputed(text: str, model: Transformer, how: Configuration, on: Device, software: Software) -> Configuration:
    """Return the run with its recomputation; where none is stated, the least that fits into a device."""
    if text.startswith("saves"):
        return how.replace(recompute="full", saved=tuple(re.findall(r"\w+", text.split(",")[0])[1:]))
    stated = next((name for name in reversed(RECOMPUTE) if name in text), "")
    if stated == "selective" and software.name.startswith("pytorch"):
        return how.replace(recompute="alternate")
    if stated:
        return how.replace(recompute=stated)
    for name, share in (*((name, 1.0) for name in USUAL[:-1]), *(("full", n / 4) for n in range(1, 5))):
        attempt = how.replace(recompute=name, recomputed=share)
        if max(part.total for part in footprint.peak_bytes(model, attempt, software)) <= on.memory:
            return attempt
    return how


def _by_cost(model: Transformer, pp: int) -> tuple[int, ...]:
    """Return the layers of nanotron's stages: one ends with the layer that exceeds its share of all products.

    ``models/base.py``: the head counts as a block, and the embedding costs nothing.
    """
    costs = [model.layer_parameters[0]] * model.layers + [model.embedding_parameters]
    sizes, stage = [0] * pp, 0
    for number, seconds in enumerate(itertools.accumulate(costs)):
        sizes[stage] += number < model.layers
        stage += seconds > sum(costs) * (stage + 1) / pp
    return tuple(sizes)


def _sharded(text: str, fsdp: int) -> str:
    if text.startswith(("FSDP", "ZeRO-3")):
        return "optimizer" if fsdp > 1 and "over cp" not in text else "parameters"
    return "none" if text == "none" else "optimizer"
