"""The full grid of pipelines that are compared with one program, and parity.csv, which has the differences.

``python maxtext/tests/grid.py SECTION ...`` trains the cases of some sections (default: all) and renews their rows. A
number is the largest relative difference over all steps.
"""

from __future__ import annotations

import csv
import datetime
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from parity import BASE, METRICS, ROOT, Result, compare

from multimesh import schedules
from multimesh_maxtext.command import check_flags

FILE = Path(__file__).with_name("parity.csv")
TOLERANCE = 1e-5
CLOSE = 1e-6
ROUNDED = 1e-2  # bfloat16 has 8 bits of precision
QUANTIZED = 5e-2  # of gradient norms: the last bit of a number decides to which of 15 (int4) values it is rounded

_LLAMA, _GPT3 = "", "decoder_block=gpt3"
_EXPERTS = "decoder_block=mixtral num_experts=4 base_moe_mlp_dim=32"
_DROPPING, _DROPLESS = "sparse_matmul=false", "use_ring_of_experts=true"
_DENSE, _SPARSE, _RING = f"{_EXPERTS} {_DROPPING}", f"{_EXPERTS} megablox=false", f"{_EXPERTS} {_DROPLESS}"
_FOUR = "--cpus 4 --dp 2 --pp 2"


def _schedules(model: str) -> list[str]:
    """Every schedule with one piece a stage and with two; unrolled and scanned, two stages and four in turn."""
    cases = []
    for name in dict.fromkeys([*schedules.names(), "custom"]):
        for pieces in (1, 2):
            kind = schedules.get("1f1b" if name == "custom" else name)
            if name == "fill-drain" or kind.usual > pieces or kind.chunks not in (None, pieces):
                continue
            number = len(cases)
            stages = 4 if number % 3 == 2 and pieces == 1 else 2
            grid = "--pp 4" if stages == 4 else "--dp 2 --pp 2"
            layers, scan = (2, "--scan-layers") if number % 2 else (1, "")
            table = "--custom-schedule-path TABLE" if name == "custom" else ""
            shape = f"--interleave {pieces} --num-layers {layers * stages * pieces} {scan}"
            cases.append(f"--cpus 4 {grid} --schedule {name} {table} {shape} {model}")
    return cases


def _cross(grid: str, *cases: str) -> list[str]:
    return [f"{grid} {case}" for case in cases]


def _remat() -> list[str]:
    from multimesh_maxtext.command.flags import REMAT

    return [
        f"{_FOUR} --remat {policy} {shape}"
        for policy in REMAT
        for shape in ("--num-layers 2", "--num-layers 4 --scan-layers decoder_block=gpt3")
    ]


_AS_WIDE = "num_experts=4 num_experts_per_tok=2 sparse_matmul=false"  # experts of --mlp-dims
_FEW = f"{_AS_WIDE} base_moe_mlp_dim=32"
_NARROW = "--num-heads 4 sliding_window_size=8 vocab_size=384"  # what a named model has no default for
_GLOBAL = "global_head_dim=16 global_num_kv_heads=2"
_V = "--cpus 4 --ep 2 --pp 2 --interleave 2 --schedule zb-v"
_GDN = (
    "gdn_key_head_dim=8 gdn_value_head_dim=8 gdn_num_key_heads=2 gdn_num_value_heads=4 gdn_chunk_size=8 "
    "normalization_layer_epsilon=0.01"  # below, its norms of near zeros show rounding
)
UNLIKE = {
    "gemma3": f"{_FOUR} --num-layers 6 --model-name gemma3-4b {_NARROW}",
    "gemma4": f"{_FOUR} --num-layers 6 --model-name gemma4-31b {_NARROW} {_GLOBAL}",
    "gemma4 experts": f"{_V} --num-layers 6 --model-name gemma4-26b {_NARROW} {_GLOBAL} {_FEW}",
    "gpt_oss": (
        f"{_FOUR} --schedule zb-h1 --num-layers 4 decoder_block=gpt_oss {_FEW} sliding_window_size=8 "
        "attention_bias=true attention_sink=true routed_bias=true mlp_bias=true mlp_activations=[sigmoid,linear] "
        "mlp_activations_limit=7.0 inhomogeneous_layer_cycle_interval=2"
    ),
    "deepseek": (
        f"--cpus 4 --pp 4 --num-layers 4 decoder_block=deepseek {_FEW} first_num_dense_layers=1 shared_experts=1 "
        "attention_type=mla q_lora_rank=16 kv_lora_rank=16 qk_nope_head_dim=8 qk_rope_head_dim=8 v_head_dim=8 "
        "routed_scaling_factor=2.5 routed_score_func=sigmoid"
    ),
    "llama4": (
        f"{_FOUR} --interleave 2 --num-layers 4 --model-name llama4-17b-128e {_NARROW} {_FEW} num_experts_per_tok=1 "
        "chunk_attn_window_size=8"
    ),
    "olmo3": f"{_FOUR} --interleave 2 --num-layers 4 --model-name olmo3-7b {_NARROW}",
    "qwen3_next": f"{_FOUR} --num-layers 4 --model-name qwen3-next-80b-a3b {_NARROW} {_AS_WIDE} {_GDN}",
}
"""Models whose layers are not alike, in the small: their groups of layers lie across stages."""

_EIGHT = "--cpus 8 --dp 4 --pp 2"
COMBINED = {
    "gpt-oss, zero 1": f"{UNLIKE['gpt_oss'].replace(_FOUR, _EIGHT)} --zero 1",
    "gemma2, context parallel, scan": "--cpus 8 --dp 2 --cp 2 --pp 2 --num-layers 4 --scan-layers decoder_block=gemma2",
    "qwen3-30b-a3b, fsdp x ep": (
        f"--cpus 8 --fsdp 2 --ep 2 --pp 2 --num-layers 2 --model-name qwen3-30b-a3b {_NARROW} {_AS_WIDE}"
    ),
    "deepseek3-tiny, ep": (
        "--cpus 8 --dp 2 --ep 2 --pp 2 --num-layers 4 --model-name deepseek3-tiny first_num_dense_layers=1 "
        "sparse_matmul=false vocab_size=384"
    ),
    "muon, zero 2": f"{_EIGHT} --num-layers 2 --zero 2 opt_type=muon",
    "skip on spikes": f"{_EIGHT} --num-layers 2 skip_step_on_spikes=true",
    "gemma3": UNLIKE["gemma3"].replace(_FOUR, _EIGHT),
    "mistral, fsdp x tp": "--cpus 8 --fsdp 2 --tp 2 --pp 2 --num-layers 2 decoder_block=mistral",
    "llama4": UNLIKE["llama4"].replace(_FOUR, _EIGHT),
    "explicit axes, fsdp x tp": "--cpus 8 --fsdp 2 --tp 2 --pp 2 --num-layers 2 shard_mode=explicit",
}
"""What users combine: a few steps of each agree with published MaxText to `CLOSE`."""

_CUSTOM = "moe_expert_input_dim=24 attention_output_dim=24"
NEWEST = (
    f"{_FOUR} --interleave 2 --num-layers 4 --model-name qwen3.5-35b-a3b {_NARROW} {_AS_WIDE} {_GDN} "
    "partial_rotary_factor=1.0 mrope_section=[2,1,1]",
    f"{_FOUR} --schedule zb-h1 --num-layers 4 --model-name envy-test {_NARROW} {_AS_WIDE}",
    f"{_FOUR} --num-layers 2 --model-name qwen3-custom-30b-a3b {_NARROW} {_AS_WIDE} {_CUSTOM}",
    f"{_FOUR} --num-layers 4 --scan-layers --model-name qwen3-custom-30b-a3b {_NARROW} {_AS_WIDE} {_CUSTOM}",
)
"""Blocks that few models have: layers that alternate (unrolled), and experts of other widths than the model."""

SECTIONS = {
    "schedules-llama": _schedules(_LLAMA),
    "schedules-gpt3": _schedules(_GPT3),
    "schedules-mixtral": _schedules(_DENSE),
    "devices": [
        f"--cpus 8 {grid} --num-layers {layers} {model}"
        for grid, layers, models in (
            ("--dp 2 --tp 2 --pp 2", 2, (_LLAMA, _GPT3, _SPARSE)),
            ("--fsdp 4 --pp 2", "4 --scan-layers", (_LLAMA, _DENSE)),
            ("--dp 2 --fsdp 2 --pp 2", 2, (_GPT3,)),
            ("--fsdp 2 --tp 2 --pp 2 --sequence-parallel", 2, (_LLAMA, _GPT3)),
            ("--tp 4 --pp 2 --sequence-parallel", "4 --scan-layers", (_LLAMA,)),
            ("--ep 4 --pp 2", 2, (_DENSE,)),
            ("--ep 2 --tp 2 --pp 2", "4 --interleave 2", (_DENSE,)),
            ("--ep 2 --fsdp 2 --pp 2", "4 --scan-layers", (_DENSE,)),
            ("--dp 2 --pp 4", "8 --interleave 2", (_LLAMA,)),
            ("--tp 2 --pp 4 --sequence-parallel", "8 --interleave 2 --scan-layers", (_GPT3,)),
            ("--ep 2 --pp 4", "8 --interleave 2 --scan-layers", (_DENSE,)),
        )
        for model in models
    ],
    "remat": _remat(),
    "training": _cross(
        _FOUR,
        "--num-layers 2 opt_type=adam_pax",
        "--num-layers 2 opt_type=sgd logits_via_embedding=true",
        "--num-layers 2 opt_type=muon",
        "--num-layers 4 --scan-layers opt_type=muon logits_via_embedding=true",
        "--num-layers 2 skip_step_on_spikes=true",
        "--num-layers 2 gradient_clipping_threshold=0",
        f"--num-layers 2 logits_via_embedding=true {_GPT3}",
        "--model-name gpt3-52k --num-layers 2",
        "--num-layers 2 dropout_rate=0.1",
        f"--num-layers 4 --interleave 2 dropout_rate=0.1 {_GPT3}",
        "--num-layers 4 --scan-layers dropout_rate=0.1 logits_via_embedding=true",
        f"--num-layers 2 load_balance_loss_weight=0.01 {_DENSE}",
        f"--num-layers 4 --scan-layers dropout_rate=0.1 {_SPARSE}",
        "--num-layers 2 --microbatch-size 4",
        "--num-layers 2 dtype=bfloat16",
        f"--num-layers 4 --scan-layers --remat full dtype=bfloat16 {_GPT3}",
        f"--num-layers 2 dtype=bfloat16 {_DENSE}",
    ),
    "blocks": [
        f"{_FOUR} {layers} decoder_block={block}"
        for block in ("default", "mistral", "gemma", "gemma2", "qwen2", "qwen3")
        for layers in ("--num-layers 2", "--num-layers 4 --scan-layers")
    ]
    + [f"{_FOUR} --num-layers 2 num_experts_per_tok=2 {_SPARSE.replace('mixtral', 'qwen3_moe')}"],
    "unlike": [*UNLIKE.values()],
    "newest": list(NEWEST),
    "inside": _cross(
        "--cpus 4",
        "--cp 2 --pp 2 --num-layers 2",
        f"--cp 2 --pp 2 --num-layers 4 --scan-layers context_parallel_load_balance=false {_GPT3}",
        f"--cp 2 --pp 2 --num-layers 2 {_DENSE}",
        "--fsdp 2 --pp 2 --interleave 2 --schedule looped-bfs --gather-once --num-layers 4",
        "--fsdp 2 --pp 2 --gather-once --num-layers 4 --scan-layers",
    ),
    "zero": _cross(
        _FOUR,
        "--num-layers 2 --zero 1",
        "--num-layers 2 --zero 2",
        "--num-layers 4 --scan-layers --zero 2 logits_via_embedding=true",
        f"--num-layers 4 --interleave 2 --zero 2 {_GPT3}",
        "--num-layers 2 --schedule zb-h1 --zero 2 gradient_clipping_threshold=0",
        "--num-layers 2 --zero 2 opt_type=adam_pax",
        "--num-layers 2 --zero 2 opt_type=muon",
        "--num-layers 2 --zero 2 --remat full dtype=bfloat16",
        f"--num-layers 2 --zero 2 {_DENSE}",
    ),
    "contexts": _cross(
        "--cpus 8",
        "--cp 2 --tp 2 --pp 2 --num-layers 2",
        "--cp 2 --tp 2 --sequence-parallel --pp 2 --schedule zb-h1 --num-layers 4 --scan-layers",
        "--cp 2 --fsdp 2 --pp 2 --interleave 2 --num-layers 4 decoder_block=qwen3",
        "--cp 4 --pp 2 --num-layers 2 decoder_block=gemma2",
        UNLIKE["deepseek"].replace("--cpus 4 --pp 4", "--cp 2 --ep 2 --pp 2"),
    ),
    "experts": _cross(
        "--cpus 4 --ep 2 --pp 2",
        f"--num-layers 2 {_RING}",
        f"--num-layers 4 --scan-layers num_experts_per_tok=2 {_RING.replace('mixtral', 'qwen3_moe')}",
    ),
    "experts-devices": _cross(
        "--cpus 8",
        f"--ep 2 --tp 2 --pp 2 --schedule zb-h1 --num-layers 2 --microbatch-size 2 {_RING}",
        UNLIKE["deepseek"].replace("--cpus 4 --pp 4", "--ep 2 --fsdp 2 --pp 2").replace(_DROPPING, _DROPLESS),
    ),
    "typed": [
        f"--cpus 8 {case} shard_mode=explicit"
        for case in (
            "--dp 2 --tp 2 --pp 2 --num-layers 2",
            "--fsdp 4 --pp 2 --interleave 2 --num-layers 8 --scan-layers",
            "--dp 4 --pp 2 --schedule zb-h1 --num-layers 4 decoder_block=qwen3",
        )
    ],
    "quantization": [
        f"--cpus 2 --pp 2 --num-layers 2 quantization={kind}"
        for kind in ("int8", *(f"{kind} use_qwix_quantization=true" for kind in check_flags.QWIX))
    ],
    "quantization-devices": _cross(
        "--cpus 4",
        "--dp 2 --pp 2 --num-layers 4 --scan-layers quantization=int8",
        "--dp 2 --pp 2 --num-layers 2 quantization=int8 use_qwix_quantization=true opt_type=sgd",
        "--fsdp 2 --pp 2 --num-layers 4 --scan-layers quantization=int8 use_qwix_quantization=true opt_type=sgd",
        f"--fsdp 2 --pp 2 --num-layers 4 --interleave 2 {_GPT3} quantization=fp8_full use_qwix_quantization=true",
    ),
}
"""What is compared: flags beside `parity.SMALL`, by section of the file."""


def train(section: str, folder: Path) -> dict[str, Result]:
    """Train all cases of a section, in float32 unless a case says otherwise."""
    steps = 8 if section.startswith(("quantization", "experts")) else 20  # Pallas interprets the experts' kernel
    flags = [case if "dtype=" in case else f"{case} dtype=float32" for case in SECTIONS[section]]
    return compare({" ".join(case.split()): case for case in flags}, folder, steps=steps)


def agrees(case: str, result: Result) -> bool:
    """Whether a pipeline trained as one program does.

    Routing is discontinuous: of a mixture of experts only losses and gradient norms must agree. So is quantization.
    """
    if result.error:
        return False
    if "quantization=" in case:
        return result.gap(METRICS[0]) <= ROUNDED and max(map(result.gap, METRICS[1:3])) <= QUANTIZED
    tolerance = ROUNDED if "bfloat16" in case else TOLERANCE
    gaps = [result.gap(key) for key in METRICS[:3]]
    if "num_experts" not in case and "bfloat16" not in case:
        gaps += [result.gap(METRICS[3]), result.parameter_gap]
    return max(gaps) <= tolerance


def table(section: str, results: dict[str, Result], *, origin: str) -> list[list[str]]:
    """Return the rows of a section; ``origin`` says of what and when."""
    rows = []
    for case, result in results.items():
        cells = [result.error, "", "", ""]
        if not result.error:
            gaps = [result.gap(METRICS[0]), max(map(result.gap, METRICS[1:3])), result.gap(METRICS[3])]
            cells = [*(f"{gap:.0e}" for gap in gaps), f"{result.parameter_gap:.0e}"]
        rows.append([section, case.removesuffix(" dtype=float32"), *cells, origin])
    return rows


def _git(folder: str, *arguments: str) -> str:
    line = ["git", "-C", str(ROOT / folder), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def main(sections: list[str]) -> None:
    """Train and renew the file, section by section."""
    base, head = (
        _git("third_party/maxtext", "log", "-1", "--format=%s", BASE),
        _git(".", "rev-parse", "--short", "HEAD"),
    )
    for section in sections or SECTIONS:
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            results = train(section, Path(folder))
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        rows = table(section, results, origin=f"{base} and jax {version('jax')}, {day}, commit {head}")
        with FILE.open(newline="", encoding="utf-8") as file:
            others = [line for line in csv.reader(file) if line[0] != section]
        with FILE.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([*others, *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
