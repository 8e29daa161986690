"""UTF-8 text as training data: one token a byte, written where MaxText's pre-tokenised pipeline reads it.

MaxText's ``olmo_grain`` dataset takes a raw file of unsigned integers and an index that cuts it into sequences; it
shuffles them by seed and starts over when they are used up. So no tokenizer is needed and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multimesh_maxtext.errors import FileError, UsageError

END_OF_DOCUMENT = 256
BYTE_TOKENS = 257

BYTE_VOCABULARY = 384
"""Vocabulary for bytes: BYTE_TOKENS rounded up to a multiple of 128, so that tensor parallelism divides it."""

_DTYPE = np.dtype("<u2")
_INDEX_FORMAT = "1"  # MaxText 0.2.5 reads this one


@dataclass(frozen=True)
class Corpus:
    """Tokens on disk: the index for MaxText, and how much there is."""

    index: Path
    tokens: int
    sequences: int


def tokenize(texts: Sequence[str]) -> np.ndarray:
    """Return the tokens of some documents, each followed by END_OF_DOCUMENT; dtype uint16, shape (tokens,)."""
    end = np.array([END_OF_DOCUMENT], _DTYPE)
    pieces = [np.append(np.frombuffer(text.encode(), np.uint8).astype(_DTYPE), end) for text in texts]
    return np.concatenate(pieces) if pieces else np.empty(0, _DTYPE)


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read UTF-8 files.

    Raises ``UsageError`` for a file that cannot be read or is not UTF-8, with the offset of the first wrong byte.
    """
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"--text {file}: not UTF-8 at byte {error.start}; convert it, e.g. with iconv") from error
        except OSError as error:
            raise FileError(f"--text {file}: {error.strerror}; name readable files") from error
    return texts


def write_corpus(texts: Sequence[str], folder: Path, *, sequence_length: int) -> Corpus:
    """Write ``tokens.bin`` and ``index.json`` into a folder.

    Raises ``UsageError`` where the text does not fill one sequence.
    """
    tokens = tokenize(texts)
    sequences = len(tokens) // sequence_length
    if not sequences:
        raise UsageError(
            f"--text holds {len(tokens)} tokens, less than one sequence of {sequence_length}; "
            f"use --sequence-length {max(1, len(tokens) // 2)} or more text"
        )
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.resolve() / "tokens.bin"
    tokens.tofile(data)
    index = {
        "format_version": _INDEX_FORMAT,
        "sequence_length": sequence_length,
        "dtype": _DTYPE.name,
        "tokenizer": "bytes",
        "total_instances": sequences,
        "total_tokens": len(tokens),
        "fingerprint": f"sha256:{hashlib.sha256(tokens.tobytes()).hexdigest()}",
        "files": [
            {
                "path": str(data),
                "label": "text",
                "n_tokens": len(tokens),
                "n_instances": sequences,
                "instance_offset": 0,
            }
        ],
    }
    path = index_path(folder)
    path.write_text(json.dumps(index, indent=1), encoding="utf-8")
    return Corpus(path, len(tokens), sequences)


def index_path(folder: Path) -> Path:
    """Return where the index of a corpus in this folder lies."""
    return folder.resolve() / "index.json"
