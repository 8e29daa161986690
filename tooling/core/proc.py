"""The one door through which this package starts other programs. They end when it does, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tooling.core import errors

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_prctl = ctypes.CDLL(None).prctl


class Result(NamedTuple):
    """The exit status and the output of a finished program; where its lines were shown, all are in ``stderr``."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text without the last newline."""
        return self.stdout.decode("utf-8", "replace").rstrip("\n")

    @property
    def complaint(self) -> str:
        """The last lines of standard error, on one line."""
        lines = [line.strip() for line in self.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or f"exit status {self.returncode}, no message"


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    stdin: int | IO[str] = subprocess.DEVNULL,
    on_line: Callable[[str], None] | None = None,
) -> Result:
    """Run a program to its end; no shell sees its arguments, and it has nothing to read.

    ``check``: raise ``ToolingError`` when the program fails. ``on_line``: called with every line of its output while it
    runs.
    """
    command, lines = tuple(map(str, argv)), list[bytes]()
    errors_to = subprocess.STDOUT if on_line else subprocess.PIPE
    streams: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": errors_to}
    try:
        with subprocess.Popen(command, env=env, preexec_fn=_die_with_parent, **streams) as process:
            for line in process.stdout if on_line and process.stdout else ():
                lines.append(line)
                on_line(line.decode("utf-8", "replace").rstrip())  # type: ignore[misc]
            stdout, stderr = process.communicate()
    except FileNotFoundError as error:
        raise errors.ToolingError(f"{command[0]}: not found; install it and run the same command again") from error
    result = Result(command, process.returncode, stdout, b"".join(lines) or stderr or b"")
    if check and result.returncode:
        raise errors.ToolingError(f"{shorten(shlex.join(command), 200)}: {result.complaint}")
    return result


def run_pip(python: str | Path, *args: str, label: str) -> None:
    """Run the pip of a Python; raise what its complaint means."""
    options = ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    result = run([python, "-m", "pip", *args, *options], check=False, env=env)
    if result.returncode:
        output = result.stderr.decode("utf-8", "replace")
        raise errors.explain("pip", output, label=label, said=shorten(result.complaint))


def _die_with_parent() -> None:
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def end_children() -> None:
    """End all that this process started, and all that these did: git's helpers would go on writing."""
    for pid in list(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that these have."""
    with contextlib.suppress(OSError):  # one that has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


def shorten(said: str, most: int = 600) -> str:
    """Return a complaint that fits into an error: of a long one both ends, for reasons come last."""
    return said if len(said) <= most else f"{said[: most // 3]} ... {said[-most * 2 // 3 :]}"
