"""The data of a run: what MaxText's input pipelines would miss, and ``--text`` as tokens, before anything is started.

MaxText's ``olmo_grain`` dataset takes a raw file of unsigned integers and an index that cuts it into sequences; it
shuffles them by seed and starts over when they are used up. So ``--text`` has a token a byte: no tokenizer is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from multimesh_maxtext.command.job import END_OF_DOCUMENT, Job, has_package
from multimesh_maxtext.errors import FileError, FlagError, LauncherError, MissingPartError, UnsupportedError

UNTOKENIZED = ("synthetic", "olmo_grain")
"""Datasets of tokens: the synthetic one, and that of --text."""

_PACKAGES = {
    "hf": ("datasets",),
    "tfds": ("tensorflow", "tensorflow_datasets"),
    "c4_mlperf": ("tensorflow", "tensorflow_datasets"),
    "parquet": ("pyarrow",),
}
"""Packages of the group ``data`` that a dataset needs, by ``dataset_type``, or by ``grain_file_type``."""

_OURS = {
    "expansion_factor_real_data": -1,
    "grain_use_elastic_iterator": False,
    "generate_padding_batch_train": False,
    "generate_padding_batch_eval": False,
}
"""Settings that change which processes read, and how they end, with the value that leaves that to us."""

_DTYPE, INDEX = np.dtype("<u2"), "index.json"


def find_missing_settings(job: Job) -> Iterator[LauncherError]:
    """Yield settings that a dataset cannot use, and those that several processes cannot honour."""
    o, settings = job.flags, job.model.resolved
    untokenized = o.dataset in UNTOKENIZED
    for key in ("dataset_path", "dataset_name", "tokenizer_path") if untokenized else ():
        if key in o.values:
            yield FlagError(f"{key}= is for data of dataset_type=, not for {o.dataset}; add that, or leave it out")
    for key, value in {} if untokenized or o.forecast else _OURS.items():
        if settings.get(key, value) != value:
            yield UnsupportedError(
                f"{key}={settings[key]}: run.py decides which processes read, and ends all where one has no more; "
                "leave it out"
            )


def check_dataset(job: Job) -> None:
    """Raise ``MissingPartError`` where packages are missing here that read the dataset. MaxText names missing files."""
    kind = job.flags.dataset
    form = str(job.model.resolved.get("grain_file_type")) if kind == "grain" else kind
    if missing := [name for name in _PACKAGES.get(form, ()) if not has_package(name)]:
        flag = f"dataset_type={kind}" if form == kind else f"grain_file_type={form}"
        raise MissingPartError(f"{flag} needs {' and '.join(missing)}; run ./bootstrap.sh --group data")


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read UTF-8 files.

    Raises ``FlagError`` for a file that cannot be read or is not UTF-8, with the offset of the first wrong byte.
    """
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise FlagError(f"--text {file}: not UTF-8 at byte {error.start}; convert it, e.g. with iconv") from error
        except OSError as error:
            raise FileError(f"--text {file}: {error.strerror}; name readable files") from error
    return texts


def write_corpus(texts: Sequence[str], folder: Path, *, sequence_length: int) -> Path:
    """Write ``tokens.bin`` and ``index.json`` into a folder; return the index. END_OF_DOCUMENT follows each text.

    Raises ``FlagError`` where the text does not fill one sequence.
    """
    end = np.array([END_OF_DOCUMENT], _DTYPE)
    pieces = [piece for text in texts for piece in (np.frombuffer(text.encode(), np.uint8), end)]
    tokens = np.concatenate(pieces, dtype=_DTYPE)
    sequences = len(tokens) // sequence_length
    if not sequences:
        raise FlagError(
            f"--text holds {len(tokens)} tokens, less than one sequence of {sequence_length}; "
            f"use --sequence-length {max(1, len(tokens) // 2)} or more text"
        )
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.resolve() / "tokens.bin"
    tokens.tofile(data)
    file = {"path": str(data), "label": "text", "n_tokens": len(tokens), "n_instances": sequences, "instance_offset": 0}
    index = {
        "format_version": "1",  # MaxText 0.2.5 reads this one
        "sequence_length": sequence_length,
        "dtype": _DTYPE.name,
        "tokenizer": "bytes",
        "total_instances": sequences,
        "total_tokens": len(tokens),
        "fingerprint": f"sha256:{hashlib.sha256(tokens.tobytes()).hexdigest()}",
        "files": [file],
    }
    data.with_name(INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return data.with_name(INDEX)
