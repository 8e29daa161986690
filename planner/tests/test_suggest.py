"""The search for configurations: against all of them, with what is fixed, in memory, and its table."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from typing import Any

import pytest
from multimesh.__main__ import main
from multimesh.errors import DoesNotFitError, UsageError
from multimesh_planner import footprint, models, space, suggest_command
from multimesh_planner.configuration import USUAL, Configuration
from multimesh_planner.hardware.devices import device
from multimesh_planner.hardware.software import software
from multimesh_planner.search import Search, suggest
from multimesh_planner.space import Training, divisors, list_schedules
from multimesh_planner.step import step_time
from multimesh_planner.suggestions import find_obstacle, write_command
from multimesh_planner.transformer import Transformer

from multimesh import schedules

SMALL = Transformer("small", 8, 4096, 14336, 32, 8, 32768)
LARGE = Transformer("large", 80, 8192, 28672, 64, 8, 128256)
FREE = dataclasses.replace(software("nvidia"), reserved=0.0)


def job(model: Transformer = SMALL, **fields: Any) -> Training:
    return Training(model, fields.pop("batch", 16), 4096, device("h100"), fixed=fields.pop("fixed", {}), **fields)


def every_configuration(devices: int, batch: int) -> list[Configuration]:
    """All configurations of the small model with equal stages, made without the search."""
    configurations = []
    for tp, pp, fsdp in itertools.product(divisors(devices), repeat=3):
        dp, over = divmod(devices, tp * pp * fsdp)
        if over or batch % (dp * fsdp) or tp > 8 or pp > SMALL.layers:
            continue
        for microbatch, v, recompute in itertools.product(divisors(batch // (dp * fsdp)), range(1, 13), USUAL):
            if SMALL.layers % (pp * v) or (pp == 1 and v > 1):
                continue
            names = ("1f1b",) if pp == 1 else list_schedules(v)
            for name in names:
                common: dict[str, Any] = {"microbatch": microbatch, "interleave": v, "recompute": recompute}
                axes = {"dp": dp, "fsdp": fsdp, "tp": tp, "pp": pp, "sequence_parallel": tp > 1, "schedule": name}
                sharded = "optimizer" if dp > 1 else "none"
                configurations.append(Configuration(batch, 4096, sharded=sharded, **common, **axes))
    return configurations


@pytest.mark.parametrize("limit", [pytest.param(12e9, marks=pytest.mark.longer), 16e9])
def test_the_search_finds_what_simulating_all_finds(limit: float):
    steps: list[float] = []
    for how in every_configuration(8, 16):
        if max(part.total for part in footprint.peak_bytes(SMALL, how, FREE)) <= limit:
            try:
                steps.append(step_time(SMALL, how, "h100", FREE).seconds)
            except UsageError:
                assert how.schedule in ("zb-h2", "zb-v", "interleaved-zb")  # has no table of so few microbatches
    advice = suggest(job(batch=16, limit=limit), 8)
    assert advice.fastest.seconds <= min(steps)
    if not advice.fastest.how.layers:
        assert advice.fastest.seconds == min(steps)
    of_equal = [option for option in advice.options if not option.how.layers]
    assert of_equal
    for option in of_equal:
        assert option.seconds == pytest.approx(step_time(SMALL, option.how, "h100", FREE).seconds)


def test_what_is_fixed_stays():
    fixed = {"tp": 2, "pp": 4, "schedule": "zb-h1", "microbatch": 2, "recompute": "full", "layers": (3, 2, 2, 1)}
    for option in suggest(job(fixed=fixed), 16).options:
        assert {name: getattr(option.how, name) for name in fixed} == fixed
        assert option.how.devices == 16


def test_nothing_is_over_the_memory_and_all_are_ranked():
    advice = suggest(job(limit=14e9), 8)
    assert all(option.bytes <= 14e9 for option in advice.options)
    assert [o.seconds for o in advice.options] == sorted(o.seconds for o in advice.options)
    ranked = [o.how for o in advice.options if o.how != advice.roomy]
    assert len({dataclasses.replace(how, recompute="none", schedule="1f1b", layers=()) for how in ranked}) == len(
        ranked
    )
    assert {advice.simplest, advice.roomy, advice.fastest.how} - {None} <= {option.how for option in advice.options}
    assert all(schedules.get(o.how.schedule).table(o.how.pp, o.how.interleave, 8, True) for o in advice.options)


def test_two_searches_find_the_same():
    assert suggest(job(), 8) == suggest(job(), 8)


def test_who_is_asked_last_may_refuse():
    assert all(option.how.pp == 1 for option in suggest(job(), 8, accepts=lambda how: how.pp == 1).options)


def test_tensor_parallelism_stays_in_a_node_unless_it_is_fixed():
    two_gpus = dataclasses.replace(job(), gpus=2)
    assert max(option.how.tp for option in suggest(two_gpus, 8).options) <= 2
    assert suggest(dataclasses.replace(two_gpus, fixed={"tp": 4}), 8).best.how.tp == 4


def test_the_nearest_needs_the_fewest_bytes_of_all():
    """Bounds of their bytes order configurations otherwise: hundreds are below that of the nearest."""
    search = Search(space.spread(Training(models.model("deepseek-v3"), 64, 8192, device("h100")), 32))
    nearest = search.nearest()
    assert nearest is not None
    assert nearest[1] == min(search.peak_bytes(candidate.how) for candidate in search.list_frugal())


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tp": 3}, "tp 3 does not divide attention heads"),
        ({"dp": 5}, "make 5 devices, which do not divide 8"),
        ({"pp": 8, "interleave": 2}, "8 layers cannot make 16 stages"),
        ({"colour": 1}, "'colour' cannot be fixed"),
        ({"schedule": "none"}, "schedule must be one of"),
        ({"microbatch": 3}, "no axes of 8 devices divide a batch"),
    ],
)
def test_what_cannot_be_says_why(fixed: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        suggest(job(fixed=fixed), 8)


def test_the_table_has_100_columns_at_most():
    for model, devices in ((SMALL, 8), (LARGE, 32)):
        fixed = {"microbatch": 2} if model is LARGE else {}
        assert max(map(len, str(suggest(job(model, batch=64, fixed=fixed), devices)).splitlines())) <= 100


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["suggest", *flags])
    out = capsys.readouterr()
    return code, out.out, out.err


SIZES = [
    "--layers",
    "16",
    "--hidden",
    "4096",
    "--ffn",
    "14336",
    "--heads",
    "32",
    "--kv-heads",
    "8",
    "--vocab",
    "32768",
    "--sequence-length",
    "4096",
]


def test_the_command_prints_the_table_or_data(capsys: pytest.CaptureFixture[str]):
    code, text, _ = command(capsys, *SIZES, "--tp", "2")
    assert code == 0
    assert "8 h100, batch 16 x 4096 tokens" in text
    code, text, _ = command(capsys, *SIZES, "--tp", "2", "--json")
    document = json.loads(text)
    assert code == document["exit_code"] == 0
    assert {row["how"]["tp"] for row in document["suggestions"]} == {2}
    assert document["suggestions"][document["suggested"]]["how"]["batch"] == 16


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--model llama3-70b", 16, "nothing fits"),
        ("--layers 4", 2, "--hidden is missing"),
        ("--model llama3-8b --layers 4", 2, "leave out --layers, or --model"),
        ("--model llama3-8b --device t4", 2, "there is no 't4'"),
        ("--model llama3-8b --device a100 --precision fp8", 2, "device a100 computes no fp8"),
        ("--model llama9", 2, "there is no 'llama9'; name a file config.json"),
        ("--model llama3-8b --memory 0", 2, "must be at least 1e6, such as 72e9 or 72GB, got '0'"),
        ("--model llama3-8b --network 50", 2, "such as 50e9 bytes, 50GB or 400Gb a second, got '50'"),
        ("--model llama3-8b --ep 8", 2, "ep 8 spreads experts, and llama3-8b has none; leave it out"),
    ],
)
def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], flags: str, code: int, message: str):
    status, _, error = command(capsys, *flags.split())
    assert status == code
    assert message in error


def test_precision_context_and_offload_are_searched():
    advice = suggest(job(precisions=("bf16", "fp8")), 8)
    assert {option.how.precision for option in advice.options} == {"fp8"}  # it is faster
    assert " fp8 " in str(advice)
    long = Training(models.model("llama3-8b"), 8, 131072, device("h100"), precisions=("bf16",))
    assert max(option.how.cp for option in suggest(long, 64).options) > 1
    fixed: dict[str, Any] = {"recompute": "none", "microbatch": 2, "fsdp": 8}
    size = step_time(SMALL, Configuration(16, 4096, **fixed), "h100", FREE).bytes
    limited = job(limit=0.9 * size, fixed=fixed)
    with pytest.raises(DoesNotFitError):
        suggest(limited, 8)
    host = suggest(dataclasses.replace(limited, offloads=True), 8)
    assert host.best.how.offload or host.best.how.offload_optimizer
    assert " host " in str(host)


@pytest.mark.longer
def test_the_optimum_of_experts_does_not_run_away():
    """DeepSeek-V3 on 1,024 H100 in bf16 was promised in 16 s once; the best published step takes 37.9 s."""
    training = Training(models.model("deepseek-v3"), 8192, 4096, device("h100"), fixed={"tp": 1, "pp": 16})
    advice = suggest(training, 1024, count=1)
    assert advice.fastest.seconds > 25
    assert advice.fastest.band >= 0.2


def test_a_run_of_ones_own_narrows_the_band(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    configuration = {"batch": 16, "sequence": 8192, "fsdp": 8, "microbatch": 1}
    run = {"model": "llama3-8b", "configuration": configuration, "seconds": 2.1}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    flags = ("--model", "llama3-8b", "--fsdp", "8", "--microbatch", "1", "--memory", "75e9", "--calibrate", str(file))
    code, text, _ = command(capsys, *flags)
    assert code == 0
    assert "calibrated: products take 1." in text
    bands = re.search(r"the band of the suggestion is (\d+) % after your run, (\d+) %", text.replace("\n  ", ""))
    assert bands is not None
    assert int(bands[1]) < int(bands[2])
    for document, message in (
        ({}, "has no run with its seconds"),
        ({**run, "rates": {"network": 40e9}}, "rates belong to a device"),
        ({**run, "seconds": 0}, "seconds must be a number above 0"),
        ({**run, "configuration": {"depth": 1}}, "model and configuration: .*depth"),
        ({**run, "model": "llama9"}, "there is no 'llama9'"),
    ):
        file.write_text(json.dumps(document))
        code, _, error = command(capsys, *flags)
        assert code == 2
        assert re.search(message, error), error


def test_the_simplest_of_equals_is_suggested_and_marked():
    advice = suggest(job(models.model("llama3-8b"), batch=16), 8)
    assert advice.best.how.pp == 1
    assert advice.best.seconds <= 1.05 * advice.fastest.seconds
    (row,) = [line for line in str(advice).splitlines() if line.startswith(">") and "suggested" not in line]
    assert row[1:].split()[0] == str(advice.options.index(advice.best) + 1)


def test_tpus_run_maxtext_unless_software_is_named(capsys: pytest.CaptureFixture[str]):
    flags = (*SIZES, "--device", "tpu-v6e", "--tp", "1", "--pp", "1", "--json")
    default, maxtext, other = (
        json.loads(command(capsys, *flags, *more)[1])["suggestions"][0]["seconds"]
        for more in ((), ("--software", "maxtext"), ("--software", "nvidia"))
    )
    assert default == maxtext != other


@pytest.mark.parametrize(
    "fixed",
    [
        *({axis: 2} for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "interleave", "microbatch")),
        *({"ep": 8}, {"ep": 8, "pp": 2}, {"ep": 4, "tp": 2, "etp": 1}, {"ep": 2, "etp": 2}, {"dp": 4, "pp": 4}),
        *({"pp": 2, "interleave": 2, "microbatch": 1}, {"fsdp": 4, "tp": 2, "pp": 2}, {"cp": 2, "ep": 8, "pp": 2}),
    ],
    ids=str,
)
def test_each_axis_can_be_fixed_and_with_others(fixed: dict[str, int]):
    """``--ep N`` was refused on every call."""
    limits = {"microbatch": 1, "recompute": "full", **fixed}
    training = Training(models.model("qwen3-30b-a3b"), 32, 4096, device("gb300"), fixed=limits)
    for option in suggest(training, 16, count=2).options:
        assert {name: getattr(option.how, name) for name in fixed} == fixed


def test_sizes_have_suffixes():
    assert [suggest_command.size_of("")(text) for text in ("7B", "70e9", "350M", "80GB")] == [7e9, 70e9, 350e6, 80e9]
    assert suggest_command.size_of("", "network")("400Gb/s") == 50e9


def test_a_terminal_of_ascii_gets_the_table(capsysbinary: Any, monkeypatch: pytest.MonkeyPatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["suggest", *SIZES, "--pp", "1", "--tp", "1"]) == 0
    out.flush()
    assert b"+-24%" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_the_end_of_the_answer_is_to_be_pasted(capsys: pytest.CaptureFixture[str]):
    _, text, _ = command(capsys, *SIZES, "--pp", "2", "--interleave", "2", "--schedule", "zb-v")
    end = text.split("to be pasted, for MaxText:")[1]
    assert "--pp 2 --interleave 2 --schedule zb-v" in end
    assert "mm.pipeline(loss, meshes, interleave=2)" in end
    assert 'schedule="zb-v", reduce="mean")' in end
    assert "what the program must do itself: shard its arrays" in end
    assert "zb-v*" in text
    assert "its authors alone measured it" in text


def test_what_is_pasted_has_the_words_of_run_py():
    base = Configuration(64, 4096, dp=8, pp=2, ep=4, sharded="optimizer", optimizer="muon", offload_optimizer=True)
    training = job(models.model("mixtral-8x7b"), gpus=8, limit=72e9)
    text = write_command(training, base, 2)
    assert "--model-name mixtral-8x7b" in text
    assert "--dp 2 --ep 4 --pp 2 --schedule 1f1b --remat minimal_with_context --zero 2 --fbmem 68664" in text
    for fields, remedy in (
        ({}, "--pp 1"),
        ({"dp": 1, "tp": 8, "etp": 1}, "--dp 4"),
        ({"pp": 1, "fsdp": 2}, "--sharded none"),
        ({"optimizer": "adafactor", "offload_optimizer": False}, "--optimizer"),
    ):
        assert remedy in find_obstacle(training, base.replace(**fields))
    assert "--maxtext-config" in find_obstacle(job(dataclasses.replace(LARGE, window=128)), Configuration(64, 4096))


def test_a_suggestion_near_the_limit_says_that_it_may_not_fit_and_shows_the_next_that_does():
    fixed = {"pp": 1, "tp": 1, "microbatch": 1, "fsdp": 8}
    sizes = [step_time(SMALL, Configuration(16, 4096, recompute=r, fsdp=8), "h100", FREE).bytes for r in USUAL]
    advice = suggest(job(fixed=fixed, limit=1.01 * max(sizes)), 8)
    assert advice.best.may_not_fit(advice.limit)
    (roomy,) = [option for option in advice.options if option.how == advice.roomy]
    assert roomy.bytes * (1 + advice.best.memory_band) <= advice.limit
    assert f"{advice.options.index(advice.best) + 1} may not fit; {advice.options.index(roomy) + 1} fits" in str(advice)


def test_products_of_experts_by_masks_have_the_bytes_that_runs_forecast():
    """Exact forecasts of stages of 2 layers: 12.45 GB live on the first, 54.6 GB of workspace."""
    model = dataclasses.replace(models.model("qwen3-30b-a3b"), layers=4)
    masking = dataclasses.replace(software("maxtext"), masks_groups=True)
    how = Configuration(128, 8192, dp=8, ep=8, pp=2, recompute="minimal")
    first = footprint.peak_bytes(model, how, masking)[0]
    assert first.activations == pytest.approx(12.45e9, rel=0.05)
    assert first.workspace == pytest.approx(54.6e9, rel=0.05)
    assert first.total > 3 * footprint.peak_bytes(model, how, software("maxtext"))[0].total


@pytest.mark.parametrize(
    ("training", "devices", "message"),
    [
        (job(LARGE), 8, r"the nearest, tp 8.* needs .* too many; use 32 devices or .*gb300"),
        (job(limit=16e9, fixed={"pp": 1, "tp": 1}), 2, r"\(--offload\)"),
        (job(limit=16e9, fixed={"pp": 1, "tp": 1}, flags=("", "--fbmem")), 2, r"use (?!.*offload).*\(--fbmem; "),
    ],
)
def test_what_does_not_fit_names_the_nearest_and_remedies(training: Training, devices: int, message: str):
    with pytest.raises(DoesNotFitError, match=message):
        suggest(training, devices)


def test_a_new_published_schedule_is_tried(monkeypatch: pytest.MonkeyPatch):
    new = dataclasses.make_dataclass("New", [], bases=(schedules.OneFOneB,), frozen=True, namespace={"name": "new"})()
    monkeypatch.setattr(space, "PUBLISHED", (*space.PUBLISHED, new))
    assert "new" in space.list_schedules(1)
    assert "new" not in space.list_schedules(2)


def test_a_job_of_535_billion_parameters_fits_with_the_host():
    hero = Transformer("hero", 48, 6144, 1536, 48, 8, 128256, head=128, experts=384, active=8)
    fixed = {"pp": 24, "ep": 8, "cp": 1, "schedule": "1f1b", "optimizer": "muon", "moments": "bfloat16"}
    training = Training(hero, 384, 65536, device("h100"), 8, fixed, software("maxtext"), 72e9, offloads=True)
    assert suggest(training, 192, count=1).best.bytes <= 72e9
