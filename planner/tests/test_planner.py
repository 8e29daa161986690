"""Forecasts of steps from a model's sizes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
from multimesh.errors import UsageError
from multimesh.schedules.costs import StageCosts
from multimesh.schedules.simulate import simulate
from multimesh_planner import bands, calibration, footprint, layer_seconds, models
from multimesh_planner.configuration import SAVED, Configuration
from multimesh_planner.hardware.devices import device
from multimesh_planner.hardware.software import software
from multimesh_planner.layer_seconds import Times
from multimesh_planner.step import least_seconds, loop_seconds, row_seconds, step_time
from multimesh_planner.transformer import Transformer

from multimesh import schedules

LLAMA = Transformer("llama3-8b", 32, 4096, 14336, 32, 8, 128256)


def configure(**fields: object) -> Configuration:
    return Configuration(batch=64, sequence=8192, tp=4, pp=2, sharded="optimizer").replace(**fields)


def operations(model: Transformer, how: Configuration) -> float:
    """Return the operations of the matrix products of a layer on a device, forward and backward."""
    again = footprint.count_again(model, how)
    return sum(
        2.0 * count * m * k * n * (3 + how.recomputed * again.get(kind, 0.0))
        for kind, (count, m, k, n) in layer_seconds.list_shapes(model, how)
    )


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
    assert loop_seconds(name, p, microbatches, stages, 0.25) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_a_loop_of_unequal_stages_is_never_shorter_than_its_table(name: str, seed: int):
    draw = random.Random(seed)
    p, chunks, microbatches = draw.choice((2, 4, 6)), schedules.get(name).usual, draw.choice((33, 48, 61))
    stages = [Times(*(draw.uniform(0.5, 1.5) for _ in range(3))) for _ in range(p * chunks)]
    stages[draw.randrange(len(stages))] *= 2.5
    times = tuple((s.forward, s.backward, s.weights) for s in stages)
    table = schedules.get(name).table(p, chunks, microbatches, True)
    table_seconds = simulate(table, StageCosts(times, (0.25,) * (len(stages) - 1))).makespan
    seconds = loop_seconds(name, p, microbatches, stages, 0.25)
    busiest = microbatches * max(row_seconds(schedules.get(name).placement(p), stages))
    assert seconds >= busiest * (1 - 1e-9)
    assert least_seconds(name, p, microbatches, stages, 0.25) <= table_seconds * (1 + 1e-9)
    assert table_seconds * (1 - 1e-9) <= seconds <= 1.03 * table_seconds


def test_operations_of_a_layer_are_six_for_each_parameter_and_token():
    for full, operations_each in ((False, 6), (True, 8)):
        step = configure(microbatch=2, batch=32, tp=2, recompute="full" if full else "minimal")
        expected = operations_each * LLAMA.layer_parameters[0] * step.tokens / 2
        assert operations(LLAMA, step) == pytest.approx(expected)


def test_policies_compute_again_what_xla_does():
    """XLA counts 1.365 and 1.22 times as much, in layers as wide as those of Llama 3 70B (planner/README.md)."""
    wide = models.model("llama3-70b")
    for fields, times in (
        ({"recompute": "save_dot_except_mlp", "pp": 4, "interleave": 2, "schedule": "zb-v"}, 1.365),  # for B and for W
        ({"recompute": "save_out_proj", "pp": 2, "schedule": "eager-1f1b"}, 1.22),
    ):
        minimal = operations(wide, configure(**fields | {"recompute": "minimal"}))
        assert operations(wide, configure(**fields)) == pytest.approx(times * minimal, rel=0.01)


def test_shares_add_up_to_the_step():
    for pp, recompute in itertools.product((1, 2), ("none", "full")):
        step = step_time(LLAMA, configure(pp=pp, recompute=recompute), "h100")
        assert sum(seconds for _, seconds in step.shares) == pytest.approx(step.seconds)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="whole microbatches of 3"):
        configure(microbatch=3)
    with pytest.raises(UsageError, match="there is no 'h101'; known are a100"):
        step_time(LLAMA, configure(), "h101")
    with pytest.raises(UsageError, match="software: there is no 'nemo'; choose one of nvidia, maxtext, pytorch"):
        step_time(LLAMA, configure(), "h100", "nemo")
    with pytest.raises(UsageError, match="device a100 computes no fp8"):
        step_time(LLAMA, configure(precision="fp8"), "a100")


def test_models_have_the_parameters_that_they_are_known_for():
    for name, total, active in (
        ("deepseek-v3", 671e9, 37e9),
        ("kimi-k2", 1026e9, 32e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("gpt-oss-120b", 117e9, 5.1e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("llama3.1-405b", 405.8e9, 403.7e9),
        ("llama3-8b", 8.03e9, 7.5e9),
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
    model = models.model(str(tmp_path))
    assert dataclasses.replace(model, name="deepseek-v3") == models.model("deepseek-v3")


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
    base = configure(tp=1, pp=1, dp=8, batch=64, sequence=4096)
    one_device = step_time(small, base, "h100", "nvidia")
    spread = step_time(small, base.replace(ep=8), "h100", "nvidia")
    assert dict(spread.shares)["expert parallelism"] > 0
    assert spread.bytes < 0.5 * one_device.bytes
    uneven = step_time(small, base.replace(ep=8, microbatch=8, load=1.5), "h100", "nvidia")
    assert uneven.seconds > 1.1 * step_time(small, base.replace(ep=8, microbatch=8), "h100", "nvidia").seconds
    shared = dataclasses.replace(small, shared_ffn=4096)
    assert step_time(shared, base, "h100").bytes > step_time(small, base, "h100").bytes
    with pytest.raises(UsageError, match="ep 16 x etp 1 does not divide the 8 devices"):
        base.replace(ep=16)


def test_local_attention_takes_less_than_whole():
    model, long = models.model("llama3-8b"), configure(sequence=65536, batch=8, dp=1)
    local = dataclasses.replace(model, window=1024, windowed=0.75)
    assert step_time(local, long, "h100").seconds < 0.7 * step_time(model, long, "h100").seconds
    assert local.operations(65536) < model.operations(65536)


def test_what_is_kept_shrinks_with_recomputation_and_offload():
    policies = ("none", "minimal", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "full")
    for chain in (("none", "alternate", "full"), policies):
        steps = [step_time(LLAMA, configure(recompute=name), "h100") for name in chain]
        activations = [step.memory[0].activations for step in steps]
        assert activations == sorted(activations, reverse=True)
        assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    half = step_time(LLAMA, configure(recompute="full", recomputed=0.5), "h100").memory[0].activations
    assert activations[-1] < half < activations[0]
    offloaded = step_time(LLAMA, configure(offload=True), "h100")
    assert offloaded.memory[0].activations == 0
    assert offloaded.seconds >= step_time(LLAMA, configure(), "h100").seconds
    one, two = (
        step_time(LLAMA, configure(precision="fp8"), "h100", of).memory[0].activations for of in ("nvidia", "maxtext")
    )
    assert 0.6 * activations[0] < one < two == activations[0]  # copies of a byte: that by columns alone, and both


def test_fully_sharded_parameters_are_sharded_over_context_parallelism_too():
    sharded = Configuration(batch=8, sequence=32768, fsdp=8, sharded="parameters")
    ring = Configuration(batch=8, sequence=32768, cp=8, sharded="parameters")
    memories = [step_time(LLAMA, how, "h100", "pytorch").memory[0] for how in (sharded, ring)]
    assert memories[0].parameters == memories[1].parameters == pytest.approx(LLAMA.parameters / 8 * 2)
    assert memories[0].optimizer == memories[1].optimizer


def test_what_a_policy_keeps_does_not_run_again():
    """The last product of a dense MLP is read by nothing, so it runs again with no policy."""
    none, *others = (
        step_time(LLAMA, configure(recompute="full", saved=names), "tpu-v5p")
        for names in ((), ("input",), ("input", "mlpwo"), ("input", "query", "context"), SAVED)
    )
    assert [step.seconds for step in others] == sorted((step.seconds for step in others), reverse=True)
    assert none.seconds > others[0].seconds == others[1].seconds > others[2].seconds
    again = footprint.count_again(LLAMA, configure(recompute="full", saved=SAVED))
    assert {name for name, share in again.items() if share} == {"memory"}
    activations = [step.memory[0].activations for step in (none, *others)]
    assert activations == sorted(activations)
    assert activations[0] == activations[1]
    with pytest.raises(UsageError, match="saved must be some of input, query"):
        configure(saved=("everything",))


def test_a_band_is_that_of_the_class_of_software_generation_and_kind():
    default = step_time(LLAMA, configure(), "h100")
    assert bands.classify(default) == ("nvidia", "hopper", "dense")
    assert bands.classify(step_time(LLAMA, configure(), "a100", "pytorch-eager")) == ("pytorch", "ampere", "dense")
    assert 0.1 < bands.band(default) < 0.25
    experts = step_time(models.model("qwen3-235b-a22b"), configure(tp=1, dp=4, ep=4), "h100")
    assert bands.band(experts) > 1.5 * bands.band(default)
    assert bands.band(step_time(LLAMA, configure(), "h100", "pytorch")) >= bands.band(default)


def test_a_forecast_that_is_faster_than_every_published_run_says_so():
    """Qwen3-235B on 256 H100 took 25.5 s; the last release promised 17.0 s without a word."""
    qwen = models.model("qwen3-235b-a22b")
    base = Configuration(batch=8192, sequence=4096, dp=32, pp=8, ep=32, precision="fp8", sharded="optimizer")
    (text,) = bands.warnings(step_time(qwen, base.replace(precision="bf16"), "h100"))
    assert "no run of a model with 32 to 512 experts on h100 in bf16 was published" in text
    step = step_time(qwen, base, "gb200")
    fast = dataclasses.replace(step, seconds=step.seconds * step.utilization / 0.6)
    (text,) = bands.warnings(fast)
    assert "faster than every published run of" in text
    assert "at its MFU this step takes" in text
    slow = dataclasses.replace(step, seconds=10 * step.seconds)
    assert not list(bands.warnings(slow))
    axes = {"dp": 32, "fsdp": 8, "ep": 8, "pp": 4, "interleave": 8, "schedule": "interleaved-zb", "recompute": "full"}
    grok = Configuration(2048, 8192, precision="fp8", sharded="optimizer", **axes)
    (text,) = bands.warnings(step_time(models.model("grok-1"), grok, "h100"))  # one on 512 had a better utilization
    assert "dgxc-017-moe (batch 2048 x 8192 on 1024, 17.01 s)" in text


def test_a_measured_run_moves_the_forecast_and_narrows_the_band_of_what_is_like_it_alone():
    of, on = software("nvidia"), device("h100")
    base, other = step_time(LLAMA, configure(), on, of), step_time(LLAMA, configure(tp=2), on, of)
    fit = calibration.fit(LLAMA, configure(), on, of, 1.2 * base.seconds)
    assert fit.after == pytest.approx(1, abs=0.02)
    assert step_time(LLAMA, configure(tp=2), fit.device, fit.software).seconds > 1.1 * other.seconds
    assert bands.band(other, fit.run) < bands.band(other)
    for case in (configure(batch=8, sequence=65536), configure(tp=1, pp=1, fsdp=8), configure(recompute="full")):
        step = step_time(LLAMA, case, on, of)
        assert bands.band(step, fit.run) == bands.band(step)


def test_an_optimizer_has_its_moments_and_the_host_takes_them_at_its_link():
    sizes = {
        name: step_time(LLAMA, configure(optimizer=name, moments=kind), "h100").memory[0].optimizer
        for name, kind in (("adamw", "float32"), ("muon", "float32"), ("adafactor", "float32"), ("sgd", "bfloat16"))
    }
    copy = sizes["adafactor"]  # in float32
    assert sizes["adamw"] == pytest.approx(3 * copy)
    assert sizes["muon"] == pytest.approx(2 * copy)
    assert sizes["sgd"] == pytest.approx(1.5 * copy)
    on_device, on_host = (step_time(LLAMA, configure(dp=1, offload_optimizer=away), "h100") for away in (False, True))
    assert on_host.memory[0].optimizer == 0
    state = on_device.memory[0].optimizer
    assert on_host.optimizer >= 0.5 * state / device("h100").host
    assert on_host.seconds > on_device.seconds
    muon = step_time(LLAMA, configure(optimizer="muon", moments="bfloat16"), "h100")
    assert muon.optimizer > step_time(LLAMA, configure(optimizer="sgd", moments="bfloat16"), "h100").optimizer
    with pytest.raises(UsageError, match="optimizer must be one of adamw"):
        configure(optimizer="lion")


def test_a_job_of_535_billion_parameters_on_192_h100_is_forecast_within_its_band():
    """Measured: 174.4 s a step of 65,536 tokens, by marin-community/marin issue 9277."""
    hero = Transformer("hero", 48, 6144, 1536, 48, 8, 128256, head=128, experts=384, active=8)
    assert hero.parameters == pytest.approx(535e9, rel=0.02)
    job = Configuration(
        **{"batch": 384, "sequence": 65536, "dp": 8, "ep": 8, "etp": 1, "pp": 24, "recompute": "full"},
        **{"optimizer": "muon", "moments": "bfloat16", "offload": True, "offload_optimizer": True},
        sharded="optimizer",
    )
    step = step_time(hero, job, "h100", "maxtext")
    assert step.bytes < device("h100").memory
    assert (1 - bands.band(step)) * step.seconds <= 174.4 <= (1 + bands.band(step)) * step.seconds


def test_experts_share_the_matrices_of_an_expert_and_send_copies_of_tokens():
    grok = models.model("grok-1")
    cut = Configuration(batch=512, sequence=4096, dp=64, tp=4, ep=8, etp=4, sharded="optimizer")
    exchanges = [dict(step_time(grok, c, "h100").shares)["expert parallelism"] for c in (cut, cut.replace(etp=1))]
    assert exchanges[0] > 2 * exchanges[1]


def test_latent_attention_can_be_expanded_again():
    deepseek = models.model("deepseek-v3")
    base = Configuration(batch=512, sequence=4096, dp=64, ep=64, precision="fp8", sharded="optimizer")
    none, latent, full = (step_time(deepseek, base.replace(recompute=n), "gb200") for n in ("none", "latent", "full"))
    assert none.seconds < latent.seconds < 1.05 * none.seconds < full.seconds
    assert latent.memory[0].activations < none.memory[0].activations


def test_a_late_w_of_layers_computed_again_has_its_operands_in_memory():
    """The figures are those of `run.py --forecast`, in GiB, by the plan of this step."""
    base = configure(batch=32, tp=2, pp=4, sharded="none", sequence_parallel=False, recompute="full")
    for schedule, by_plan in (("1f1b", (21.1, 16.3, 16.1, 21.1)), ("zb-h1", (21.1, 27.0, 32.7, 46.9))):
        rows = footprint.peak_bytes(LLAMA, base.replace(schedule=schedule), software("maxtext"))
        assert [row.total / 2**30 for row in rows] == pytest.approx(by_plan, rel=0.1)
