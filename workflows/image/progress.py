"""The steps of a build, from the plain progress of BuildKit or Podman. Names the step that failed, and the reason."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workflows import complaints, errors

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_VERTEX = re.compile(r"#(\d+) (.*)")
_PLACE = re.compile(r"\[(?:linux/\S+ )?(?:(?P<stage>[\w.-]+) +)?(?P<number>\d+/\d+)\] (?P<text>.*)")
_PODMAN = re.compile(r"(?:\[(?P<stage>\d+)/\d+\] )?STEP (?P<number>\d+/\d+): (?P<text>.*)")
_OTHER = re.compile(r"exporting to|writing image|importing cache|\[internal\] load (build context|metadata)")
# Where a builder looks for a base: a step of its own, or, in Podman, the first of a stage.
_BASE = re.compile(r"\[internal\] load metadata|\S+ \d+/\d+: FROM ")
_TOLD = re.compile(
    r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl|error running container)(: | \()"
)
_REPEATED = re.compile(r"while running runtime: exit status \d+$")
_NOISE = ("------", "WARNING", "View build details", "> [", ">>>", "time=")
_KEPT_LINES = 40


@dataclass
class Step:
    """One step that a person cares about; ``counts``: it is one of the Dockerfile's that makes something."""

    title: str
    counts: bool
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    cached: bool = False
    error: str | None = None
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.cached or self.seconds is not None or self.error is not None

    @property
    def state(self) -> str:
        """One word or a duration, for people."""
        if self.error:
            return "failed"
        if self.cached:
            return "cached"
        return f"{time.monotonic() - self.started:.0f} s" if self.seconds is None else f"{self.seconds:.1f} s"


class Steps:
    """All steps seen so far; fed with lines of output."""

    def __init__(self) -> None:
        self.by_id: dict[str, Step] = {}
        self.rest: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, line: str) -> Step | None:
        """Take one line; return the step that it ended."""
        line = line.strip()
        if vertex := _VERTEX.match(line):
            return self._of_buildkit(*vertex.groups())
        # Podman takes one step after the other: the last runs.
        step = self.by_id.get(f"step {len(self.by_id) - 1}")
        if found := _PODMAN.match(line):
            self.by_id[f"step {len(self.by_id)}"] = _step(found)
            if step is None or step.ended:
                return None
            step.seconds = time.monotonic() - step.started
        elif not line:
            return None
        else:
            self.rest.append(line)
            if step is None:
                return None
            if line.startswith("--> Using cache"):
                step.cached = True
            elif line.startswith("Error: "):
                step.error = line
            else:
                step.said.append(line)
                return None
        return step

    def _of_buildkit(self, number: str, text: str) -> Step | None:
        step = self.by_id.get(number)
        if step is None:
            if found := _PLACE.match(text):
                self.by_id[number] = _step(found)
            elif _OTHER.match(text):
                self.by_id[number] = Step(text, counts=False)
        if step is None or step.ended:
            return None
        if done := re.fullmatch(r"DONE (\d+(?:\.\d+)?)s", text):
            step.seconds = float(done[1])
        elif text == "CACHED":
            step.cached = True
        elif text.startswith(("ERROR: ", "CANCELED")):
            step.error = text.removeprefix("ERROR: ")
        elif said := re.fullmatch(r"\d+\.\d+ (.*)", text):
            step.said.append(said[1].strip())
        return step if step.ended else None

    @property
    def counted(self) -> tuple[int, int]:
        """How many steps of the Dockerfile came from the cache, and of how many."""
        own = [step for step in self.by_id.values() if step.counts]
        return sum(step.cached for step in own), len(own)

    @property
    def failed(self) -> Step | None:
        """The step that broke the build, not the steps that were stopped because of it."""
        stopped = re.compile("CANCELED$|.*context canceled")
        return next((step for step in self.by_id.values() if step.error and not stopped.match(step.error)), None)


def _step(found: re.Match[str]) -> Step:
    """Return a step whose title lacks its mounts and fits a terminal."""
    words = [word for word in found["text"].split() if not word.startswith(("--mount=", "--from=", "--chown="))]
    line = f"{found['stage'] or 'step'} {found['number']}: {' '.join(words)}"
    return Step(line if len(line) <= 100 else line[:97] + "...", counts=words[:1] != ["FROM"])


class Display:
    """Shows the steps: a table that is redrawn on a terminal, one line an ended step elsewhere; on stderr."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._live: Live | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), get_renderable=self.table, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Take one line of the builder's output."""
        step = self.steps.feed(text)
        if self._live is None and step and (step.counts or step.error or (step.seconds or 0) >= 1):
            print(f"{step.state:>8}  {step.title}", file=sys.stderr, flush=True)

    def table(self) -> Table:
        """Return the steps as they are now; the column of times keeps its width however narrow the terminal is."""
        from rich.table import Table
        from rich.text import Text

        cached, total = self.steps.counted
        table = Table(box=None, show_header=False, pad_edge=False, expand=True)
        table.add_column(justify="right", width=8, no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        for step in list(self.steps.by_id.values()):
            text = Text(_printable(step.title), style="" if step.ended else "bold")
            if not step.ended:
                text.append(f"  {_printable((step.said or [''])[-1])}", style="not bold dim")
            if step.counts or step.error or not step.ended:
                table.add_row(step.state, text)
        table.add_row("", f"{cached} of {total} steps from the cache, {time.monotonic() - self._started:.0f} s")
        return table


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def explain(steps: Steps, returncode: int, base: str) -> errors.WorkflowsError:
    """Return the error for a build that failed: the step, the reason, and the remedy."""
    step = steps.failed
    said = [line for line in step.said if not line.startswith(_NOISE)] if step else []
    error = [step.error] if step and step.error else []
    text = "\n".join([*said, *error] if step else steps.rest)
    where = f"step `{step.title}`" if step else "the build"
    # Podman's own line says more than a step that ran nothing. Else it repeats the command, as BuildKit's always does.
    podmans = [line for line in error if line.startswith("Error: ") and not _REPEATED.search(line)]
    ways = ([*said, *podmans], error, steps.rest, [f"exit status {returncode}, no message"])
    last = next(told for told in map(_telling, ways) if told)
    if complaints.disk_full(text):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if complaints.OTHER_FILES.search(text):
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if "exec format error" in text.lower():
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    if step and _BASE.match(step.title):
        last = _telling(error) or last
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({last}); log in to its registry or give another --base-image"
        )
    if complaints.network_failed(text):
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
    return complaints.shortened(re.sub(r"^(error|ERROR|Error): ", "", best[0])) if best else None
