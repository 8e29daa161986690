"""What a build is doing: BuildKit's raw progress as steps with cache hits and times, and what a failed one said."""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_STEP = re.compile(
    r"\[(?:(?P<platform>linux/\S+) )?(?P<stage>[A-Za-z0-9_.-]+) +(?P<number>\d+)/(?P<total>\d+)\] (?P<text>.*)",
    re.DOTALL,
)
_OTHER = re.compile(r"(exporting to|writing image|importing cache|\[internal\] load build context)")
_KEPT_LINES = 40
_CACHED_PLAIN = re.compile(r"(#\d+ CACHED|--> Using cache)")
_STEP_PLAIN = re.compile(r"(#\d+ \[[^\]]+ \d+/\d+\]|(\[\d+/\d+\] )?STEP \d+/\d+:)")


@dataclass
class Step:
    """One vertex of the build graph that a person cares about."""

    title: str
    counts: bool
    started: float | None = None
    seconds: float | None = None
    cached: bool = False
    error: str | None = None
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def state(self) -> str:
        """One word or a duration, for people."""
        if self.error:
            return "failed"
        if self.cached:
            return "cached"
        return f"{self.seconds:.1f} s" if self.seconds is not None else "running"


class Steps:
    """All steps seen so far; fed with lines of output."""

    def __init__(self) -> None:
        self.by_digest: dict[str, Step] = {}
        self.rest: deque[str] = deque(maxlen=_KEPT_LINES)
        self.plain_steps = 0
        self.plain_cached = 0

    def feed(self, line: str) -> list[Step]:
        """Take one line; return the steps that it ended."""
        try:
            update = json.loads(line)
        except ValueError:
            update = None
        if not isinstance(update, dict):
            if line.strip():
                self.rest.append(line.strip())
                self.plain_cached += bool(_CACHED_PLAIN.search(line))
                self.plain_steps += bool(_STEP_PLAIN.match(line))
            return []
        ended = [step for vertex in update.get("vertexes") or () if (step := self._vertex(vertex)) is not None]
        for log in update.get("logs") or ():
            self._log(log)
        return ended

    def _vertex(self, vertex: dict[str, Any]) -> Step | None:
        digest, name = vertex.get("digest", ""), str(vertex.get("name", ""))
        found = _STEP.match(name)
        if digest not in self.by_digest:
            if found is None and not _OTHER.match(name):
                if not vertex.get("error"):
                    return None
                found = None
            self.by_digest[digest] = Step(
                _title(name), counts=found is not None and not found["text"].startswith("FROM ")
            )
        step = self.by_digest[digest]
        was_open = step.seconds is None and not step.cached and step.error is None
        step.error = vertex.get("error") or step.error
        step.cached = bool(vertex.get("cached")) or step.cached
        if vertex.get("started") and vertex.get("completed"):
            step.seconds = max(0.0, _seconds(vertex["completed"]) - _seconds(vertex["started"]))
        step.started = step.started or time.monotonic()
        return step if was_open and (step.seconds is not None or step.cached or step.error) else None

    def _log(self, log: dict[str, Any]) -> None:
        step = self.by_digest.get(log.get("vertex", ""))
        if step is not None:
            try:
                text = base64.b64decode(log.get("data") or "").decode("utf-8", "replace")
            except binascii.Error:
                return
            step.said.extend(line.strip() for line in re.split(r"[\r\n]+", text) if line.strip())

    @property
    def counted(self) -> tuple[int, int]:
        """How many steps of the Dockerfile came from the cache, and of how many."""
        own = [step for step in self.by_digest.values() if step.counts]
        if not own:
            return self.plain_cached, self.plain_steps
        return sum(step.cached for step in own), len(own)

    @property
    def failed(self) -> Step | None:
        """The step that broke the build; not those that were stopped because of it."""
        broken = [step for step in self.by_digest.values() if step.error and "context canceled" not in step.error]
        return broken[0] if broken else None


def _title(name: str) -> str:
    """Return a step's name without its mounts, on one line that fits a terminal."""
    found = _STEP.match(name)
    text = found["text"] if found else name
    words = [word for word in text.split() if not word.startswith(("--mount=", "--from=", "--chown="))]
    label = f"{found['stage']} {found['number']}/{found['total']}: " if found else ""
    line = label + " ".join(words)
    return line if len(line) <= 100 else line[:97] + "..."


def _seconds(stamp: str) -> float:
    """Return the seconds of an RFC 3339 time; only differences within one build are taken."""
    from datetime import datetime

    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


class Display:
    """Shows the steps: a table that is redrawn on a terminal, one line an ended step elsewhere; on stderr."""

    def __init__(self, *, live: bool | None = None, plain_output: bool = False) -> None:
        self.steps = Steps()
        self._plain_output = plain_output
        self._live: Live | None = None
        self._wants_live = sys.stderr.isatty() if live is None else live
        self._started = time.monotonic()

    def __enter__(self) -> Display:
        if self._wants_live and not self._plain_output:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), get_renderable=self._table, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Take one line of the builder's output."""
        ended = self.steps.feed(text)
        if self._live is not None:
            return
        if self._plain_output and text.strip():
            print(text.rstrip(), file=sys.stderr, flush=True)
        for step in ended:
            if step.counts or step.error or (step.seconds or 0) >= 1:
                print(f"{step.state:>8}  {step.title}", file=sys.stderr, flush=True)

    def _table(self) -> Table:
        from rich.table import Table

        cached, total = self.steps.counted
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(justify="right", min_width=8)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for step in list(self.steps.by_digest.values()):
            if step.seconds is None and not step.cached and not step.error:
                running = f"{time.monotonic() - (step.started or self._started):.0f} s"
                table.add_row(
                    running, f"[bold]{_escape(step.title)}[/bold] [dim]{_escape((step.said or [''])[-1])[:60]}[/dim]"
                )
            elif step.counts or step.error:
                table.add_row(step.state, _escape(step.title))
        table.add_row("", f"{cached} of {total} steps from the cache, {time.monotonic() - self._started:.0f} s")
        return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape("".join(each if each.isprintable() else "?" for each in text))
