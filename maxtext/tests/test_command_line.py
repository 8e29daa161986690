"""The declarations of flags, and what is made of them: the parser, the help, the lines about flags without effect."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import original
import pytest

from multimesh_maxtext.command.check_flags import setting_names
from multimesh_maxtext.command.command_line import SETTINGS, parser, purpose, read, write_words
from multimesh_maxtext.command.environment import find_flag_notes
from multimesh_maxtext.command.flags import COMMON, DEFAULTS, FLAGS, GROUPS, Flags
from multimesh_maxtext.errors import error_classes
from multimesh_maxtext.handoff import TrainerConfig


def test_a_flag_is_one_record_and_there_are_at_most_seventy():
    """Each is in the help, once, with its text; what it names are flags, and settings of MaxText or flags of XLA."""
    actions = [action for action in parser()._actions if action.dest not in ("help", "settings")]
    assert len(actions) == len(FLAGS) <= 70
    assert {action.dest: action.help for action in actions} == {name: flag.help for name, flag in FLAGS.items()}
    assert all(flag.help for flag in FLAGS.values())
    assert {*COMMON, *GROUPS} <= FLAGS.keys() <= DEFAULTS.keys()
    assert len(COMMON) == 10
    for flag in FLAGS.values():
        assert {*flag.needs, *flag.excludes} <= FLAGS.keys()
        assert all(name.startswith("--xla_gpu_") for name in flag.xla)
    trainer = {flag.trainer for flag in FLAGS.values()} - {""}
    assert trainer <= {field.name for field in fields(TrainerConfig)}


def test_settings_that_flags_decide_are_those_of_maxtext(maxtext: Path):
    names = setting_names(maxtext / "maxtext")
    keys = {key for flag in FLAGS.values() for key in (flag.setting, *flag.decides) if key}
    assert keys | {words.partition("=")[0] for words in SETTINGS.values()} <= names


def test_every_flag_of_the_original_is_read_replaced_or_ignored():
    options = {flag.option for flag in FLAGS.values()}
    assert [flag for flag in original.FLAGS if flag not in {*options, *SETTINGS} and not purpose(flag)] == []
    assert not options & SETTINGS.keys()
    assert not any(map(purpose, (*options, *SETTINGS)))


def test_flags_that_are_settings_of_maxtext_become_these():
    flags = read(["--attention-type=chunk", "--no-use-iota-embed", "--tokenizer-path", "a,b", "dtype=float32"]).flags
    assert flags.settings == ("attention_type=chunk", "use_iota_embed=false", 'tokenizer_path="a,b"', "dtype=float32")
    (line,) = find_flag_notes(flags, gpu_memory=None)
    assert line.startswith("--attention-type --no-use-iota-embed --tokenizer-path: settings of MaxText, attention_type")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--nodes 2 --gpus 8 --pp 2 --partition 3,5 --no-sequence-parallel --scan-layers learning_rate=3e-4",
        "--fbmem 70 --text a.md b.md --device-memory 80GiB --xla-pipelining --output some/where --suggest",
        "head_dim=32 --tokenizer-path a,b --partition auto --zero 2 --backend legate --custom-schedule-path table",
    ],
)
def test_flags_are_written_as_words_that_are_read_as_the_same_flags(words: str):
    flags = replace(read(words.split()).flags, replaced=())
    assert read(write_words(flags)).flags == flags


def test_the_first_screen_of_the_help_has_the_most_common_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = parser().format_help()
    assert max(map(len, shown.splitlines())) <= 80
    first, _, others = shown.partition("\nprocesses and devices:")
    assert len(first.splitlines()) <= 36
    assert all(f"  {FLAGS[name].option}" in first for name in COMMON)
    assert all(f"\n{title}:" in others for title, _ in list(GROUPS.values())[1:])


def test_a_flag_says_something_unless_it_has_its_default():
    assert Flags().used == Flags(sequence_parallel=False, pp=1).used == ()
    assert Flags(xla_ar_threshold=0, pp=2, zero=0).used == ("pp", "xla_ar_threshold")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--no-profile --no-replicate-small-params", ""),
        ("--gpus 2 --pp 2 --debug-nccl --xla-pipelining --xla-ag-threshold 9 --replicate-small-params", ""),
        ("--zcmem 4 --sysmem 4 --network ucx", "--zcmem, --sysmem, --network (for the Realm runtime)"),
        ("--eager-fbmem 10 --eager-x=3 learning_rate=1", "--eager-fbmem, --eager-x (for the Realm runtime)"),
        ("-ll:gpu 1 -level gpu=2 -lg:prof 4 dtype=float32", "-ll:gpu, -level, -lg:prof (for the Realm runtime)"),
        ("--fbmem 70 --gpus 1", "--fbmem (for a GPU, and none can be seen here)"),
        ("--fbmem 70", "--fbmem (for GPUs)"),
        ("--xla-ar-threshold 0 --debug-nccl", "--debug-nccl, --xla-ar-threshold (for GPUs)"),
        ("--gpus 1 --hoist-loop-convert", "--hoist-loop-convert (for the original's compiler)"),
        ("--replicate-small-params", "--replicate-small-params (for pipelines of MultiMesh)"),
        (
            "--pp 2 --autoshard --only-fuse-loop-tasks --dump-mpmd-passes --hlo",
            "--autoshard, --only-fuse-loop-tasks (for the original's passes; here they are always as by default); "
            "--dump-mpmd-passes, --hlo (for the original's dumps; --dump writes every pass)",
        ),
        (
            "--host-offload-min-reuse-distance 2 --no-load-balance-embeddings",
            "--host-offload-min-reuse-distance, --no-load-balance-embeddings (for the original's compiler)",
        ),
    ],
)
def test_flags_without_effect_are_named_in_one_line(argv: str, words: str):
    lines = [f"without effect here: {words}"] if words else []
    assert find_flag_notes(read(argv.split()).flags, gpu_memory=None) == lines


CODES = {
    **{"error": 1, "usage": 2, "file": 2, "unsupported": 3, "missing-part": 4, "trainer-failed": 10},
    **{"stopped-early": 11, "loss-not-finite": 12, "loss-not-falling": 13, "disagreement": 14, "checkpoint": 15},
    **{"damaged-checkpoint": 15, "does-not-fit": 16, "process-lost": 17, "process-killed": 17, "preempted": 18},
    **{"unfit": 19, "no-space": 20, "interrupted-run": 130, "unread": 141},
}


def test_exit_codes_are_stable_and_in_the_help():
    assert {cause: kind.exit_code for cause, kind in error_classes().items()} == CODES
    codes = re.findall(r"^ +(\d+)  \w", parser().format_help().partition("exit codes:")[2], re.MULTILINE)
    assert [*map(int, codes)] == sorted({0, *CODES.values()})


def test_the_door_names_the_bootstrap_or_ends_without_a_traceback(tmp_path: Path, root: Path):
    door = tmp_path / "maxtext" / "run.py"
    door.parent.mkdir()
    door.write_text((root / "maxtext/run.py").read_text())
    done = subprocess.run([sys.executable, "-S", "-E", str(door)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(door.read_text().splitlines()) <= 20
    assert done.stderr == f"multimesh_maxtext is not installed here; run: {tmp_path / 'bootstrap.sh'} --group run\n"
    package = tmp_path / "maxtext/src/multimesh_maxtext/command"
    package.mkdir(parents=True)
    (package / "cli.py").write_text("raise KeyboardInterrupt")  # Ctrl-C while modules are loaded
    done = subprocess.run([sys.executable, "-S", "-E", str(door)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
