"""``--suggest``: command lines that the launcher accepts, for the sizes of MaxText's models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from multimesh import planner
from multimesh.planner import Configuration
from multimesh_maxtext.command import cli, suggesting
from multimesh_maxtext.command.checks import Job
from multimesh_maxtext.command.model import describe_model
from multimesh_maxtext.command.options import parse, read
from multimesh_maxtext.command.sizes import planner_configuration, precision, recompute, transformer
from multimesh_maxtext.command.suggesting import POLICIES, Asked
from multimesh_maxtext.command.values import DEVICES, REMAT
from multimesh_maxtext.errors import DoesNotFitError, UnsupportedError, UsageError
from multimesh_maxtext.handoff import Forecast, Need

CLUSTER = ("--suggest", "--device", "h100", "--gpus", "8", "--nodes", "2")
JOB = (*CLUSTER, "--model-name", "llama3-8b", "--sequence-length", "4096", "--batch-size", "64")


def suggested(maxtext: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert suggesting.run(read(argv), argv, maxtext) == 0
    return json.loads(capsys.readouterr().out)


def test_devices_are_those_of_the_library():
    assert tuple(DEVICES) == planner.devices()
    assert (DEVICES["h100"], DEVICES["b200"]) == (81_559, 183_359)


def test_sizes_are_those_of_the_models(maxtext: Path):
    known = {"llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "gpt3-175b": 175e9, "mixtral-8x7b": 46.7e9}
    for name, parameters in known.items():
        model = transformer(describe_model(parse(["--model-name", name]), maxtext / "maxtext"))
        assert model.parameters == pytest.approx(parameters, rel=0.01)
    words = ["--model-dims", "64", "--mlp-dims", "256", "num_experts=8"]  # MaxText's base_moe_mlp_dim is -1
    assert transformer(describe_model(parse(words), maxtext / "maxtext")).expert == 256


def test_the_best_is_a_command_line_that_is_accepted(
    maxtext: Path, capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job]
):
    found = suggested(
        maxtext, capsys, *JOB, "--no-confirm", "--json", "--remat", "full", "--fsdp", "1", "learning_rate=3e-4"
    )
    program, *words = found["command"].split()
    made, best = job(words), found["suggestions"][found["suggested"]]["how"]
    assert program == "maxtext/run.py"
    assert not {"--suggest", "--no-confirm", "--json", "--device"} & set(words)
    assert (made.devices, made.batch, made.options.remat) == (16, 64, "full")
    assert made.options.settings == ["learning_rate=3e-4"]
    assert [getattr(made.options, name) for name in ("dp", "fsdp", "tp", "pp", "interleave")] == [
        best[name] for name in ("dp", "fsdp", "tp", "pp", "interleave")
    ]
    assert made.microbatches == 64 // (best["dp"] * best["fsdp"] * best["microbatch"])


def test_what_is_given_stays(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--tp", "2", "--pp=4", "--schedule", "zb-h1", "--microbatch-size", "2", "--no-sequence-parallel")
    found = suggested(maxtext, capsys, *JOB, "--no-confirm", "--json", *given)
    kept = {"tp": 2, "pp": 4, "schedule": "zb-h1", "microbatch": 2, "sequence_parallel": False}
    for row in found["suggestions"]:
        assert {name: row["how"][name] for name in kept} == kept
    assert found["command"].count("--pp") == found["command"].count("--tp") == 1
    assert "--schedule zb-h1" in found["command"]


def test_data_parallel_devices_share_the_state_of_the_optimizer_in_a_pipeline(
    maxtext: Path, capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job]
):
    """MaxText alone would round to bfloat16 for it. What is given stays, also --zero 0."""
    argv = (*JOB, "--no-confirm", "--json", "--dp", "2", "--fsdp", "1", "--tp", "4", "--microbatch-size", "1")
    pipeline = suggested(maxtext, capsys, *argv, "--pp", "2")
    assert "--zero 2" in pipeline["command"]
    assert planner_configuration(job(pipeline["command"].split()[1:])).sharded == "optimizer"
    whole = suggested(maxtext, capsys, *argv, "--pp", "2", "--zero", "0")
    assert whole["command"].count("--zero") == 1
    bytes_of = [found["suggestions"][0]["bytes"] for found in (pipeline, whole)]
    assert bytes_of[0] < bytes_of[1]
    alone = suggested(maxtext, capsys, *argv, "--pp", "1", "--tp", "8", "--remat", "full")
    assert "--zero" not in alone["command"]


def test_parameters_may_be_gathered_once(
    maxtext: Path, capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job]
):
    argv = (*JOB, "--no-confirm", "--json", "--pp", "2", "--fsdp", "8", "--tp", "1", "--microbatch-size", "1")
    found = suggested(maxtext, capsys, *argv)
    assert found["suggestions"][0]["how"]["gather_once"]
    assert "--gather-once" in found["command"]
    assert planner_configuration(job(found["command"].split()[1:])).gather_once
    fixed = suggested(maxtext, capsys, *argv, "--no-gather-once")
    assert not any(row["how"]["gather_once"] for row in fixed["suggestions"])
    assert found["suggestions"][0]["seconds"] < fixed["suggestions"][0]["seconds"]


def test_long_sequences_are_cut_over_devices(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    argv = (*CLUSTER, "--no-confirm", "--json", "--model-name", "llama3-8b", "--sequence-length", "131072")
    found = suggested(maxtext, capsys, *argv, "--batch-size", "2", "--remat", "full", "--tp", "2", "--pp", "1")
    assert {row["how"]["cp"] for row in found["suggestions"]} >= {4}
    assert "--cp" in found["command"]


def test_experts_share_the_axis_of_data(maxtext: Path):
    argv = (*CLUSTER, "--model-name", "mixtral-8x7b", "--batch-size", "64")
    asked = Asked(parse(argv), argv, maxtext, describe_model(parse(argv), maxtext / "maxtext"))
    how = Configuration(64, 128, dp=4, ep=2, tp=2, pp=2, microbatch=2, recompute="full")
    words = asked.words(how)
    assert words[words.index("--dp") + 1] == words[words.index("--ep") + 1] == "2"
    assert asked.settled(how).options.parallelism == 16


def test_policies_have_names_of_the_planner():
    named = {policy: recompute(policy) for policy in (None, *REMAT)}
    assert {named[policy] for policy in POLICIES} == {*POLICIES}
    assert named[None] == "full"
    assert named["save_dot_except_mlpwi"] == "save_dot_except_mlp"
    assert named["custom"] == "minimal"


def test_what_would_be_refused_is_left_out(maxtext: Path):
    argv = (*JOB, "mtp_num_layers=1")
    asked = Asked(parse(argv), argv, maxtext, describe_model(parse(argv), maxtext / "maxtext"))
    assert asked.accepts(Configuration(64, 4096, fsdp=16, recompute="full"))
    assert not asked.accepts(Configuration(64, 4096, fsdp=8, pp=2, recompute="full"))
    assert "mtp_num_layers=1" in asked.refused[0]


def test_plans_are_made_until_three_suffice(
    maxtext: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    sizes = iter([90 * 10**9, 50 * 10**9, 51 * 10**9, 52 * 10**9])

    def plan(job: Job, asked: Asked) -> Forecast:
        return Forecast((Need(next(sizes), 0, 0, 0, 0, 0),), 0.1)

    monkeypatch.setattr(suggesting, "_plan", plan)
    shape = ("--pp", "4", "--tp", "2", "--microbatch-size", "1")
    before = suggested(maxtext, capsys, *JOB, "--no-confirm", "--json", *shape)
    after = suggested(maxtext, capsys, *JOB, "--json", *shape)
    assert [row["how"] for row in after["suggestions"]] == [row["how"] for row in before["suggestions"]][1:]
    assert [row["checked"] for row in after["suggestions"]][:4] == ["50.0 GB", "51.0 GB", "52.0 GB", ""]
    assert any("its plan needs 90.0 GB" in note for note in after["notes"])


def test_the_table_names_the_command(maxtext: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    argv = (*JOB, "--no-confirm", "--tp", "2", "--microbatch-size", "2", "--picture", str(tmp_path / "a.svg"))
    assert suggesting.run(read(argv), argv, maxtext) == 0
    text = capsys.readouterr().out
    assert "llama3-8b on 16 h100, batch 64 x 4096 tokens" in text
    assert "\n\nmaxtext/run.py --gpus 8 --nodes 2 --model-name llama3-8b" in text
    assert max(map(len, text.split("the best, to be pasted")[0].splitlines())) <= 100
    assert (tmp_path / "a.svg").is_file()


def test_a_precision_is_forecast_and_set(
    maxtext: Path, capsys: pytest.CaptureFixture[str], job: Callable[[Sequence[str]], Job]
):
    argv = (*JOB, "--no-confirm", "--json", "--tp", "1", "--pp", "2", "--fsdp", "2")
    wide = suggested(maxtext, capsys, *argv)
    found = suggested(maxtext, capsys, *argv, "--precision", "fp8")
    assert found["suggestions"][0]["seconds"] < 0.9 * wide["suggestions"][0]["seconds"]
    words = found["command"].split()[1:]
    assert set(suggesting.FP8) <= set(words)
    assert "--precision" not in words
    assert precision(job(words).model) == "fp8"


def test_the_fewest_nodes_reach_a_budget(maxtext: Path, capsys: pytest.CaptureFixture[str]):
    argv = (*JOB, "--no-confirm", "--json", "--nodes", "4", "--tp", "1", "--pp", "1", "--budget", "120000")
    found = suggested(maxtext, capsys, *argv)
    best = found["suggestions"][0]
    assert found["nodes"] < 4
    assert best["tokens_per_second"] * 8 * found["nodes"] >= 120_000
    assert f"--nodes {found['nodes']}" in found["command"]


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        ("--gpus 8", UsageError, "add --device"),
        ("--device h100 --cpus 8", UsageError, "add --gpus N"),
        ("--device h100 --gpus 8 --backend spmd", UnsupportedError, "spmd has no use for --suggest"),
        ("--device h100 --gpus 8 --schedule auto", UsageError, "leave out --schedule"),
        ("--device h100 --gpus 8 --forecast", UsageError, "choose one"),
        ("--device h100 --gpus 8 --tp 3", UsageError, "tp 3 does not divide attention heads"),
        (
            "--device h100 --gpus 8 --model-name llama3-70b",
            DoesNotFitError,
            r"too many; use \d+ devices",
        ),
    ],
)
def test_what_is_wrong_is_said(maxtext: Path, argv: str, error: type[Exception], message: str):
    words = ["--suggest", "--no-confirm", *argv.split()]
    with pytest.raises(error, match=message):
        suggesting.run(read(words), words, maxtext)


def test_the_command_suggests(capsys: pytest.CaptureFixture[str]):
    argv = [*JOB, "--no-confirm", "--json", "--pp", "2", "--tp", "2", "--model-name", "mixtral-8x7b", "--remat", "full"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(row["band"] > 0.2 for row in found["suggestions"])  # few runs with experts were published
    assert any("--dp is dp / ep" in note for note in found["notes"])
    assert cli.main([*argv, "--gpus", "1", "--nodes", "1", "--pp", "1", "--tp", "1"]) == DoesNotFitError.exit_code
    assert "use" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.full
def test_plans_suffice_for_what_is_suggested(run: Callable[..., Any]):
    flags = "--model-name llama3-8b --num-layers 4 --sequence-length 4096 --batch-size 32 --pp 2 --tp 4 --schedule 1f1b"
    done = run("--suggest", "--device", "h100", "--gpus", 8, *flags.split(), "--json")
    assert done.code == 0, done.stderr
    rows = done.json["suggestions"]
    for row in rows[:3]:  # what the plan needs, beside the estimate
        assert float(row["checked"].split()[0]) == pytest.approx(row["bytes"] / 1e9 + 3, rel=0.2)


def test_flags_of_suggestions_need_it(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--budget", "1000"]) == UsageError.exit_code
    assert "--budget needs --suggest; add it" in capsys.readouterr().err
