"""What a build is doing: the plain progress of BuildKit or Podman as steps with cache hits and times."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_VERTEX = re.compile(r"#(\d+) (.*)")
_PLACE = re.compile(r"\[(?:linux/\S+ )?(?:(?P<stage>[\w.-]+) +)?(?P<number>\d+/\d+)\] (?P<text>.*)")
_PODMAN = re.compile(r"(?:\[(?P<stage>\d+)/\d+\] )?STEP (?P<number>\d+/\d+): (?P<text>.*)")
_OTHER = re.compile(r"exporting to|writing image|importing cache|\[internal\] load (build context|metadata)")
_SAID = re.compile(r"\d+\.\d+ (.*)")
_DONE = re.compile(r"DONE (\d+(?:\.\d+)?)s")
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
        if found := _PODMAN.match(line):
            before = self._last()
            self.by_id[f"step {len(self.by_id)}"] = _step(found, found["stage"])
            if before is not None and not before.ended:
                before.seconds = time.monotonic() - before.started
                return before
        elif vertex := _VERTEX.match(line):
            return self._vertex(*vertex.groups())
        elif line:
            self.rest.append(line)
            if (step := self._last()) is not None:
                if line.startswith("--> Using cache"):
                    step.cached = True
                    return step
                if line.startswith("Error: "):
                    step.error = line
                    return step
                step.said.append(line)
        return None

    def _last(self) -> Step | None:
        """Return the step of Podman that runs: it takes one after the other."""
        return self.by_id.get(f"step {len(self.by_id) - 1}")

    def _vertex(self, number: str, text: str) -> Step | None:
        step = self.by_id.get(number)
        if step is None:
            found = _PLACE.match(text)
            if found or _OTHER.match(text):
                self.by_id[number] = _step(found, found["stage"]) if found else Step(text, counts=False)
            return None
        if step.ended:
            return None
        if done := _DONE.fullmatch(text):
            step.seconds = float(done[1])
        elif text == "CACHED":
            step.cached = True
        elif text.startswith("ERROR: "):
            step.error = text.removeprefix("ERROR: ")
        elif text == "CANCELED":
            step.error = text
        elif said := _SAID.fullmatch(text):
            step.said.append(said[1].strip())
        return step if step.ended else None

    @property
    def counted(self) -> tuple[int, int]:
        """How many steps of the Dockerfile came from the cache, and of how many."""
        own = [step for step in self.by_id.values() if step.counts]
        return sum(step.cached for step in own), len(own)

    @property
    def failed(self) -> Step | None:
        """The step that broke the build; not those that were stopped because of it."""
        broken = [step for step in self.by_id.values() if step.error not in (None, "CANCELED")]
        broken = [step for step in broken if "context canceled" not in str(step.error)]
        return broken[0] if broken else None


def _step(found: re.Match[str], stage: str | None) -> Step:
    """Return a step whose title lacks its mounts and fits a terminal."""
    words = [word for word in found["text"].split() if not word.startswith(("--mount=", "--from=", "--chown="))]
    line = f"{stage or 'step'} {found['number']}: {' '.join(words)}"
    return Step(line if len(line) <= 100 else line[:97] + "...", counts=words[:1] != ["FROM"])


class Display:
    """Shows the steps: a table that is redrawn on a terminal, one line an ended step elsewhere; on stderr."""

    def __init__(self, *, live: bool | None = None) -> None:
        self.steps = Steps()
        self._live: Live | None = None
        self._wants_live = sys.stderr.isatty() if live is None else live
        self._started = time.monotonic()

    def __enter__(self) -> Display:
        if self._wants_live:
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
