"""An exception that ends MaxText becomes an outcome by its class, whatever its words are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

import pydantic
import pytest

from multimesh import errors as library
from multimesh_maxtext.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DoesNotFitError,
    FileError,
    FlagError,
    LauncherError,
    NoSpaceError,
    ProcessLostError,
    StoppedEarlyError,
    TrainerFailedError,
)
from multimesh_maxtext.trainer.ending import explain, explain_stop


def chain_errors(error: Exception, under: BaseException | None = None) -> BaseException:
    """An exception as it arrives: with a trace, and what it was raised from."""
    with pytest.raises(type(error)) as info:
        raise error from under
    return info.value


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("x"), TrainerFailedError, "the trainer failed with ValueError: x"),
        (chain_errors(RuntimeError("failed"), CheckpointError("a.")), CheckpointError, "a."),
        (chain_errors(RuntimeError("b"), DamagedCheckpointError("9: gone")), DamagedCheckpointError, "9: gone"),
        (library.LostProcessError("in any words"), ProcessLostError, "in any words"),
        (library.UsageError("the port is taken"), FileError, "the port is taken"),
        (MemoryError("no room"), DoesNotFitError, "the memory of this machine did not suffice (no room); "),
        (
            ValueError("Checkpoint does not match the model:\n  - 'a/b': shape (1,)\n  - 'c': missing\nVerify it"),
            CheckpointError,
            "load_parameters_path is of another model: 'a/b': shape (1,) and 1 more; use the flags that it was",
        ),
        (OSError(errno.ENOSPC, "full", "ck/x"), NoSpaceError, "ck/x: No space left on device (ENOSPC); make"),
        (chain_errors(CheckpointError("x"), OSError(errno.EDQUOT, "q", "ck")), NoSpaceError, "ck: Disk quota exceeded"),
        (ValueError("zarr: ck/0: No space left on device"), NoSpaceError, "zarr: ck/0: No space left on device: "),
        (OSError(errno.EACCES, "no", "ck/x"), TrainerFailedError, "the trainer failed with PermissionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_class_decides(error: BaseException, kind: type[LauncherError], text: str):
    cause = explain(error)
    assert type(cause) is kind
    assert str(cause).startswith(text)


def test_settings_that_maxtext_refuses_are_told_in_a_line():
    class MaxTextConfig(pydantic.BaseModel):
        steps: int
        top: Literal[1]

        @pydantic.model_validator(mode="before")
        @classmethod
        def check(cls, values: dict[str, object]) -> dict[str, object]:
            if "routing" in values:
                raise ValueError("Only top-1\nrouting!")
            return values

    def refusal(**values: object) -> str:
        try:
            MaxTextConfig(**values)
        except pydantic.ValidationError as error:
            cause = explain(error)
            assert type(cause) is FlagError
            return str(cause)
        raise AssertionError(values)

    line = "MaxText refuses these settings: steps: Input should be a valid integer"
    assert refusal(steps="x", top=1).startswith(line)
    assert refusal(routing=2) == "MaxText refuses these settings: Only top-1 routing!"


def test_a_loop_of_steps_that_ends_early_says_why():
    def stop_loop(under: BaseException | None) -> LauncherError:
        error = RuntimeError("MaxText's own words")
        error.__context__ = under
        return explain_stop(error)

    assert str(stop_loop(StopIteration())).startswith("the data ended; use fewer --num-steps")
    assert isinstance(stop_loop(OSError(errno.ENOSPC, "full", "/d")), NoSpaceError)
    for under in (None, KeyError("x")):
        assert (type(stop_loop(under)), str(stop_loop(under))) == (StoppedEarlyError, "MaxText's own words")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_is_told_with_the_file_of_the_first_error(tmp_path: Path, number: int):
    """MaxText and Orbax wrap it; TensorStore tells it in a text, with the link through which it writes."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    text = f'INTERNAL: Error writing local file "{tmp_path}/link/0/d/4b7f": {os.strerror(number)} [OS error 28]'
    failure = RuntimeError(f"Checkpointing failed: {os.strerror(number)}")
    failure.__cause__ = CheckpointError(f"a checkpoint cannot be written ({os.strerror(number)})")
    failure.__cause__.__cause__ = ValueError(text)
    error = explain(failure)
    line = f"{tmp_path}/ck/0/d/4b7f: {os.strerror(number)} ({errno.errorcode[number]}); make room, or raise the limit"
    assert (type(error), str(error).startswith(line)) == (NoSpaceError, True), error
