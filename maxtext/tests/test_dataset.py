"""Datasets of MaxText: what is refused before a run, and batches in one process and in several, also resumed."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import corpora
import pytest
from killing import records
from test_checkpoint import write

from multimesh_maxtext.command import dataset
from multimesh_maxtext.command.check_flags import check_job, find_job_notes
from multimesh_maxtext.command.checkpoint import beginning
from multimesh_maxtext.command.cli import main
from multimesh_maxtext.command.command_line import read
from multimesh_maxtext.command.job import Job, Paths
from multimesh_maxtext.command.translate import forecasting, launch
from multimesh_maxtext.errors import CheckpointError, MissingPartError
from multimesh_maxtext.trainer.data import ChangedSettings

MakeJob = Callable[[Sequence[str]], Job]

GRAIN = ("dataset_type=grain", "grain_train_files=/data/*", "--tokenizer-path", "/pieces.model")
SMALL = (
    *("--num-layers", 2, "--model-dims", 32, "--num-heads", 2),
    *("--sequence-length", 32, "--batch-size", 4, "--microbatch-size", 2),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of each kind."""
    folder, texts = tmp_path_factory.mktemp("tokenizers"), corpora.documents()
    corpora.sentencepiece(folder, texts)
    corpora.huggingface(folder, texts)
    corpora.tiktoken(folder)
    return folder


def test_settings_of_a_dataset_go_to_maxtext_as_they_are(job: MakeJob, paths: Paths):
    training = job(["--pp", "2", *GRAIN])
    assert {"tokenizer_path=/pieces.model", "dataset_type=grain"} <= {*training.flags.settings}
    assert not {"tokenizer_path=/pieces.model", "dataset_type=synthetic"} & {
        *launch(training, paths, inherited={}, gpu_memory=None).command[: -len(training.flags.settings)]
    }
    command = forecasting(training, paths, inherited={}, gpu_memory=None).command
    assert "dataset_type=synthetic" in command  # which needs no files
    assert "dataset_type=grain" not in command


def test_changed_settings_go_to_a_process_that_reads():
    settings = pickle.loads(pickle.dumps(ChangedSettings(Namespace(rows=4, seed=1), rows=8)))
    assert (settings.rows, settings.seed) == (8, 1)


def test_a_package_that_is_missing_names_its_group(job: MakeJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "has_package", lambda name: False)
    for words, message in (
        (GRAIN[1:], "grain_file_type=parquet needs pyarrow; run ./bootstrap.sh --group data"),
        (("hf_path=json", *GRAIN[2:]), "dataset_type=hf needs datasets; run ./bootstrap.sh --group data"),
        (("dataset_name=c4", *GRAIN[2:]), "dataset_type=tfds needs tensorflow and tensorflow_datasets; run"),
    ):
        kind = message.split()[0]
        settings = ["dataset_type=grain", kind] if kind.startswith("grain") else [kind]
        with pytest.raises(MissingPartError) as error:
            dataset.check_dataset(job([*settings, *words]))
        assert str(error.value).startswith(message)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--tokenizer-path pieces.model vocab_size=256", 2, "the model has 256 tokens; use vocab_size="),
        ("--tokenizer-path no.model", 10, "no.model"),
        ("--tokenizer-path pieces.model grain_train_files=no/*", 10, "no/*"),
    ],
)
def test_what_only_maxtext_can_read_is_named_once_it_has_tried(
    root: Path, tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, part: str
):
    files = corpora.array_records(tmp_path, corpora.documents())
    settings = [word.replace("pieces", str(home / "pieces")) for word in words.split()]
    if "files" not in words:
        settings.append(f"grain_train_files={files}")
    assert train(root, tmp_path / "out", "dataset_type=grain", *settings) == code
    assert part in capfd.readouterr().err.splitlines()[-1]


def test_data_that_cannot_resume_says_so_before_it_starts(maxtext: Path):
    def notes(kind: str, *words: str) -> list[str]:
        argv = [f"dataset_type={kind}", "grain_train_files=x", "hf_path=json", "dataset_name=c4", *GRAIN[2:], *words]
        parsed = read(argv)
        return [note for note in find_job_notes(parsed, check_job(parsed, maxtext / "maxtext")) if "position" in note]

    assert [len(notes(kind, "--checkpoint", "ck")) for kind in ("grain", "hf", "tfds")] == [0, 1, 1]
    assert not notes("hf")


def test_a_position_of_other_processes_is_refused(job: MakeJob, tmp_path: Path):
    """One process with two stages reads for two; another number of readers has other parts of the data."""
    step = write(tmp_path / "ck", 5, ["layers_0"])
    (step / "iter").mkdir()
    for rank in range(2):
        (step / f"iter/process_{rank}-of-2.json").write_text(json.dumps({"readers": 1, "position": {}}))
    flags = [*GRAIN, "--cpus", "1", "--checkpoint", str(tmp_path / "ck"), "--resume"]
    spawn = ["--spawn", "--nodes", "2"]
    with beginning(job([*flags, *spawn, "--pp", "2"])) as begin:
        assert begin == 6
    message = "positions in the data of 2 processes, 1 of which read; this run has"
    for words in ([*spawn, "--dp", "2"], ["--num-layers", "1"]):
        other = job([*flags, *words])
        with pytest.raises(CheckpointError, match=message), beginning(other):
            pass


def numbers(folder: Path, key: str = "learning/loss") -> list[float]:
    """A number of each record that has it."""
    return [record[key] for record in records(folder) if key in record]


def evaluations(folder: Path) -> list[float]:
    return numbers(folder, "eval/total_loss")


def train(root: Path, output: Path, *words: Any, workers: int = 0) -> int:
    """Train a small model; its exit code."""
    options = ("dtype=float32", f"grain_worker_count={workers}", "--num-steps", 6, "--output", output)
    return main([str(word) for word in (*SMALL, *options, *words)], root=root)


def grain(home: Path, files: str) -> tuple[str, ...]:
    return ("dataset_type=grain", f"grain_train_files={files}", "--tokenizer-path", str(home / "pieces.model"))


def parquet(home: Path, files: str) -> tuple[str, ...]:
    kinds = ("dataset_type=grain", "grain_file_type=parquet", "tokenizer_type=huggingface")
    return (*kinds, f"grain_train_files={files}", "--tokenizer-path", str(home / "hf"))


FORMS: dict[str, Callable[[Path, Path, list[str]], tuple[Any, ...]]] = {
    "arrayrecord": lambda folder, home, texts: grain(home, corpora.array_records(folder, texts)),
    "unpacked": lambda folder, home, texts: (*grain(home, corpora.array_records(folder, texts)), "packing=false"),
    "parquet": lambda folder, home, texts: parquet(home, corpora.parquet(folder, texts)),
    "hf": lambda folder, home, texts: (
        *("dataset_type=hf", "hf_path=json", f"hf_train_files={corpora.json_lines(folder, texts)}"),
        *("--tokenizer-path", home / "hf"),
    ),
    "tiktoken": lambda folder, home, texts: (
        *grain(home, corpora.array_records(folder, texts))[:2],
        *("tokenizer_type=tiktoken", "--tokenizer-path", home / "tokenizer.tiktoken"),
    ),
    "tfds": lambda folder, home, texts: (
        *("--use-tfds-dataset", "--dataset-path", folder),
        *("--dataset-name", corpora.tensorflow_dataset(folder, texts), "--tokenizer-path", home / "pieces.model"),
    ),
    "c4_mlperf": lambda folder, home, texts: (
        *("dataset_type=c4_mlperf", f"dataset_path={folder}"),
        f"dataset_name={corpora.tensorflow_dataset(folder, texts)}",
        *("--tokenizer-path", home / "pieces.model"),
    ),
    "mixture": lambda folder, home, texts: (
        *("dataset_type=grain", f"grain_train_mixture_config_path={corpora.mixture(folder, texts)}"),
        *("--tokenizer-path", home / "pieces.model"),
    ),
}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
def test_a_pipeline_trains_on_a_dataset_as_one_program_does(root: Path, tmp_path: Path, home: Path, form: str):
    """Every kind of files and of tokenizers; `--verify` compares each step."""
    words = FORMS[form](tmp_path, home, corpora.documents())
    assert train(root, tmp_path / "out", "--pp", 2, "--cpus", 2, "--verify", *words) in (0, 13)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_read_what_one_does_and_go_on_where_they_stopped(
    root: Path, tmp_path: Path, home: Path, workers: int
):
    """Where Grain's workers have read ahead, a checkpoint holds the rows that were trained on, not those read.

    Evaluations begin anew each time, and the last batch of a pass is not whole.
    """
    pattern = corpora.array_records(tmp_path, corpora.documents())
    data = (
        *(*grain(home, pattern), f"grain_eval_files={pattern}", "generate_padding_batch_eval=false"),
        *("--pp", 2, "eval_interval=2", "eval_steps=3"),
    )
    spawn = ("--spawn", "--nodes", 2, "--cpus", 1, *data)
    resume = ("--checkpoint", tmp_path / "ck", "--resume", "learning_rate_schedule_steps=6")
    for name, words in (
        ("one", ("--cpus", 2, *data)),
        ("two", spawn),
        ("parts", (*spawn, *resume, "--num-steps", 3)),
        ("parts", (*spawn, *resume)),
    ):
        assert train(root, tmp_path / name, *words, workers=workers) in (0, 13)
    assert len(evaluations(tmp_path / "one")) == 3
    for name in ("two", "parts"):
        assert evaluations(tmp_path / name) == evaluations(tmp_path / "one")
        assert numbers(tmp_path / name) == numbers(tmp_path / "one")


@pytest.mark.longer
@pytest.mark.timeout(1800)
@pytest.mark.telling("text")
@pytest.mark.parametrize("source", ["grain", "text"])
def test_no_row_is_dropped_where_a_microbatch_has_fewer_rows_than_devices(
    root: Path, tmp_path: Path, home: Path, source: str
):
    """MaxText would load a row for each of two devices that share a sequence, and train on every other."""
    words = grain(home, corpora.array_records(tmp_path, corpora.documents()))
    data = (*words, f"{words[1].replace('train', 'eval')}") if source == "grain" else ("--text", root / "LICENSE")
    options = ("--pp", 2, "--microbatch-size", 1, "--num-steps", 3, "eval_interval=2", *data)
    assert train(root, tmp_path / "two", "--cpus", 2, *options) in (0, 13)
    assert train(root, tmp_path / "four", "--cpus", 4, "--tp", 2, *options) in (0, 13)
    assert numbers(tmp_path / "four") == pytest.approx(numbers(tmp_path / "two"), rel=1e-5)
    assert evaluations(tmp_path / "four") == pytest.approx(evaluations(tmp_path / "two"), rel=1e-5)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_all_processes_end_where_the_first_of_them_has_no_more(
    root: Path, tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str]
):
    """Four processes, of which two read: one file each, and one of the files is shorter."""
    texts = corpora.documents()
    folder = tmp_path / "data"
    folder.mkdir()
    pattern = corpora.parquet(folder, texts[:24], 1)
    (folder / "part-0.parquet").rename(folder / "long.parquet")
    corpora.parquet(folder, texts[:6], 1)
    words = ("--spawn", "--nodes", 4, "--cpus", 1, "--pp", 2, "--dp", 2, "--num-steps", 200, *parquet(home, pattern))
    assert train(root, tmp_path / "out", *words) == 11
    assert "error: the data ended after " in capfd.readouterr().err
    assert 0 < len(numbers(tmp_path / "out")) < 200


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CONVERSATIONS = (
    "--cpus 2 --pp 2 --num-layers 2 --model-dims 32 --mlp-dims 32 --sequence-length 64 --attention dot_product "
    "--batch-size 4 --num-steps 4 vocab_size=320 dtype=float32 learning_rate=1e-2 tokenizer_type=huggingface "
    "dataset_type=hf hf_path=json use_sft=true packing=false train_data_columns=['messages']"
)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_only_answers_count_in_the_loss_of_a_pipeline(run: Callable[..., Any], tmp_path: Path):
    """Supervised fine-tuning: conversations whose prompts are masked, as MaxText has it."""
    pytest.importorskip("datasets", reason="./bootstrap.sh --group data installs it")
    texts = corpora.documents()
    tokenizer = corpora.huggingface(tmp_path, texts)
    config = tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    lines = [
        {"messages": [{"role": "user", "content": ask[:8]}, {"role": "assistant", "content": answer[:24]}]}
        for ask, answer in zip(texts[::2], texts[1::2], strict=False)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    weights = {}
    for only in ("true", "false"):
        flags = ("--tokenizer-path", tokenizer, f"hf_train_files={tmp_path / 'chat.jsonl'}", "--json", "--verify")
        output = tmp_path / only
        result = run(*CONVERSATIONS.split(), *flags, f"sft_train_on_completion_only={only}", "--output", output)
        assert result.code == 0, result.stderr
        weights[only] = numbers(output, "learning/total_weights")
    assert all(0 < answers < total for answers, total in zip(weights["true"], weights["false"], strict=True))
