"""The one door through which this package starts other programs, and what their complaints mean.

No other module reads the English of git, pip, apt and engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import errors

# What failing programs say. `re` compiles these where they are used, so that no start pays for them.
NETWORK_FAILED = (
    r"(?i)could ?n.t (resolve|connect)|could not (resolve|connect)|"
    r"(failed|unable) to (connect|establish a new connection)|connection (refused|reset|timed out|aborted|broken)|"
    r"reset by peer|recv failure|transfer closed|empty reply|rpc failed|\beof\b|broken pipe|timed out|"
    r"(i/o|handshake|connect|operation) timeout|deadline exceeded|too slow|no route to host|"
    r"network is unreachable|no such host|temporary failure|name resolution|remote end hung up|"
    r"(unable|failed) to fetch|unexpected disconnect|curl (18|56)|could not read from remote|max retries|"
    r"proxyerror|newconnectionerror|certificate (verify failed|problem|signed by unknown)|tls: failed to verify|"
    r"too ?many ?requests|(status|http|error|code):? (429|50[0234])\b|"
    r"\b50[0234] (internal|bad|service|gateway|server)|server error|closed (network|idle) connection|connection lost|"
    r"unexpected status from \w+ request to \S+ (429|50[0234])\b|service unavailable|blob upload (unknown|invalid)"
)
DISK_FULL = r"(?i)no space left|disk quota"
OTHER_FILES = r"(?i)do not match the hashes"
_guard = threading.Lock()
_stopped = threading.Event()
_running = set[subprocess.Popen[bytes]]()


class Result(NamedTuple):
    """The exit status and the output of a finished program."""

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
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    check: bool = True,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
) -> Result:
    """Run a program to its end; no shell sees its arguments, and it reads ``stdin``.

    ``check``: raise ``ToolError`` when the program fails.
    ``on_line``: called with every line of output while the program runs; from two threads.
    ``timeout_s``: stop the program after so long and raise ``TimeoutError``; not together with ``on_line``.
    """
    command, pipe = tuple(str(word) for word in argv), subprocess.PIPE
    with _guard:
        if _stopped.is_set():
            raise KeyboardInterrupt
        try:
            process = subprocess.Popen(command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
        except FileNotFoundError as error:
            if cwd is not None and not cwd.is_dir():
                raise
            raise errors.ToolError(f"{command[0]}: not found; install it and run the same command again") from error
        _running.add(process)
    try:
        if on_line is None:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        else:
            stdout, stderr = _watch(process, stdin, on_line)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise TimeoutError(f"{quote(command)}: no answer in {timeout_s} s") from error
    except BaseException:
        _end(process)
        raise
    finally:
        with _guard:
            _running.discard(process)
    result = Result(command, process.returncode, stdout, stderr)
    if check and result.returncode:
        raise errors.ToolError(f"{quote(command)}: {result.complaint}")
    return result


def together(*calls: Callable[[], Any], at_once: int | None = None) -> list[Any]:
    """Call functions in threads, ``at_once`` at a time or all, and return what they return, in their order.

    All are called. If some raised, the first error in their order is raised; an interrupt ends all programs.
    """
    from concurrent.futures import ThreadPoolExecutor  # not every command needs it

    with ThreadPoolExecutor(at_once or len(calls) or 1) as pool:
        asked = [pool.submit(call) for call in calls]
        try:
            return [each.result() for each in asked]
        except KeyboardInterrupt:
            stop_all()
            pool.shutdown(cancel_futures=True)
            raise


def quote(argv: Sequence[str]) -> str:
    """Return a command as one could type it, shortened where it is long."""
    return shorten(shlex.join(argv), 200)


def stop_all() -> None:
    """Stop every program that runs now, and let no other start, as after an interrupt."""
    with _guard:
        _stopped.set()
        for process in _running:
            _signal(process, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap: ``Popen.wait`` never returns where an interrupt left its lock taken."""
    _signal(process, signal.SIGKILL)
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        process.returncode = -signal.SIGKILL


def _signal(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Send a signal to a program and all that it started: git's helpers hold its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _watch(process: subprocess.Popen[bytes], stdin: bytes, on_line: Callable[[str], None]) -> tuple[bytes, bytes]:
    """Feed and drain a process, handing on its output piece by piece."""
    collected: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

    def drain(name: str) -> None:
        stream = getattr(process, name)
        pending = b""
        while chunk := stream.read1(65536):
            collected[name].append(chunk)
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                on_line(line.decode("utf-8", "replace"))

    readers = [threading.Thread(target=drain, args=(name,), daemon=True) for name in collected]
    for reader in readers:
        reader.start()
    if process.stdin is not None:
        process.stdin.write(stdin)
        process.stdin.close()
    for reader in readers:
        reader.join()
    process.wait()
    return b"".join(collected["stdout"]), b"".join(collected["stderr"]).replace(b"\r", b"\n")


def of_pip(said: str, label: str) -> errors.ToolingError | None:
    """Return the meaning of a failed pip's complaint, if it is known."""
    if re.search(OTHER_FILES, said):
        return errors.IntegrityError(
            f"{label}: the package index offers other files than the locked ones; do not use them"
        )
    if re.search(DISK_FULL, said):
        return errors.DiskError(f"{label}: the disk is full; free some space and run the same command again")
    if re.search(NETWORK_FAILED, said):
        return errors.NetworkError(f"{label}: the package index cannot be reached; check the network and run again")
    return None


def shorten(said: str, most: int = 600) -> str:
    """Return a complaint that fits into an error: of a long one both ends, for reasons come last."""
    return said if len(said) <= most else f"{said[: most // 3]} ... {said[-most * 2 // 3 :]}"
