"""The whole check: meet, try each step, tell, and end all processes with one code."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import multimesh as mm
from multimesh.commands.check import compute, files, machine, transfers, verdicts, workload
from multimesh.commands.check.steps import Bench, Probe, find_processes, run_steps
from multimesh.commands.check.verdicts import OK, Row, make_failure
from multimesh.errors import UsageError
from multimesh.marking.contexts import TRANSPORTS
from multimesh.processes import agree, initialize

_TUNING = (
    "NCCL_DEBUG=INFO; or XLA waits until all processes compile the same program: "
    "XLA_FLAGS=--xla_gpu_shard_autotuning=false"
)


def steps(quick: bool) -> list[Probe]:
    """Return the steps in their order. A step that hangs ends the check, so the simple ones come first."""
    slow = 1.0 if quick else 3.0
    seen = "see the output of each process, CUDA_VISIBLE_DEVICES"
    checks = [
        Probe("devices", 60, machine.devices, machine.judge_devices, seen),
        Probe("versions", 30, machine.versions, machine.judge_versions),
        Probe("shared folder", 30, files.try_files, files.judge_files, "the folder's server does not answer"),
        Probe("products", 60 * slow, compute.products, compute.judge_products, "a device does not answer: nvidia-smi"),
        Probe("collectives in stages", 60 * slow, compute.collectives, compute.judge_collectives, _TUNING),
    ]
    for by in TRANSPORTS:
        measure, judge, remedy = partial(transfers.measure, by), partial(transfers.judge, by), transfers.advise(by)
        checks.append(Probe(f"transfers by {by}", 120 * slow, measure, judge, remedy, remedy))
    return [*checks, Probe("plans", 120 * slow, workload.try_training, workload.judge_training, _TUNING)]


def run(options: argparse.Namespace) -> NoReturn:
    """Check as one of the processes of a job; ends this process."""
    begun = time.monotonic()
    every: list[Row] = []
    job = _meet(options, every)
    teller = _Teller(options, job.rank, job.hosts, every, _share_nodes())
    every.append(_check_start(job, time.monotonic() - begun))
    teller.tell(every)
    bench = Bench(job, options.stages or 0, options.per_stage or 0, options.quick, options.folder.absolute())
    initialize.tell_at_loss(teller.lost)
    rows, answers = run_steps(steps(options.quick), bench, teller.tell)
    code = verdicts.exit_code(rows)
    teller.finish(code)
    if not answers:
        initialize.end_others("a step of the check did not end", code)
    initialize.end_together(code)


def _meet(options: argparse.Namespace, every: list[Row]) -> initialize.Processes:
    """Return the job; if the processes do not become one, the one that knows why tells it, and all end."""
    begun = time.monotonic()
    try:
        return mm.distributed.initialize(alone=True)
    except UsageError as error:
        if not getattr(error, "told", False):  # else process 0 says so
            remedy = "start all processes alike, and see the output of each"
            row = make_failure("meeting", str(error), remedy, error.exit_code, seconds=time.monotonic() - begun)
            teller = _Teller(options, 0, [], every)
            teller.tell([row])
            teller.finish(error.exit_code)
        sys.stdout.flush()
        os._exit(error.exit_code)


def _check_start(job: initialize.Processes, seconds: float) -> Row:
    count, hosts = len(job.hosts), len(set(job.hosts))
    text = f"{count} process{'es' * (count > 1)} on {hosts} host{'s' * (hosts > 1)}, found by {job.launcher}"
    return Row("meeting", OK, text, seconds=seconds)


def _share_nodes() -> list[str]:
    """Return the node of each process: its name for Slurm, which may be another than that of the machine."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    every = agree.decide_together("check: nodes", node.encode(), lambda said: b"\n".join(said))
    return every.decode().split("\n")


class _Teller:
    """The voice of process 0: it prints and writes for all."""

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        hosts: Sequence[str],
        every: list[Row],
        nodes: Sequence[str] = (),
    ) -> None:
        self._options, self._rank, self._hosts, self._rows, self._nodes = options, rank, hosts, every, nodes

    def tell(self, new: Sequence[Row]) -> None:
        """Say each row as soon as it is known, where somebody reads along."""
        self._rows += [row for row in new if row not in self._rows]
        if self._rank == 0 and not self._options.json:
            for row in new:
                mark = f"{row.name}: {row.verdict} ({row.seconds:.1f} s)"
                print(mark, file=sys.stderr, flush=True)

    def lost(self, text: str, code: int) -> None:
        """Tell what was found until another process was lost."""
        remedy = "see the output of that process, and of its machine"
        row = make_failure("all processes live", text, remedy, code, processes=find_processes(text))
        self._rows.append(row)
        self.finish(code)

    def finish(self, code: int) -> None:
        """Print the table or the JSON, and write the files."""
        if self._rank:
            return
        unfit = verdicts.unfit_nodes(self._rows, self._nodes)
        data = {"rows": verdicts.to_json(self._rows), "exit_code": code, "unfit_nodes": unfit}
        print(json.dumps(data) if self._options.json else f"\n{verdicts.table_of_rows(self._rows)}\n", flush=True)
        if not self._options.json:
            good = "ok: these processes can run pipelines"
            bad = next((row for row in self._rows if row.verdict == verdicts.FAILED), None)
            print(good if bad is None else f"FAILED: {bad.name}: {bad.measured}", flush=True)
            if unfit:
                print(f"unfit nodes: {', '.join(unfit)}", flush=True)
        if self._options.unfit and unfit:
            _write("--unfit", self._options.unfit, "".join(f"{node}\n" for node in unfit))
        if self._options.report:
            report = verdicts.without_names(data, [*self._hosts, *self._nodes])
            _write("--report", self._options.report, json.dumps(report, indent=1) + "\n")


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"multimesh: {flag} {path}: {error.strerror}", file=sys.stderr)
