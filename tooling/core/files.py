"""Files that appear whole or not at all, locks, and checksums."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tooling.core import errors

ROOT = Path(__file__).resolve().parents[2]
"""The top of this clone."""


def write(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file; a kill leaves the old one or the new one. ``private``: only its owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        mode = 0o600 if private else 0o666
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    write(path, json.dumps(value, indent=1) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of ours, an empty one where the file is missing or spoilt."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_document(path: Path, schema: Path, remedy: str = "restore it with git") -> dict[str, Any]:
    """Return the document in a YAML or JSON file. ``SourceError``: it cannot be read, or is not as its schema says."""
    import jsonschema
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise errors.SourceError(f"{path.name}: cannot be read ({said}); {remedy}") from error
    rules = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    if fault := jsonschema.exceptions.best_match(rules.iter_errors(document)):
        where, said = ".".join(map(str, fault.absolute_path)) or "the document", " ".join(fault.message.split())[:300]
        raise errors.SourceError(f"{path.name}: {where}: {said}; {remedy}")
    return dict(document)


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, waiting: str = "") -> Iterator[IO[str]]:
    """Hold the lock of a file, which the system drops with its holders; print ``waiting`` where others have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
