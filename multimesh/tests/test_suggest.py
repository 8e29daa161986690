"""The search for configurations: against all of them, with what is fixed, in memory, and its table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
from multimesh.__main__ import main
from multimesh.errors import DoesNotFitError, UsageError
from multimesh.hardware.devices import device
from multimesh.hardware.software import stack
from multimesh.planner import footprint, models, picture
from multimesh.planner.bill import RESTART, Terms
from multimesh.planner.configuration import USUAL, Configuration
from multimesh.planner.space import MORE_STAGES, ONE_STAGE, TWO_STAGES, divisors
from multimesh.planner.step import forecast
from multimesh.planner.suggesting import Training, fewest, suggest
from multimesh.planner.transformer import Transformer

from multimesh import schedules

SMALL = Transformer("small", 8, 4096, 14336, 32, 8, 32768)
LARGE = Transformer("large", 80, 8192, 28672, 64, 8, 128256)
FREE = dataclasses.replace(stack("modern"), reserved=0.0)


def job(model: Transformer = SMALL, **fields: Any) -> Training:
    return Training(model, fields.pop("batch", 16), 4096, device("h100"), fixed=fields.pop("fixed", {}), **fields)


def every(devices: int, batch: int) -> list[Configuration]:
    """All configurations of the small model with equal stages, made without the search."""
    found = []
    for tp, pp, fsdp in itertools.product(divisors(devices), repeat=3):
        rest, over = divmod(devices, tp * pp * fsdp)
        if over or batch % (rest * fsdp) or tp > 8 or pp > SMALL.layers:
            continue
        for microbatch, v, recompute in itertools.product(divisors(batch // (rest * fsdp)), range(1, 13), USUAL):
            if SMALL.layers % (pp * v) or (pp == 1 and v > 1):
                continue
            names = ("1f1b",) if pp == 1 else {1: ONE_STAGE, 2: TWO_STAGES}.get(v, MORE_STAGES)
            for name in names:
                common: dict[str, Any] = {"microbatch": microbatch, "interleave": v, "recompute": recompute}
                axes = {"dp": rest, "fsdp": fsdp, "tp": tp, "pp": pp, "sequence_parallel": tp > 1, "schedule": name}
                sharded = "optimizer" if rest > 1 else "none"
                found.append(Configuration(batch, 4096, sharded=sharded, **common, **axes))
    return found


@pytest.mark.parametrize("limit", [pytest.param(12e9, marks=pytest.mark.longer), 16e9])
def test_the_search_finds_what_simulating_all_finds(limit: float):
    steps = []
    for how in every(8, 16):
        if max(held.total for held in footprint.peak_bytes(SMALL, how, FREE)) <= limit:
            try:
                steps.append(forecast(SMALL, how, "h100", FREE))
            except UsageError:
                assert how.schedule in ("zb-h2", "zb-v", "interleaved-zb")  # has no table of so few microbatches
    best = min(step.seconds for step in steps)
    sizes = {step.how.layers for step in steps}
    found = suggest(job(batch=16, limit=limit), 8)
    assert sizes == {()}
    assert found.fastest.seconds <= best
    if not found.fastest.how.layers:
        assert found.fastest.seconds == best
    of_equal = [option for option in found.options if not option.how.layers]
    assert of_equal
    for option in of_equal:
        assert option.seconds == pytest.approx(forecast(SMALL, option.how, "h100", FREE).seconds)


def test_what_is_fixed_stays():
    fixed = {"tp": 2, "pp": 4, "schedule": "zb-h1", "microbatch": 2, "recompute": "full", "layers": (3, 2, 2, 1)}
    for option in suggest(job(fixed=fixed), 16).options:
        assert {name: getattr(option.how, name) for name in fixed} == fixed
        assert option.how.devices == 16


def test_nothing_is_over_the_memory_and_all_are_ranked():
    found = suggest(job(limit=14e9), 8)
    assert all(option.bytes <= 14e9 for option in found.options)
    assert [o.seconds for o in found.options] == sorted(o.seconds for o in found.options)
    unlike = {dataclasses.replace(o.how, recompute="none", schedule="1f1b", layers=()) for o in found.options}
    assert len(unlike) == len(found.options)
    simplest = [option for option in found.options[10:] if option.how == found.simplest]  # is shown beside the ten
    assert len(found.options) == 10 + len(simplest)
    assert all(schedules.get(o.how.schedule).table(o.how.pp, o.how.interleave, 8, True) for o in found.options)


def test_two_searches_find_the_same():
    assert suggest(job(), 8) == suggest(job(), 8)


def test_who_is_asked_last_may_refuse():
    assert all(option.how.pp == 1 for option in suggest(job(), 8, accepts=lambda how: how.pp == 1).options)


def test_tensor_parallelism_stays_in_a_node_unless_it_is_fixed():
    few = dataclasses.replace(job(), gpus=2)
    assert max(option.how.tp for option in suggest(few, 8).options) <= 2
    assert suggest(dataclasses.replace(few, fixed={"tp": 4}), 8).best.how.tp == 4


def test_losing_families_get_a_sentence():
    found = suggest(job(LARGE, batch=64, fixed={"tp": 8, "microbatch": 1}), 64)
    assert found.best.how.pp > 1
    assert any(sentence.startswith("without a pipeline") for sentence in found.lost)
    fixed = suggest(job(LARGE, batch=64, fixed={"tp": 8, "microbatch": 1, "pp": 8}), 64)
    assert not any("without a pipeline" in sentence for sentence in fixed.lost)


def test_a_family_that_does_not_fit_lost_by_memory():
    found = suggest(job(LARGE, batch=64, limit=20e9, fixed={"tp": 8, "microbatch": 1}), 64)
    lacking = [sentence for sentence in found.lost if ": memory; the nearest" in sentence]
    assert lacking
    assert all(sentence.endswith("too many") for sentence in lacking)


def test_what_does_not_fit_names_the_nearest_and_remedies():
    with pytest.raises(DoesNotFitError, match=r"the nearest, tp 8.* needs .* too many; use 32 devices or .*gb300"):
        suggest(job(LARGE), 8)


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


def test_the_fewest_devices_reach_a_budget_and_fewer_do_not():
    devices, option = fewest(job(), 64, 8, 400_000)
    assert option.tokens_per_second * devices >= 400_000
    assert suggest(job(), devices - 8, count=1).fastest.tokens_per_second * (devices - 8) < 400_000
    with pytest.raises(UsageError, match=r"no 8 devices or fewer reach .*; 8 reach"):
        fewest(job(), 8, 8, 400_000)


def test_the_table_has_100_columns_at_most():
    for model, devices in ((SMALL, 8), (LARGE, 32)):
        fixed = {"microbatch": 2} if model is LARGE else {}
        assert max(map(len, str(suggest(job(model, batch=64, fixed=fixed), devices)).splitlines())) <= 100


def test_the_front_has_less_memory_for_more_time():
    found = suggest(job(), 8, front=True).front
    assert len(found) > 1
    for one, other in itertools.pairwise(found):
        assert one.seconds <= other.seconds
        assert one.bytes > other.bytes


def test_a_picture_names_what_no_other_beats():
    points = [picture.Point(1.0, 5e9, "fast & large"), picture.Point(2.0, 1e9, "small"), picture.Point(3.0, 2e9, "bad")]
    assert [point.name for point in picture.front(points)] == ["fast & large", "small"]
    drawn = picture.draw("title", points, 6e9)
    assert "fast &amp; large" in drawn
    assert ">bad<" not in drawn
    assert drawn.count("<circle") == 3


def test_no_words_of_a_picture_cover_others():
    points = [picture.Point(10 + 0.01 * i, 6e10 - 1e8 * i, "dp 2 tp 8 pp 4 x 2, recompute minimal") for i in range(20)]
    points.append(picture.Point(11.0, 2e10, "far"))
    drawn = picture.draw("t", points, 6.1e10)
    found = re.findall(r'<text(?: class="([^"]*)")? x="([^"]+)" y="([^"]+)">([^<]*)', drawn)
    boxes = []
    for kind, x, y, words in found:
        width = 5.5 * len(words)
        left = float(x) - width * {"e": 1, "m": 0.5}.get((kind.split() or [""])[-1], 0)
        boxes.append((left, left + width, float(y) - 8, float(y), words))
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle [^>]*cx="([^"]+)" cy="([^"]+)"', drawn)]
    marks = [(x - 4, x + 4, y - 4, y + 4, "a point") for x, y in dots]
    for one, other in (*itertools.combinations(boxes, 2), *itertools.product(boxes, marks)):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart, (one, other)


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["suggest", *flags])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_prints_the_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    sizes = "--layers 16 --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --vocab 32768 --sequence-length 4096"
    code, text, _ = command(capsys, *sizes.split(), "--tp", "2", "--picture", f"{tmp_path}/a.svg")
    assert code == 0
    assert "8 h100, batch 16 x 4096 tokens" in text
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_the_command_gives_data_with_a_wider_band_for_a_guessed_model(capsys: pytest.CaptureFixture[str]):
    code, text, _ = command(capsys, "--params", "8e9", "--json", "--pp", "2", "--batch-size", "32")
    found = json.loads(text)
    assert code == found["exit_code"] == 0
    assert {row["how"]["pp"] for row in found["suggestions"]} == {2}
    assert {row["band"] for row in found["suggestions"]} == {0.3}
    assert any("guessed from --params" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--params 70e9", 16, "nothing fits"),
        ("--layers 4", 2, "--hidden is missing"),
        ("--params 8e9 --layers 4", 2, "leave out --layers"),
        ("--params 8e9 --device t4", 2, "there is no 't4'"),
    ],
)
def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], flags: str, code: int, message: str):
    found, _, error = command(capsys, *flags.split())
    assert found == code
    assert message in error


SIZES = tuple(
    f"--{name}={size}"
    for name, size in (
        *(("layers", 16), ("hidden", 4096), ("ffn", 14336), ("heads", 32)),
        *(("kv-heads", 8), ("vocab", 32768), ("sequence-length", 4096)),
    )
)


def test_a_bill_says_days_hours_costs_and_energy(capsys: pytest.CaptureFixture[str]):
    flags = (*SIZES, "--tokens", "1e12", "--price", "2.5", "--power", "1000", "--json")
    code, text, _ = command(capsys, *flags)
    found = json.loads(text)
    (bill,) = found["bills"]
    best = found["suggestions"][0]
    assert code == 0
    assert bill["days"] == pytest.approx(1e12 / (best["tokens_per_second"] * 8) / 86400, rel=0.06)
    assert bill["device_hours"] == pytest.approx(bill["days"] * 24 * 8)
    assert bill["cost"] == pytest.approx(2.5 * bill["device_hours"])
    assert bill["megawatt_hours"] == pytest.approx(bill["device_hours"] / 1000)
    assert bill["goodput"] == 1
    code, text, _ = command(capsys, *flags, "--goodput", "500,60")
    assert json.loads(text)["bills"][0]["days"] > 1.05 * bill["days"]


def test_goodput_is_that_of_the_best_interval_of_checkpoints():
    terms = Terms(1e12, failures=1.0, save=60.0)
    between = 86400 * 1000 / 1024
    best = min(
        (60 / every + (every / 2 + RESTART) / between, every) for every in (between * n / 1000 for n in range(1, 1000))
    )
    assert terms.goodput(1024) == pytest.approx(1 - best[0], rel=1e-3)
    with pytest.raises(UsageError, match="nothing is left to train in"):
        Terms(1e12, failures=1e6, save=60.0).goodput(1024)


def test_tpus_run_maxtext_unless_software_is_named(capsys: pytest.CaptureFixture[str]):
    flags = (*SIZES, "--device", "tpu-v6e", "--tp", "1", "--pp", "1", "--json")
    usual, same, other = (
        json.loads(command(capsys, *flags, *more)[1])["suggestions"][0]["seconds"]
        for more in ((), ("--software", "maxtext-tpu"), ("--software", "modern"))
    )
    assert usual == same != other


def test_devices_are_compared_in_one_table(capsys: pytest.CaptureFixture[str]):
    code, text, _ = command(capsys, *SIZES, "--device", "h100,b200", "--tokens", "1e12", "--tp", "1")
    assert code == 0
    table = text.split("1e+12 tokens")[1]
    assert [line.split()[0] for line in table.splitlines()[3:5]] == ["h100", "b200"]
    assert " cost" not in table  # no price was given


def test_the_simplest_of_equals_is_suggested():
    found = suggest(job(models.model("llama3-8b"), batch=16), 8)
    assert found.best.how.pp == 1
    assert found.best.seconds <= 1.05 * found.fastest.seconds
    assert (
        f"suggested: {found.options.index(found.best) + 1}, the simplest" in str(found) or found.best is found.fastest
    )


def test_precision_context_and_offload_are_searched():
    found = suggest(job(precisions=("bf16", "fp8")), 8)
    assert {option.how.precision for option in found.options} == {"fp8"}  # it is faster
    assert " fp8 " in str(found)
    long = Training(models.model("llama3-8b"), 8, 131072, device("h100"), precisions=("bf16",))
    assert max(option.how.cp for option in suggest(long, 64).options) > 1
    fixed: dict[str, Any] = {"recompute": "none", "microbatch": 2, "fsdp": 8}
    whole = forecast(SMALL, Configuration(16, 4096, **fixed), "h100", FREE).bytes
    tight = job(limit=0.9 * whole, fixed=fixed)
    with pytest.raises(DoesNotFitError):
        suggest(tight, 8)
    host = suggest(dataclasses.replace(tight, offloads=True), 8)
    assert host.best.how.offload
    assert "keeps" in str(host)


@pytest.mark.longer
def test_the_optimum_of_experts_does_not_run_away():
    """DeepSeek-V3 on 1,024 H100 in bf16 was promised in 16 s once; the best published step takes 37.9 s."""
    training = Training(models.model("deepseek-v3"), 8192, 4096, device("h100"), fixed={"tp": 1, "pp": 16})
    found = suggest(training, 1024, count=1)
    assert found.fastest.seconds > 25
    assert found.fastest.band is not None
    assert found.fastest.band >= 0.2


def test_a_run_of_ones_own_narrows_the_band(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    run = {
        "model": "llama3-8b",
        "configuration": {"batch": 16, "sequence": 8192, "fsdp": 8, "microbatch": 1},
        "seconds": 2.1,
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    flags = ("--model", "llama3-8b", "--fsdp", "8", "--microbatch", "1", "--memory", "75e9", "--calibrate", str(file))
    code, text, _ = command(capsys, *flags)
    assert code == 0
    assert "calibrated: products take 1." in text
    said = re.search(r"the band of the suggestion is (\d+) % after your run, (\d+) %", text.replace("\n  ", ""))
    assert said is not None
    assert int(said[1]) < int(said[2])
    file.write_text(json.dumps({"rates": {"matmul_bf16": 600e12, "network": 40e9}}))
    assert "rates measured in place" in command(capsys, *flags)[1]
    for wrong, message in (
        ({}, "has neither rates nor a run"),
        ({"rates": {"speed": 1}}, "rates has 'speed' = 1; known are matmul_bf16"),
        ({**run, "seconds": 0}, "seconds must be a number above 0"),
        ({**run, "configuration": {"depth": 1}}, "model and configuration: .*depth"),
        ({**run, "model": "llama9"}, "there is no 'llama9'"),
    ):
        file.write_text(json.dumps(wrong))
        code, _, error = command(capsys, *flags)
        assert code == 2
        assert re.search(message, error), error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model llama9", "there is no 'llama9'; name a file config.json"),
        ("--model llama3-8b --layers 3", "leave out --layers, or --model"),
        ("--model llama3-8b --price 2", "--price is for the bill; add --tokens"),
        ("--model llama3-8b --tokens 1e9 --price 1,2", "--price has 2 prices, --device 1 devices"),
        ("--model llama3-8b --goodput 1", "must be failures and seconds"),
        ("--model llama3-8b --device a100 --precision fp8", "device a100 computes no fp8"),
    ],
)
def test_flags_that_do_not_fit_say_so(capsys: pytest.CaptureFixture[str], flags: str, message: str):
    code, _, error = command(capsys, *flags.split())
    assert code == 2
    assert message in error


def test_a_page_needs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    file = tmp_path / "page.html"
    flags = ("--model", "llama3-70b", "--nodes", "8", "--pp", "4", "--tp", "8", "--tokens", "1e12", "--html", str(file))
    code, text, _ = command(capsys, *flags)
    page = file.read_text(encoding="utf-8")
    assert code == 0
    assert f"wrote {file}" in text
    assert not re.findall(r"""(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org)""", page)
    for name in ("front", "parts", "timeline", "bill", "lost"):
        assert f"<section id={name}>" in page
