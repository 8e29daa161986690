"""``--suggest``: command lines that the launcher accepts, for the sizes of MaxText's models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from multimesh import planner
from multimesh.__main__ import main
from multimesh_maxtext.command import cli, suggesting
from multimesh_maxtext.command.command_line import read, write_words
from multimesh_maxtext.command.forecasting import planner_configuration
from multimesh_maxtext.command.job import Job, describe_model, transformer
from multimesh_maxtext.command.suggesting import Request
from multimesh_maxtext.errors import DoesNotFitError, FlagError, UnsupportedError
from multimesh_planner import Configuration, models
from multimesh_planner.space import Training
from multimesh_planner.suggestions import find_obstacle, write_command

CLUSTER = ("--suggest", "--device", "h100", "--gpus", "8", "--nodes", "2")
FP8 = "quantization=fp8_full use_qwix_quantization=true"
JOB = (*CLUSTER, "--model-name", "llama3-8b", "--sequence-length", "4096", "--batch-size", "64")


def run_suggest(maxtext: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    argv = (*argv, "--dry-run")  # without exact forecasts
    assert suggesting.run(read(argv), argv, maxtext) == 0
    return json.loads(capsys.readouterr().out)


def test_experts_are_as_wide_as_the_model_where_nobody_says(maxtext: Path):
    words = ["--model-dims", "64", "--mlp-dims", "256", "num_experts=8"]  # MaxText's base_moe_mlp_dim is -1
    assert transformer(describe_model(read(words).flags, maxtext / "maxtext")).expert == 256


def test_the_best_is_a_command_line_that_is_accepted(
    maxtext: Path, capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job]
):
    answer = run_suggest(maxtext, capsys, *JOB, "--json", "--remat", "full", "--fsdp", "1", "learning_rate=3e-4")
    program, *words = answer["command"].split()
    training, best = job(words), answer["suggestions"][answer["suggested"]]["how"]
    assert program == "maxtext/run.py"
    assert not {"--suggest", "--json", "--device"} & set(words)
    assert (training.devices, training.batch, training.flags.remat) == (16, 64, "full")
    assert training.flags.settings == ("learning_rate=3e-4",)
    assert [getattr(training.flags, name) for name in ("dp", "fsdp", "tp", "pp", "interleave")] == [
        best[name] for name in ("dp", "fsdp", "tp", "pp", "interleave")
    ]
    assert training.microbatches == 64 // (best["dp"] * best["fsdp"] * best["microbatch"])


@pytest.mark.parametrize(
    "flags",
    [
        "--model llama3-70b --memory 76e9",
        "--model qwen3-30b-a3b --memory 76e9 --pp 2 --interleave 1 --ep 4",
        "--model llama3-8b --memory 70e9 --offload --pp 1",
        "--model llama3.2-1b --optimizer muon --moments bfloat16 --precision fp8",
        "--layers 16 --hidden 4096 --ffn 8192 --heads 32 --kv-heads 8 --vocab 32768 --experts 8 --active 2 --ep 2",
        "--layers 26 --hidden 4096 --heads 32 --vocab 32768 --plain-mlp --pp 4",
    ],
)
def test_the_line_of_the_planners_command_is_accepted(
    capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job], flags: str
):
    """``python -m multimesh suggest`` prints lines of this launcher: read and checked as with ``--dry-run``."""
    assert main(["suggest", *flags.split(), "--nodes", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (line,) = [line for line in answer["paste"].splitlines() if line.startswith("maxtext/run.py")]
    training = job(shlex.split(line)[1:])
    batch, how = 32, answer["suggestions"][answer["suggested"]]["how"]
    assert (training.devices, training.batch) == (16, batch)
    assert (training.flags.pp, training.flags.dp * training.flags.ep) == (how["pp"], how["dp"])
    assert ("--memory" in flags) == ("--fbmem" in line)


def test_every_public_model_has_a_line(job: Callable[[Sequence[str]], Job]):
    for name in models.names():
        training = Training(models.model(name), 32, 8192, planner.device("h100"), 8)
        how = Configuration(32, 8192, tp=2, pp=2, dp=4, recompute="full", sharded="optimizer")
        assert not find_obstacle(training, how)
        sizes = transformer(job(write_command(training, how, 2).split()[1:]).model)
        assert sizes.parameters == pytest.approx(training.model.parameters, rel=0.03)


def test_what_is_given_stays(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    flags = ("--tp", "2", "--pp=4", "--schedule", "zb-h1", "--microbatch-size", "2", "--no-sequence-parallel")
    answer = run_suggest(maxtext, capsys, *JOB, "--json", *flags)
    fixed = {"tp": 2, "pp": 4, "schedule": "zb-h1", "microbatch": 2, "sequence_parallel": False}
    for row in answer["suggestions"]:
        assert {name: row["how"][name] for name in fixed} == fixed
    assert answer["command"].count("--pp") == answer["command"].count("--tp") == 1
    assert "--schedule zb-h1" in answer["command"]


@pytest.mark.parametrize(
    ("argv", "on", "off", "text", "field", "value", "key"),
    [
        ("--dp 2 --fsdp 1 --tp 4 --pp 2", "", "--zero 0", "--zero 2", "sharded", "optimizer", "bytes"),
        ("--pp 2 --fsdp 8 --tp 1", "", "--no-gather-once", "--gather-once", "gather_once", True, "seconds"),
        ("--pp 2 --fsdp 2 --tp 1", FP8, "", FP8, "precision", "fp8", "seconds"),
    ],
    ids=["zero", "gathered once", "fp8"],
)
def test_what_saves_is_in_the_line_and_in_its_forecast_unless_it_is_given_otherwise(
    maxtext: Path,
    capsys: pytest.CaptureFixture[str],
    job: Callable[[Sequence[str]], Job],
    argv: str,
    on: str,
    off: str,
    text: str,
    field: str,
    value: object,
    key: str,
):
    fixed = (*JOB, "--json", "--microbatch-size", "1", *argv.split())
    saving, other = (run_suggest(maxtext, capsys, *fixed, *flags.split()) for flags in (on, off))
    assert [text in answer["command"] for answer in (saving, other)] == [True, False]
    how = planner_configuration(job(shlex.split(saving["command"])[1:]))
    assert getattr(how, field) == value
    assert saving["suggestions"][0][key] < other["suggestions"][0][key]


def test_one_program_gets_no_zero(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    """MaxText alone would round to bfloat16 for it."""
    argv = (*JOB, "--json", "--dp", "2", "--fsdp", "1", "--pp", "1", "--tp", "8", "--microbatch-size", "1")
    assert "--zero" not in run_suggest(maxtext, capsys, *argv, "--remat", "full")["command"]


def test_long_sequences_are_cut_over_devices(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    argv = (*CLUSTER, "--json", "--model-name", "llama3-8b", "--sequence-length", "131072")
    answer = run_suggest(maxtext, capsys, *argv, "--batch-size", "2", "--remat", "full", "--tp", "2", "--pp", "1")
    assert {row["how"]["cp"] for row in answer["suggestions"]} >= {4}
    assert "--cp" in answer["command"]


def make_request(maxtext: Path, *argv: str) -> Request:
    flags = read(argv).flags
    return Request(flags, frozenset(), maxtext, describe_model(flags, maxtext / "maxtext"))


def test_experts_share_the_axis_of_data(maxtext: Path):
    request = make_request(maxtext, *CLUSTER, "--model-name", "mixtral-8x7b", "--batch-size", "64")
    how = Configuration(64, 128, dp=4, ep=2, tp=2, pp=2, microbatch=2, recompute="full")
    words = write_words(request.change(how))
    assert words[words.index("--dp") + 1] == words[words.index("--ep") + 1] == "2"
    assert read(words).flags.parallelism == 16


def test_what_would_be_refused_is_left_out(maxtext: Path):
    request = make_request(maxtext, *JOB, "mtp_num_layers=1")
    assert request.accepts(Configuration(64, 4096, fsdp=16, recompute="full"))
    assert not request.accepts(Configuration(64, 4096, fsdp=8, pp=2, recompute="full"))
    assert "mtp_num_layers=1" in request.refused[0]


def test_the_table_names_the_command(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    argv = (*JOB, "--tp", "2", "--microbatch-size", "2", "--dry-run")
    assert suggesting.run(read(argv), argv, maxtext) == 0
    text = capsys.readouterr().out
    assert "llama3-8b on 16 h100, batch 64 x 4096 tokens" in text
    assert "\n\nmaxtext/run.py --nodes 2 --gpus 8 " in text
    assert max(map(len, text.split("the best, to be pasted")[0].splitlines())) <= 100


SHORT = (
    *("--suggest", "--device", "h100", "--gpus", "4", "--json", "--num-layers", "4", "--batch-size", "16"),
    *("--tp", "2", "--pp", "2", "--microbatch-size", "2", "--interleave", "1", "--sequence-length", "256"),
)


@pytest.mark.longer
def test_what_is_pasted_fits_by_its_own_forecast(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(list(SHORT)) == 0
    answer = json.loads(capsys.readouterr().out)
    row = answer["suggestions"][answer["suggested"]]
    words = [*shlex.split(answer["command"])[1:], "--forecast", "--device", "h100", "--json"]
    assert cli.main(words) == 0
    peak = max(stage["total"] for stage in json.loads(capsys.readouterr().out)["forecast"])
    assert row["checked"] == f"fits, {peak / 1e9:.1f} GB"


def test_exact_forecasts_are_tried_until_one_fits(
    maxtext: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    argv = (*JOB, "--json", "--tp", "2")
    sizes, attempts = [90 * 10**9, 50 * 10**9], list[Configuration]()

    def plan(request: Request, how: Configuration, text: str) -> int:
        attempts.append(how)
        return sizes[len(attempts) - 1]

    monkeypatch.setattr(Request, "plan", plan)
    assert suggesting.run(read(argv), argv, maxtext) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["checked"] for row in answer["suggestions"] if row["checked"]] in (
        ["no, 90.0 GB", "fits, 50.0 GB"],
        ["fits, 50.0 GB", "no, 90.0 GB"],
    )
    assert answer["suggestions"][answer["suggested"]]["checked"] == "fits, 50.0 GB"
    assert attempts[0] != attempts[1]
    sizes, attempts = [90 * 10**9] * 3, []
    with pytest.raises(DoesNotFitError, match=r"none fits .* 90.0 GB.*; use .*--fbmem \d+ .*more --nodes"):
        suggesting.run(read(argv), argv, maxtext)
    assert 1 < len(attempts) <= 3


def test_masked_products_of_experts_name_what_helps(maxtext: Path):
    argv = (*CLUSTER, "--model-name", "qwen3-30b-a3b", "--batch-size", "128", "--sequence-length", "8192", "--dry-run")
    with pytest.raises(DoesNotFitError, match="sparse_matmul=false"):
        suggesting.run(read(argv), argv, maxtext)


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        ("--gpus 8", FlagError, "--device h100"),
        ("--device h100 --cpus 8", FlagError, "--device"),
        ("--device h100 --gpus 8 --backend spmd", UnsupportedError, "leave out --backend"),
        ("--device h100 --gpus 8 --schedule auto", FlagError, "leave them out"),
        ("--device h100 --gpus 8 --forecast", UnsupportedError, "leave out --forecast"),
        ("--device h100 --gpus 8 --tp 3", FlagError, "tp 3 does not divide attention heads"),
        ("--device h100 --gpus 8 --model-name llama3-70b", DoesNotFitError, r"too many; use \d+ devices"),
    ],
)
def test_what_is_wrong_is_said(maxtext: Path, argv: str, error: type[Exception], message: str):
    words = ["--suggest", *argv.split()]
    with pytest.raises(error, match=message):
        suggesting.run(read(words), words, maxtext)


def test_the_command_suggests(capsys: pytest.CaptureFixture[str]):
    argv = [*JOB, "--dry-run", "--json", "--pp", "2", "--tp", "2", "--model-name", "mixtral-8x7b", "--remat", "full"]
    assert cli.main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(row["band"] > 0.2 for row in answer["suggestions"])  # few runs with experts were published
    assert any("--dp is dp / ep" in note for note in answer["notes"])
    assert cli.main([*argv, "--gpus", "1", "--nodes", "1", "--pp", "1", "--tp", "1"]) == DoesNotFitError.exit_code
    assert "use" in json.loads(capsys.readouterr().out)["error"]
