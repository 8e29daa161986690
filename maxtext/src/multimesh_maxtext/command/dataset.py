"""The dataset of a run: which it is, and what MaxText's input pipelines would miss, before anything is started."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multimesh_maxtext.command.checks import UNTOKENIZED, Job
from multimesh_maxtext.command.model import has_package
from multimesh_maxtext.command.options import Options
from multimesh_maxtext.command.settings import read_dataset
from multimesh_maxtext.errors import (
    FileError,
    LauncherError,
    MissingPartError,
    UnsupportedError,
    UsageError,
    raise_all,
)

_PACKAGES = {
    "hf": ("datasets",),
    "tfds": ("tensorflow", "tensorflow_datasets"),
    "c4_mlperf": ("tensorflow", "tensorflow_datasets"),
    "parquet": ("pyarrow",),
}
"""Packages of the group ``data`` that a dataset needs, by ``dataset_type``, or by ``grain_file_type``."""

_FROM_THE_BEGINNING = ("hf", "tfds", "c4_mlperf")
"""Datasets of which MaxText keeps no position in a checkpoint."""

_OURS = {
    "expansion_factor_real_data": -1,
    "grain_use_elastic_iterator": False,
    "generate_padding_batch_train": False,
    "generate_padding_batch_eval": False,
}
"""Settings that change which processes read, and how they end, with the value that leaves that to us."""

_WHICH = {"hf": ("hf_path",), "grain": ("grain_train_files", "grain_train_mixture_config_path", "hf_path")}
"""Settings of which one must say which data to read. The name of a TensorFlow dataset has a default."""

_TIKTOKEN_SPECIAL = 256
"""Tokens that MaxText adds to those of a tiktoken file."""

_MULTIPLE = 128


def find_notes(job: Job) -> Iterator[str]:
    """Yield a line on data that does not go on where a checkpoint stopped."""
    o = job.options
    if o.checkpoint and (kind := read_dataset(o)) in _FROM_THE_BEGINNING:
        yield (
            f"dataset_type={kind} has no position in checkpoints: a run that resumes reads from the beginning; "
            "dataset_type=grain and --text go on where they stopped"
        )


def find_missing_settings(job: Job) -> Iterator[LauncherError]:
    """Yield settings that a dataset lacks, and those that several processes cannot honour."""
    o, settings = job.options, job.model.resolved
    kind = read_dataset(o)
    if o.forecast or o.suggest or kind in UNTOKENIZED:
        return
    for key, value in _OURS.items():
        if settings.get(key, value) != value:
            yield UnsupportedError(
                f"{key}={settings[key]}: run.py decides which processes read, and ends all where one has no more; "
                "leave it out"
            )
    needed = _WHICH.get(kind, ()) if settings.get("grain_file_type") != "tfrecord" else ()
    if needed and not any(settings.get(key) for key in needed):
        yield UsageError(f"dataset_type={kind} needs to know which; add {needed[0]}=")


def check_dataset(job: Job, package: Path) -> None:
    """Raise where this machine lacks what it takes to read the dataset: packages, files, the tokenizer.

    ``package``: MaxText's package folder, which has some tokenizers.

    Raises ``LauncherError`` with all that is wrong.
    """
    o, settings = job.options, job.model.resolved
    kind = read_dataset(o)
    form = str(settings.get("grain_file_type")) if kind == "grain" else kind
    if missing := [name for name in _PACKAGES.get(form, ()) if not has_package(name)]:
        flag = f"dataset_type={kind}" if form == kind else f"grain_file_type={form}"
        raise MissingPartError(f"{flag} needs {' and '.join(missing)}; run ./bootstrap.sh --group data")
    wrong = _wrong_files(o, settings) if kind == "grain" else ()
    tokenized = kind not in UNTOKENIZED and settings.get("tokenize_train_data", True)
    raise_all([*wrong, *(_wrong_tokenizer(job, kind, package) if tokenized else ())])


def _wrong_files(o: Options, settings: Any) -> Iterator[LauncherError]:
    """Yield patterns of Grain that name no file here."""
    for key in ("grain_train_files", *(["grain_eval_files"] if o.eval_every else [])):
        for pattern in filter(None, str(settings.get(key) or "").split(";")):
            path = pattern.split(",")[0]
            if "://" not in path and not glob.glob(str(Path(path).expanduser())):
                yield FileError(f"{key}={path}: no such file; write a path, or a pattern in quotes")


def _wrong_tokenizer(job: Job, dataset: str, package: Path) -> Iterator[LauncherError]:
    o, settings = job.options, job.model.resolved
    kind = "huggingface" if dataset == "hf" else str(settings.get("tokenizer_type", "sentencepiece"))
    given = o.tokenizer_path or settings.get("tokenizer_path")
    if not given:
        flags = (
            "" if dataset == "hf" else ", with tokenizer_type=huggingface or tiktoken where it is not SentencePiece's"
        )
        yield UsageError(f"dataset_type={dataset} needs a tokenizer; add --tokenizer-path{flags}")
        return
    own = package / "assets/tokenizers" / Path(str(given)).name
    path = Path(str(given)).expanduser()
    path = path if path.exists() else own
    if not path.exists():
        if "://" not in str(given) and (kind != "huggingface" or str(given).startswith(("/", ".", "~"))):
            yield FileError(f"--tokenizer-path {given}: no such file; write the path of a {kind} tokenizer")
        return  # a name at Hugging Face, or in a bucket
    if kind == "tiktoken" and "tiktoken" not in str(given):
        yield UsageError(f"--tokenizer-path {given}: MaxText takes a path with the word tiktoken only; rename it")
    try:
        tokens = count_tokens(path, kind)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        yield FileError(
            f"--tokenizer-path {given}: cannot be read as a {kind} tokenizer ({said}); is tokenizer_type= right?"
        )
        return
    if tokens > job.model.vocabulary:
        room = -(-tokens // _MULTIPLE) * _MULTIPLE
        yield UsageError(
            f"--tokenizer-path {given} has {tokens} tokens, the model has {job.model.vocabulary}; use --vocab-size "
            f"{room}"
        )


def count_tokens(path: Path, kind: str) -> int:
    """Return the number of tokens of a local tokenizer, one more than the largest; 0 where that cannot be known."""
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(path)).vocab_size()
    if kind == "tiktoken":
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file) + _TIKTOKEN_SPECIAL
    table = path / "tokenizer.json"
    if not table.exists():
        return 0  # an older form, which transformers reads
    found = json.loads(table.read_text(encoding="utf-8"))
    vocabulary = found["model"]["vocab"]
    numbers: Sequence[int] = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*numbers, *(token["id"] for token in found.get("added_tokens", ()))])
