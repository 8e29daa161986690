"""Metrics of a run as a text file of Prometheus, which node_exporter's textfile collector serves; and alerts as lines.

The file has a fixed number of lines, and no names of files, hosts or users.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from multimesh_maxtext.command.options import Options
from multimesh_maxtext.handoff import MEMORY, SECONDS, TIME, UTILIZATION

_RECENT = 50  # steps whose median loss a spike is compared with
_LEAST = 10  # steps before any loss can be a spike
SPIKE = 1.5
"""A loss this many times the median of the recent ones is a spike."""

GAUGES = {
    "multimesh_step": "Number of the newest training step that has ended, from 0.",
    "multimesh_steps_wanted": "Training steps of the whole run.",
    "multimesh_loss": "Mean cross entropy of the newest step, in nats.",
    "multimesh_gradient_norm": "Global norm of the gradient of the newest step.",
    "multimesh_step_seconds": "Seconds of the newest step.",
    "multimesh_tokens_per_second": "Tokens of the newest step over all devices, a second.",
    "multimesh_mfu_ratio": "Operations of the newest step as a share of the peak of all devices.",
    "multimesh_memory_peak_bytes": "Most memory that a device of process 0 has had in use.",
    "multimesh_last_step_timestamp_seconds": "Unix time when the newest step had ended.",
    "multimesh_goodput_ratio": "Share of the time since this start in steps, each with the recent median time.",
    "multimesh_restarts": "How often all processes have started again.",
    "multimesh_loss_spikes_total": "Losses far above the recent ones.",
    "multimesh_losses_not_finite_total": "Losses that were NaN or infinite.",
}
"""Every metric of the file, and its help. Names that end with ``_total`` are counters."""


class Watch:
    """Looks at losses as they come, and says on stderr what an operator should know.

    Lines have a stable shape: ``alert: loss-spike step=12 loss=9.3100 median=3.1000``, and ``loss-not-finite``.

    Attributes
    ----------
    spikes, not_finite
        How many there were.
    """

    def __init__(self) -> None:
        """Begin without losses."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.spikes = self.not_finite = 0

    def __call__(self, record: Mapping[str, float]) -> None:
        """Look at the record of a step."""
        if "learning/loss" not in record:
            return
        step, loss = int(record["step"]), record["learning/loss"]
        if not math.isfinite(loss):
            self.not_finite += 1
            print(f"alert: loss-not-finite step={step} loss={loss}", file=sys.stderr)
            return
        median = statistics.median(self._recent) if len(self._recent) >= _LEAST else math.inf
        if loss > SPIKE * median:
            self.spikes += 1
            print(f"alert: loss-spike step={step} loss={loss:.4f} median={median:.4f}", file=sys.stderr)
        self._recent.append(loss)


class Exposition:
    """Writes the newest record of a step as Prometheus text, each time at once."""

    def __init__(self, file: Path, *, wanted: int, restarts: int, watch: Watch) -> None:
        """Take the file, the steps of the run, how often it started again, and what counts its alerts."""
        self._file, self._watch = file, watch
        self._values: dict[str, float] = {"multimesh_steps_wanted": wanted, "multimesh_restarts": restarts}
        self._seconds = deque[float](maxlen=_RECENT)
        self._steps, self._began, self._failed = 0, math.nan, False

    def __call__(self, record: Mapping[str, float]) -> None:
        """Write the record of a step. A file that cannot be written is told once, and ends nothing."""
        if "learning/loss" not in record:
            return
        seconds, ended = record.get(SECONDS, math.nan), record.get(TIME, math.nan)
        if math.isnan(self._began):
            self._began = ended - seconds
        self._seconds.append(seconds)
        self._steps += 1
        good = self._steps * statistics.median(self._seconds)
        norm = record.get("learning/raw_grad_norm", record.get("learning/grad_norm", math.nan))
        self._values |= {
            "multimesh_step": record["step"],
            "multimesh_loss": record["learning/loss"],
            "multimesh_gradient_norm": norm,
            "multimesh_step_seconds": seconds,
            "multimesh_tokens_per_second": record["learning/total_weights"] / seconds if seconds else math.nan,
            "multimesh_mfu_ratio": record.get(UTILIZATION, math.nan),
            "multimesh_memory_peak_bytes": record.get(MEMORY, math.nan),
            "multimesh_last_step_timestamp_seconds": ended,
            "multimesh_goodput_ratio": good / (ended - self._began) if ended > self._began else math.nan,
            "multimesh_loss_spikes_total": self._watch.spikes,
            "multimesh_losses_not_finite_total": self._watch.not_finite,
        }
        half = self._file.with_suffix(".new")
        try:
            half.write_text(exposition_text(self._values))
            half.replace(self._file)
        except OSError as error:
            if not self._failed:
                print(f"warning: --prometheus {self._file}: {error.strerror}; training goes on", file=sys.stderr)
            self._failed = True


def listeners(options: Options, restarts: int) -> list[Callable[[Mapping[str, float]], None]]:
    """Return the functions that get each record of a run: a `Watch`; with ``--prometheus`` also an `Exposition`."""
    watch = Watch()
    if not options.prometheus:
        return [watch]
    return [watch, Exposition(options.prometheus, wanted=options.num_steps, restarts=restarts, watch=watch)]


def exposition_text(values: Mapping[str, float]) -> str:
    """Return values as Prometheus reads them; what is not known is left out."""
    lines = list[str]()
    for name, help_ in GAUGES.items():
        value = values.get(name, math.nan)
        if name != "multimesh_loss" and math.isnan(value):
            continue
        kind = "counter" if name.endswith("_total") else "gauge"
        shown = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value) or ("NaN" if math.isnan(value) else repr(float(value)))
        lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", f"{name} {shown}"]
    return "\n".join([*lines, ""])
