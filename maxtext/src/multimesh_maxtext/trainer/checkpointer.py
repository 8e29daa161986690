"""Orbax's checkpointer in the trainer's process. Where it fails, a `CheckpointError` says why in one line.

When Orbax has completed a checkpoint, its checksums are recorded; before one is loaded, they are compared.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from multimesh import MultiMeshError, UsageError, distributed
from multimesh_maxtext.checkpoint_folder import COMPLETE, aside, look
from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError, LauncherError
from multimesh_maxtext.trainer.ending import list_causes
from multimesh_maxtext.trainer.relayout import make_loader

_OTHERS = (LauncherError, MultiMeshError, jax.errors.JaxRuntimeError, FileExistsError)
"""Errors that no checkpoint causes: another process is lost, a device has no memory, the step was written before."""

_OF_TENSORSTORE = re.compile(r"[A-Z_]+: (?:.*: )?(.*?)(?: \[\w+='.*)?")
"""An error of TensorStore: the operations that it was about to do, what happened, details for its authors."""


def telling(checkpoints: Any, layers: int | None = None) -> Any:
    """Let a checkpointer raise a `CheckpointError` where a checkpoint cannot be read or written, or was damaged.

    Returns the checkpointer, which loads as `relayout.make_loader` says.
    """
    folder, load = Path(checkpoints.directory).resolve(), make_loader(checkpoints, layers)
    save, wait = checkpoints.save_checkpointables_async, checkpoints.wait
    recording = list[threading.Thread]()

    def compare_and_load(step: int, *args: Any, **kwargs: Any) -> Any:
        _compare(folder, step)
        return load(step, *args, **kwargs)

    def save_and_record(step: int, *args: Any, **kwargs: Any) -> Any:
        if response := save(step, *args, **kwargs):
            recording.append(threading.Thread(target=_record, args=(response, folder / str(step))))
            recording[-1].start()
        return response

    def wait_for_records() -> None:
        wait()
        while recording:
            recording.pop().join()

    checkpoints.load_checkpointables = _explain_errors(compare_and_load, _unread, folder)
    checkpoints.checkpointables_metadata = _explain_errors(checkpoints.checkpointables_metadata, _unread, folder)
    checkpoints.save_checkpointables_async = _explain_errors(save_and_record, _unwritten, folder)
    checkpoints.save_checkpointables = _explain_errors(checkpoints.save_checkpointables, _unwritten, folder)
    checkpoints.wait = _explain_errors(wait_for_records, _unwritten, folder)
    return checkpoints


def ending_failed_saves(handler: Any, end: Callable[[CheckpointError], object]) -> Any:
    """Return a handler of one of several processes that calls ``end`` where its part of a checkpoint is not written.

    Orbax would only raise the error after 20 minutes in a barrier, in which the others wait for this process.
    """

    class Handler(handler):
        async def save(self, directory: Any, state: Any) -> Any:
            written = await super().save(directory, state)

            async def wait() -> None:
                try:
                    await written
                except Exception as error:
                    folder = Path(directory.path).resolve().parents[1]
                    failure = CheckpointError(_unwritten(folder, reason(error)))
                    failure.__cause__ = error
                    end(failure)
                    raise

            return wait()

    Handler.__module__, Handler.__qualname__ = handler.__module__, handler.__qualname__  # a checkpoint has its name
    return Handler


def _record(response: Any, path: Path) -> None:
    """Record the checksums of a checkpoint when it is complete. One that fails, or is removed, has none."""
    with suppress(Exception):  # what went wrong is raised where Orbax is asked next
        response.result()
        until = time.monotonic() + 60  # NFS may show it so late to a process that looked for it before
        while not (path / COMPLETE).exists() and time.monotonic() < until:
            time.sleep(0.1)
        distributed.record(path)


def _compare(folder: Path, step: int) -> None:
    """Compare the checksums of a checkpoint; set it aside if it was damaged."""
    path = folder / str(step)
    try:
        distributed.verify(path)
    except distributed.DamagedError as wrong:
        if jax.process_index() == 0:
            aside(path)
        distributed.barrier(f"checkpoint {step} is set aside")
        raise DamagedCheckpointError(str(wrong).partition(";")[0]) from None
    except distributed.NoRecordError:
        if jax.process_index() == 0:
            line = f"multimesh: checkpoint {step} has no checksums; its bytes are not compared"
            print(line, file=sys.stderr, flush=True)
    except UsageError:
        return  # without what Orbax needs, which that tells


def _explain_errors(method: Callable[..., Any], explain: Callable[..., str], folder: Path) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except _OTHERS:
            raise
        except Exception as error:
            raise CheckpointError(explain(folder, reason(error), *args)) from error

    return call


def _unread(folder: Path, why: str, step: int, *_: Any) -> str:
    others = [other for other in look(folder) if other != step]
    on = f"to go on from checkpoint {others[-1]}" if others else "to begin anew"
    return f"checkpoint {step} cannot be read ({why}); copy it again, or remove {folder / str(step)} {on}"


def _unwritten(folder: Path, why: str, *_: Any) -> str:
    steps = look(folder)
    usable = f"checkpoint {steps[-1]} there is complete" if steps else "no checkpoint is complete"
    return f"a checkpoint cannot be written ({why}); {usable}; put it right and add --resume"


def reason(error: BaseException) -> str:
    """Return the cause of an error in a few words. Orbax wraps it several times."""
    *_, error = list_causes(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).partition("\n")[0]
    of_tensorstore = _OF_TENSORSTORE.fullmatch(text)
    return (of_tensorstore[1] if of_tensorstore else text)[:200] or type(error).__name__
