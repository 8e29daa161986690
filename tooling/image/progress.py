"""BuildKit's own plain display, handed on; names the step that failed, and the reason."""

from __future__ import annotations

import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial

from tooling.core import errors, proc

_VERTEX = re.compile(r"#(\d+) (.*)")
_PLACE = re.compile(r"\[(?:linux/\S+ )?([\w.-]+) +(\d+/\d+)\] (.*)")
# Where a builder looks for a base: a step of its own, or the first of a stage.
_BASE = re.compile(r"\[internal\] load metadata|\S+ \d+/\d+: FROM ")
_TOLD = re.compile(r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl)(: | \()")
_NOISE = ("------", "WARNING", "View build details", "> [", ">>>")
_KEPT_LINES = 40


class Steps:
    """What BuildKit said, by the number of its step."""

    def __init__(self) -> None:
        self.titles: dict[str, str] = {}
        self.said: dict[str, deque[str]] = defaultdict(partial(deque, maxlen=_KEPT_LINES))
        self.faults: dict[str, str] = {}
        self.cached: set[str] = set()
        self.rest: deque[str] = deque(maxlen=_KEPT_LINES)

    def show(self, line: str) -> None:
        """Take one line, and hand it on to stderr."""
        print(line, file=sys.stderr, flush=True)
        self.feed(line)

    def feed(self, line: str) -> None:
        """Take one line."""
        vertex = _VERTEX.match(line.strip())
        if vertex is None:
            self.rest.append(line.strip())
            return
        number, text = vertex.groups()
        self.titles.setdefault(number, _title(text))
        if text == "CACHED":
            self.cached.add(number)
        elif text.startswith("ERROR: "):
            self.faults[number] = text.removeprefix("ERROR: ")
        elif said := re.fullmatch(r"\d+\.\d+ (.*)", text):
            self.said[number].append(said[1].strip())

    @property
    def counted(self) -> tuple[int, int]:
        """How many steps of the Dockerfile came from the cache, and of how many."""
        own = {number for number, title in self.titles.items() if re.match(r"\S+ \d+/\d+: (?!FROM )", title)}
        return len(own & self.cached), len(own)

    @property
    def failed(self) -> str | None:
        """The number of the step that broke the build, not of those that were stopped because of it."""
        return next((number for number, said in self.faults.items() if "context canceled" not in said), None)


def _title(text: str) -> str:
    """Return a step's title without its mounts, if it is one of the Dockerfile's."""
    if (found := _PLACE.match(text)) is None:
        return text
    words = [word for word in found[3].split() if not word.startswith(("--mount=", "--from=", "--chown="))]
    line = f"{found[1]} {found[2]}: {' '.join(words)}"
    return line if len(line) <= 100 else line[:97] + "..."


def explain(steps: Steps, returncode: int, base: str) -> errors.ToolingError:
    """Return the error for a build that failed: the step, the reason, and the remedy."""
    number = steps.failed
    said = [line for line in steps.said[number] if not line.startswith(_NOISE)] if number else []
    fault = [steps.faults[number]] if number else []
    title = steps.titles[number] if number else ""
    where, text = f"step `{title}`" if title else "the build", "\n".join([*said, *fault] if number else steps.rest)
    ways = (said, fault, steps.rest, [f"exit status {returncode}, no message"])
    last = next(told for told in map(_telling, ways) if told)
    if proc.disk_full(text):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if proc.OTHER_FILES.search(text):
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if "exec format error" in text.lower():
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    if _BASE.match(title):
        last = _telling(fault) or last
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({last}); log in to its registry or give another --base-image"
        )
    if proc.network_failed(text):
        return errors.NetworkError(
            f"{where}: cannot reach what it needs ({last}); check --pip-config, --ca-bundle and --network"
        )
    return errors.BuildError(f"{where} failed: {last}")


def _telling(lines: Iterable[str]) -> str | None:
    """Return the line that says most: a program's own error, else the last one; of a long one, both ends."""
    kept = [line for line in lines if line and not line.startswith(_NOISE)]
    own = [line for line in kept if _TOLD.match(line)]
    # apt and pip first say the fault, then its consequence.
    best = own[-3:][:1] or kept[-1:]
    return proc.shortened(re.sub(r"^(error|ERROR|Error): ", "", best[0])) if best else None
