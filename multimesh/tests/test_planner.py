"""Forecasts of steps from a model's sizes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import statistics
from pathlib import Path

import loso
import pytest
import rows
from multimesh.errors import UsageError
from multimesh.hardware import kernels
from multimesh.hardware.devices import device
from multimesh.hardware.software import stack
from multimesh.planner import activations, bands, calibration, loop, models, products, recomputation
from multimesh.planner.configuration import SAVED, Configuration
from multimesh.planner.products import Times
from multimesh.planner.step import forecast
from multimesh.planner.transformer import Transformer
from multimesh.schedules.costs import StageCosts
from multimesh.schedules.simulate import simulate

from multimesh import schedules

LLAMA = Transformer("llama3-8b", 32, 4096, 14336, 32, 8, 128256)


def how(**fields: object) -> Configuration:
    return Configuration(batch=64, sequence=8192, tp=4, pp=2, sharded="optimizer").changed(**fields)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("microbatches", [4, 7, 12, 40])
def test_a_loop_takes_as_long_as_the_simulator_says(name: str, microbatches: int):
    chunks, p = schedules.get(name).usual, 4
    try:
        table = schedules.get(name).table(p, chunks, microbatches, True)
    except UsageError:
        pytest.skip(f"{name} has no table of {microbatches} microbatches")
    stages = [Times(1 + 0.1 * s, 1.5 - 0.05 * s, 0.7 + 0.02 * s) for s in range(p * chunks)]
    times = tuple((s.forward, s.backward, s.weights) for s in stages)
    expected = simulate(table, StageCosts(times, (0.25,) * (len(stages) - 1))).makespan
    assert loop.seconds(name, p, microbatches, stages, 0.25) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_a_loop_of_unequal_stages_is_never_shorter_than_its_table(name: str, seed: int):
    draw = random.Random(seed)
    p, chunks, microbatches = draw.choice((2, 4, 6)), schedules.get(name).usual, draw.choice((33, 48, 61))
    stages = [Times(*(draw.uniform(0.5, 1.5) for _ in range(3))) for _ in range(p * chunks)]
    stages[draw.randrange(len(stages))] *= 2.5
    times = tuple((s.forward, s.backward, s.weights) for s in stages)
    table = schedules.get(name).table(p, chunks, microbatches, True)
    whole = simulate(table, StageCosts(times, (0.25,) * (len(stages) - 1))).makespan
    found = loop.seconds(name, p, microbatches, stages, 0.25)
    busiest = microbatches * max(loop.row_seconds(schedules.get(name).placement(p), stages))
    assert found >= busiest * (1 - 1e-9)
    assert loop.least_seconds(name, p, microbatches, stages, 0.25) <= whole * (1 + 1e-9)
    assert whole * (1 - 1e-9) <= found <= 1.03 * whole


def test_no_bubble_is_negative():
    uneven = (1, 1, 1, 20, 1, 1, 1, 6)
    for name in ("eager-1f1b", "1f1b", "zb-h1"):
        step = forecast(LLAMA, how(tp=1, pp=8, batch=128, layers=uneven, schedule=name), "h100")
        assert 0 <= step.bubble < 1


def test_more_of_a_resource_is_never_slower():
    fast = device("h100")
    base = forecast(LLAMA, how(), "h100").seconds
    for name in ("bandwidth", "bf16", "link", "network"):
        better = dataclasses.replace(fast, **{name: 2 * getattr(fast, name)})
        assert forecast(LLAMA, how(), better).seconds <= base


def test_parameters_are_those_of_the_model():
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=0.01)


def test_operations_of_a_layer_are_six_for_each_parameter_and_token():
    for full, each in ((False, 6), (True, 8)):
        step = how(microbatch=2, batch=32, tp=2, recompute="full" if full else "minimal")
        expected = each * LLAMA.dense_layer_parameters * step.tokens / 2
        assert products.operations(LLAMA, step) == pytest.approx(expected)


def test_policies_compute_again_what_xla_does():
    """XLA counts 1.365 and 1.22 times as much, in layers as wide as those of Llama 3 70B (docs/forecasts.md)."""
    wide = models.model("llama3-70b")
    for fields, times in (
        ({"recompute": "save_dot_except_mlp", "pp": 4, "interleave": 2, "schedule": "zb-v"}, 1.365),  # for B and for W
        ({"recompute": "save_out_proj", "pp": 2, "schedule": "eager-1f1b"}, 1.22),
    ):
        minimal = products.operations(wide, how(**fields | {"recompute": "minimal"}))
        assert products.operations(wide, how(**fields)) == pytest.approx(times * minimal, rel=0.01)


def test_shares_add_up_to_the_step():
    for pp, recompute in itertools.product((1, 2), ("none", "full")):
        step = forecast(LLAMA, how(pp=pp, recompute=recompute), "h100")
        assert sum(seconds for _, seconds in step.shares) == pytest.approx(step.seconds)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="whole microbatches of 3"):
        how(microbatch=3)
    with pytest.raises(UsageError, match="there is no 'h101'; known are cpu, a100"):
        forecast(LLAMA, how(), "h101")
    with pytest.raises(UsageError, match="device a100 computes no fp8"):
        forecast(LLAMA, how(precision="fp8"), "a100")


def test_a_band_is_what_nearest_runs_of_unseen_sources_were_off():
    usual = forecast(LLAMA, how(), "h100")
    assert 0.05 < bands.band(usual) < 0.25
    assert re.fullmatch(r"\w+-\d+, forecast \d+ % too (fast|slow)", str(bands.nearest(usual)))
    experts = forecast(models.model("qwen3-235b-a22b"), how(tp=1, dp=4, ep=4), "mi300x")
    assert bands.band(experts) > 1.5 * bands.band(usual)
    assert any("no published run is like this one" in text for text in bands.warnings(experts))
    assert not list(bands.warnings(usual))


@pytest.mark.parametrize("run", ["dgxc-017-moe", "mb-097"])
def test_a_forecast_near_a_run_that_took_longer_says_so(run):
    """Suggestions for grok-1 are faster than the best published runs, by more than 15 %."""
    (known,) = [each for each in rows.read(*rows.FILES)[0] if each.id == run]
    step = forecast(known.model, known.how, known.device, known.stack)
    (text,) = [text for text in bands.warnings(step) if "took" in text]
    assert re.fullmatch(
        r"the nearest measured run, [\w-]+, took \d+ % longer than its forecast, and this may too", text
    )


@pytest.mark.longer
def test_bands_hold_for_sources_that_no_constant_was_fitted_to():
    runs = bands.load_runs()
    distances = loso.Distances(runs)
    assert loso.choose(runs, distances) == bands.RULE
    _, widths = loso.inside(runs, distances)
    held: dict[str, list[bool]] = {}
    for run in runs:
        held.setdefault(run.source, []).append(abs(math.expm1(run.error)) <= widths[run.id])
    assert {source for source, inside in held.items() if statistics.mean(inside) < 0.85} <= {"nanotron"}
    known = [run for run in runs if run.kinds[0] == "0" and run.kinds[1] in ("ampere", "hopper")]
    error = statistics.median(abs(math.expm1(run.error)) for run in known)
    assert statistics.median(widths[run.id] for run in known) <= 2.6 * error


def test_an_optimizer_that_is_sharded_within_a_node_has_more_bytes_and_shorter_rings():
    alone = how(tp=1, pp=1, dp=64)
    near = alone.changed(within=8)
    whole, parts = (forecast(LLAMA, each, "a100", "pytorch") for each in (alone, near))
    held = [step.memory[0].optimizer for step in (whole, parts)]
    assert held[1] == pytest.approx(8 * held[0])
    assert parts.seconds < whole.seconds  # broadcasts to 8 in place of 64
    assert kernels.pass_on(device("a100"), 8) == pytest.approx(7 * 3.4e-6)
    assert kernels.pass_on(device("a100"), 16) == pytest.approx(13 * 3.4e-6 + 2 * 14e-6)
    with pytest.raises(UsageError, match="within 5 does not divide the 64 replicas"):
        alone.changed(within=5)


def test_a_measured_run_moves_the_forecast():
    software = stack("modern")
    seconds = 1.2 * forecast(LLAMA, how(), "h100").seconds
    found = calibration.fit(LLAMA, how(), device("h100"), software, seconds, calibration.Calibration())
    assert found.run is not None
    assert found.after == pytest.approx(1, abs=0.02)
    other = forecast(LLAMA, how(tp=2), found.device(device("h100")), found.stack(software))
    assert other.seconds > 1.1 * forecast(LLAMA, how(tp=2), "h100").seconds


def test_a_run_narrows_the_bands_of_what_is_like_it_and_widens_others():
    like, unlike = (forecast(LLAMA, how(**change), "b200") for change in ({}, {"batch": 8, "sequence": 65536}))
    run = bands.describe(like, "yours")
    assert bands.after_run(like, run) < bands.band(like)
    assert bands.after_run(unlike, run) >= bands.band(unlike)


def test_models_have_the_parameters_that_they_are_known_for():
    for name, total, active in (
        ("deepseek-v3", 671e9, 37e9),
        ("kimi-k2", 1026e9, 32e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("gpt-oss-120b", 117e9, 5.1e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("llama3.1-405b", 405.8e9, 403.7e9),
    ):
        model = models.model(name)
        assert model.parameters == pytest.approx(total, rel=0.01), name
        assert model.active_parameters == pytest.approx(active, rel=0.03), name


def test_a_configuration_of_hugging_face_is_a_model(tmp_path: Path):
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = models.model(str(tmp_path))
    assert dataclasses.replace(found, name="deepseek-v3") == models.model("deepseek-v3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "states no num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number, got 'wide'"),
        ({"model_type": "mamba2", "hidden_size": 64}, "layers that are no attention"),
        ([1], "no JSON object of sizes"),
    ],
)
def test_a_configuration_that_is_no_transformer_is_refused(config: object, message: str):
    with pytest.raises(UsageError, match=message):
        models.of_config(config)


def test_experts_cost_what_they_add():
    small = models.model("qwen3-30b-a3b")
    base = how(tp=1, pp=1, dp=8, batch=64, sequence=4096)
    alone = forecast(small, base, "h100", "megatron-2025")
    spread = forecast(small, base.changed(ep=8), "h100", "megatron-2025")
    assert dict(spread.shares)["expert parallelism"] > 0
    assert spread.bytes < 0.5 * alone.bytes
    uneven = forecast(small, base.changed(ep=8, microbatch=8, load=1.5), "h100", "megatron-2025")
    assert uneven.seconds > 1.1 * forecast(small, base.changed(ep=8, microbatch=8), "h100", "megatron-2025").seconds
    shared = dataclasses.replace(small, shared_ffn=4096)
    assert forecast(shared, base, "h100").bytes > forecast(small, base, "h100").bytes
    with pytest.raises(UsageError, match="ep 16 x etp 1 does not divide the 8 devices"):
        base.changed(ep=16)


def test_local_attention_takes_less_than_whole():
    whole, long = models.model("llama3-8b"), how(sequence=65536, batch=8, dp=1)
    local = dataclasses.replace(whole, window=1024, windowed=0.75)
    assert forecast(local, long, "h100").seconds < 0.7 * forecast(whole, long, "h100").seconds
    assert local.operations(65536) < whole.operations(65536)


def test_what_is_kept_shrinks_with_recomputation_and_offload():
    policies = ("none", "minimal", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "full")
    steps = [forecast(LLAMA, how(recompute=name), "h100") for name in policies]
    kept = [step.memory[0].activations for step in steps]
    assert kept == sorted(kept, reverse=True)
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    half = forecast(LLAMA, how(recompute="full", recomputed=0.5), "h100").memory[0].activations
    assert kept[-1] < half < kept[0]
    offloaded = forecast(LLAMA, how(offload=True), "h100")
    assert offloaded.memory[0].activations == 0
    assert offloaded.seconds >= forecast(LLAMA, how(), "h100").seconds
    fp8 = forecast(LLAMA, how(precision="fp8"), "h100").memory[0].activations
    assert fp8 == kept[0]  # two copies of a byte, by rows and by columns


def test_every_second_product_again_keeps_less_and_takes_longer_than_none():
    steps = [forecast(LLAMA, how(recompute=name), "h100") for name in ("full", "alternate", "none")]
    kept = [step.memory[0].activations for step in steps]
    assert kept == sorted(kept)
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True)


def test_fully_sharded_parameters_are_sharded_over_context_parallelism_too():
    plain = Configuration(batch=8, sequence=32768, fsdp=8, sharded="parameters")
    ring = Configuration(batch=8, sequence=32768, cp=8, sharded="parameters")
    held = [forecast(LLAMA, each, "h100", "pytorch").memory[0] for each in (plain, ring)]
    assert held[0].parameters == held[1].parameters == pytest.approx(LLAMA.parameters / 8 * 2)
    assert held[0].optimizer == held[1].optimizer


def test_eager_software_keeps_more_and_what_tensor_parallelism_gathered():
    of = [activations.residual_bytes(LLAMA, how(tp=size), stack("eager")) for size in (1, 4)]
    fused = [activations.residual_bytes(LLAMA, how(tp=size), stack("pytorch")) for size in (1, 4)]
    assert of[0] > fused[0]
    assert of[1] > of[0] / 4 > fused[1]


def test_what_a_policy_keeps_does_not_run_again():
    """The last product of a dense MLP is read by nothing, so it runs again with no policy."""
    none, *others = (
        forecast(LLAMA, how(recompute="full", saved=names), "tpu-v5p")
        for names in ((), ("input",), ("input", "mlpwo"), ("input", "query", "context"), SAVED)
    )
    assert [step.seconds for step in others] == sorted((step.seconds for step in others), reverse=True)
    assert none.seconds > others[0].seconds == others[1].seconds > others[2].seconds
    again = recomputation.count_again(LLAMA, how(recompute="full", saved=SAVED))
    assert {name for name, share in again.items() if share} == {"memory"}
    kept = [step.memory[0].activations for step in (none, *others)]
    assert kept == sorted(kept)
    assert kept[0] == kept[1]
    with pytest.raises(UsageError, match="saved must be some of input, query"):
        how(saved=("everything",))
