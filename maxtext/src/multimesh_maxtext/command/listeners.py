"""Functions that get each record of a run: alerts, the file for Prometheus, a function of the user's."""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from multimesh_maxtext.command.flags import Flags
from multimesh_maxtext.command.steps import Tell
from multimesh_maxtext.errors import FileError, FlagError
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
    "multimesh_loss_spikes_total": "Times that losses rose far above the recent ones.",
    "multimesh_losses_not_finite_total": "Times that losses became NaN or infinite.",
}
"""Every metric of the file, and its help. Names that end with ``_total`` are counters."""


class Monitor:
    """Prints alerts, and writes the newest step as Prometheus text, each time at once, for node_exporter's textfiles.

    An alert is for a loss that rises far above the recent ones, or is no number: one for steps in a row. Its line has a
    stable shape: ``alert: loss-spike step=12 loss=9.3100 median=3.1000``, and ``loss-not-finite``.
    """

    def __init__(self, steps: int, file: Path | None = None) -> None:
        """Take the steps of the run, and the file, if there is to be one."""
        self._steps, self._file, self._alert = steps, file, ""
        self._losses, self._seconds = deque[float](maxlen=_RECENT), deque[float](maxlen=_RECENT)
        self._alerts = {"loss-spike": 0, "loss-not-finite": 0}
        self._count, self._began = 0, math.nan

    def __call__(self, record: Mapping[str, float]) -> None:
        """Look at a record, and write it; raises ``OSError`` where that cannot be."""
        if "learning/loss" not in record:
            return
        loss, alert, more = record["learning/loss"], "", ""
        median = statistics.median(self._losses) if len(self._losses) >= _LEAST else math.inf
        if not math.isfinite(loss):
            alert = "loss-not-finite"
        else:
            self._losses.append(loss)
            if loss > SPIKE * median:
                alert, more = "loss-spike", f" median={median:.4f}"
        if alert and alert != self._alert:
            self._alerts[alert] += 1
            print(f"alert: {alert} step={int(record['step'])} loss={loss:.4f}{more}", file=sys.stderr)
        self._alert = alert
        if self._file:
            self._write(record, self._file)

    def _write(self, record: Mapping[str, float], file: Path) -> None:
        seconds, ended = record.get(SECONDS, math.nan), record.get(TIME, math.nan)
        self._began = ended - seconds if math.isnan(self._began) else self._began
        self._seconds.append(seconds)
        self._count += 1
        values = (
            record["step"],
            self._steps,
            record["learning/loss"],
            record.get("learning/raw_grad_norm", record.get("learning/grad_norm", math.nan)),
            seconds,
            record["learning/total_weights"] / seconds if seconds else math.nan,
            record.get(UTILIZATION, math.nan),
            record.get(MEMORY, math.nan),
            ended,
            self._count * statistics.median(self._seconds) / (ended - self._began) if ended > self._began else math.nan,
            *self._alerts.values(),
        )
        lines = list[str]()
        for (name, text), value in zip(GAUGES.items(), values, strict=True):
            if name == "multimesh_loss" or not math.isnan(value):  # a gauge that is not known is left out
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        half = file.with_suffix(".new")
        half.write_text("\n".join([*lines, ""]))
        half.replace(file)


def load_hook(name: str) -> Tell:
    """Import ``module:function``. The module may lie in the working folder."""
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise FlagError(f"--metrics-hook {name}: write MODULE:FUNCTION, such as my_hooks:log")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last: a file of the user's must not shadow a module of ours
    try:
        hook = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise FileError(
            f"--metrics-hook {name}: {module} cannot be imported ({type(error).__name__}: {error}); install it, or put "
            "it into the working folder"
        ) from error
    if not callable(hook):
        raise FlagError(f"--metrics-hook {name}: {module} has no function {function}; write its name")
    return hook


def make_listeners(flags: Flags) -> dict[str, Tell]:
    """Return the functions that get each record of a run, by the flags that ask for them."""
    listeners: dict[str, Tell] = {f"--prometheus {flags.prometheus}": Monitor(flags.num_steps, flags.prometheus)}
    if flags.metrics_hook:
        listeners[f"--metrics-hook {flags.metrics_hook}"] = load_hook(flags.metrics_hook)
    return listeners
