"""Why MaxText's trainer ends: its exceptions become the outcome that `run.py` reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multimesh import MultiMeshError
from multimesh_maxtext import errors, outcome
from multimesh_maxtext.handoff import TrainerConfig

_MORE_GPU_MEMORY = "use a smaller --microbatch-size, --remat full, or more --pp or --fsdp; --forecast shows the needs"


@contextmanager
def telling(config: TrainerConfig) -> Iterator[None]:
    """Write the outcome of the trainer that runs meanwhile."""
    stops = _note_stops()
    try:
        yield
    except Exception as error:
        _write(explain(error), config)
        raise
    finally:  # MaxText's program ends by SystemExit
        if stops:
            _write(explain_stop(stops[-1]), config)


def write_loss(text: str, code: int, config: TrainerConfig) -> None:
    """Write that this process ends because of another one, with its exit code."""
    kind = errors.ProcessLostError if code == errors.ProcessLostError.exit_code else errors.TrainerFailedError
    _write(kind(text), config)


def end_process(error: errors.LauncherError, config: TrainerConfig) -> None:
    """Write an error of any thread, tell it to the other processes, and end this one."""
    shown = explain(error)
    _write(shown, config)
    sys.excepthook(type(shown), shown, error.__traceback__)


def _write(error: errors.LauncherError, config: TrainerConfig) -> None:
    with suppress(OSError):  # then the exit code has to do
        outcome.write(error, Path(config.outcome), outcome.name_process(config.rank, config.count))


def _note_stops() -> list[BaseException]:
    """Return a list that gets the exceptions by which MaxText leaves its loop of steps: it catches them itself."""
    stops = list[BaseException]()
    try:
        from maxtext.utils import exceptions
    except ImportError:
        return stops

    class Stop(exceptions.StopTraining):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            stops.append(self)

    exceptions.StopTraining = Stop
    return stops


def explain_stop(stop: BaseException) -> errors.LauncherError:
    """Return the error of a loop of steps that MaxText left early."""
    from multimesh_maxtext.trainer import processes

    if processes.ended_by_signal:
        return errors.PreemptedError("a signal ended the run")
    under = stop.__context__
    if isinstance(under, StopIteration):
        return errors.StoppedEarlyError(
            "the data ended; use fewer --num-steps, more data, or num_epoch= to read it several times"
        )
    reason = explain(under) if under is not None else None
    kinds = errors.NoSpaceError | errors.DoesNotFitError | errors.FlagError
    return reason if isinstance(reason, kinds) else errors.StoppedEarlyError(errors.first_line(stop))


def explain(error: BaseException) -> errors.LauncherError:
    """Return the error of the launcher for an exception that ended MaxText, by the classes of its causes."""
    chain = list(list_causes(error))
    full_disks = [full for cause in reversed(chain) if (full := errors.full_file(cause)) is not None]
    if full_disks:
        return next((full for full in full_disks if str(full).startswith("/")), full_disks[0])  # one knows the file
    return next(
        filter(None, map(_translate, chain)),
        errors.TrainerFailedError(f"the trainer failed with {type(error).__name__}: {errors.first_line(error)}"),
    )


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _translate(error: BaseException) -> errors.LauncherError | None:
    if isinstance(error, errors.LauncherError):
        return error
    if isinstance(error, MultiMeshError):  # of several processes each has its own
        kinds = (errors.ProcessLostError, errors.DoesNotFitError, errors.FileError)
        kind = next((kind for kind in kinds if kind.exit_code == error.exit_code), errors.TrainerFailedError)
        return kind(str(error))
    if getattr(error, "title", "") == "MaxTextConfig" and hasattr(error, "errors"):  # pydantic's of MaxText's settings
        faults = (
            ": ".join((".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, "))).removeprefix(": ")
            for fault in error.errors()
        )
        return errors.FlagError(
            f"MaxText refuses these settings: {', '.join(' '.join(fault.split()) for fault in faults)}"
        )
    full = type(error).__name__ == "JaxRuntimeError" and str(error).startswith("RESOURCE_EXHAUSTED")
    if isinstance(error, MemoryError) or full:
        on_gpu = full and os.environ.get("JAX_PLATFORMS", "") != "cpu"
        which, remedy = ("a GPU", _MORE_GPU_MEMORY) if on_gpu else ("this machine", errors.MORE_MEMORY)
        return errors.DoesNotFitError(f"the memory of {which} did not suffice ({errors.first_line(error)}); {remedy}")
    if type(error) is ValueError and str(error).startswith("Checkpoint does not match the model:"):
        first, *more = str(error).splitlines()[1:]
        others = f" and {len([line for line in more if line.startswith('  - ')])} more" if more else ""
        return errors.CheckpointError(
            f"load_parameters_path is of another model: {first.removeprefix('  - ')}{others}; use the flags that it "
            "was written with, but for the parallelism"
        )
    return None
