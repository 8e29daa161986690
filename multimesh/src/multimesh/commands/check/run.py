"""The whole check: meet, try each step, tell, and end all processes with one code."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
import os
import re
import socket
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import multimesh as mm
from multimesh.commands.check import machine, rates
from multimesh.commands.check.steps import FAILED, OK, Bench, Row, Step, find_processes
from multimesh.core.text import columns
from multimesh.errors import UsageError
from multimesh.processes import agree, initialize

WIDTH = 110
_PATH = re.compile(r"(?<![\w/.])/(?:[\w.+-]+/)*[\w.+-]+")
_ADDRESS = re.compile(r"\b[1-9]\d{0,2}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*::[0-9a-fA-F:]*\](?::\d+)?")
_TUNING = (
    "NCCL_DEBUG=INFO; or XLA waits until all processes compile the same program: "
    "XLA_FLAGS=--xla_gpu_shard_autotuning=false"
)
_ADVICE = {
    "pull": "let no firewall close ports between the hosts; or try MULTIMESH_TRANSPORT=device_put",
    "device_put": "NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME chooses a network; or try MULTIMESH_TRANSPORT=pull",
}


def steps(quick: bool) -> list[Step]:
    """Return the steps in their order. A step that hangs ends the check, so the simple ones come first."""
    slow = 1.0 if quick else 3.0
    hint = "see the output of each process, CUDA_VISIBLE_DEVICES"
    checks = [
        Step("devices", 60, machine.find_devices, machine.judge_devices, hint),
        Step("GPUs", 60, machine.look_at_gpus, machine.judge_gpus, "nvidia-smi does not answer: drain the node"),
        Step("versions", 30, machine.read_versions, machine.judge_versions),
        Step("shared folder", 30, machine.try_folder, machine.judge_folder, "the folder's server does not answer"),
        Step("products", 60 * slow, rates.products, rates.judge_products, "a device does not answer: nvidia-smi"),
        Step("collectives in stages", 60 * slow, rates.collectives, rates.judge_collectives, _TUNING),
    ]
    for transport, remedy in _ADVICE.items():
        measure, name = partial(rates.measure_transfers, transport), f"transfers by {transport}"
        checks.append(Step(name, 120 * slow, measure, rates.judge_transfers, remedy, remedy))
    return [*checks, Step("plans", 120 * slow, rates.try_training, rates.judge_training, _TUNING)]


def run(options: argparse.Namespace) -> NoReturn:
    """Check as one of the processes of a job; ends this process."""
    start = time.monotonic()
    rows: list[Row] = []
    try:
        job = mm.distributed.initialize(alone=True)
    except UsageError as error:
        if not getattr(error, "told", False):  # else process 0 says so
            remedy = "start all processes alike, and see the output of each"
            row = Row(FAILED, str(error), remedy, error.exit_code, (), "meeting", time.monotonic() - start)
            finish(options, [row], error.exit_code, [])
        sys.stdout.flush()
        os._exit(error.exit_code)
    count, hosts = len(job.hosts), len(set(job.hosts))
    text = f"{count} process{'es' * (count > 1)} on {hosts} host{'s' * (hosts > 1)}, found by {job.launcher}"
    # the node of each process: its name for Slurm, which may be another than that of the machine
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    nodes = agree.decide_together("check: nodes", node.encode(), b"\n".join).decode().split("\n")

    def add(row: Row) -> None:
        rows.append(row)
        if job.rank == 0 and not options.json:
            print(f"{row.name}: {row.verdict} ({row.seconds:.1f} s)", file=sys.stderr, flush=True)

    def tell_loss(text: str, code: int) -> None:
        remedy = "see the output of that process, and of its machine"
        rows.append(Row(FAILED, text, remedy, code, find_processes(text), "all processes live"))
        if job.rank == 0:
            finish(options, rows, code, nodes, job.hosts)

    add(Row(OK, text, name="meeting", seconds=time.monotonic() - start))
    initialize.tell_at_loss(tell_loss)
    bench = Bench(count, options.stages or 0, options.per_stage or 0, options.quick, options.folder.absolute())
    answers = True
    for step in steps(options.quick):
        if answers:
            row, answers = step.run(bench)
            add(row)
    code = next((row.code for row in rows if row.verdict == FAILED), 0)
    if job.rank == 0:
        finish(options, rows, code, nodes, job.hosts)
    if not answers:
        initialize.end_others("a step of the check did not end", code)
    sys.exit(code)


def finish(
    options: argparse.Namespace, rows: Sequence[Row], code: int, nodes: Sequence[str], hosts: Sequence[str] = ()
) -> None:
    """Print the table or the JSON, and write the files. ``nodes``, ``hosts``: those of each process."""
    bad = [row for row in rows if row.verdict == FAILED]
    unfit = sorted({nodes[rank] for row in bad for rank in row.processes if nodes})
    data = {"rows": [dataclasses.asdict(row) for row in rows], "exit_code": code, "unfit_nodes": unfit}
    if options.json:
        print(json.dumps(data), flush=True)
    else:
        verdict = f"FAILED: {bad[0].name}: {bad[0].measured}" if bad else "ok: these processes can run pipelines"
        last = f"\nunfit nodes: {', '.join(unfit)}" if unfit else ""
        print(f"\n{table_of_rows(rows)}\n\n{verdict}{last}", flush=True)
    if options.unfit and unfit:
        _write("--unfit", options.unfit, "".join(f"{node}\n" for node in unfit))
    if options.report:
        report = without_names(data, [*hosts, *nodes])
        _write("--report", options.report, json.dumps(report, indent=1) + "\n")


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"multimesh: {flag} {path}: {error.strerror}", file=sys.stderr)


def table_of_rows(rows: Sequence[Row]) -> str:
    """Draw the rows in lines of at most 110 columns; remedies stand below theirs."""
    names, verdicts, seconds = zip(*((row.name, row.verdict, f"{row.seconds:.1f}") for row in rows), strict=True)
    head, *starts = columns([("what", names), ("", verdicts), ("seconds", seconds)], (0, 1, 2))
    margin, lines = len(head) + 2, [f"{head}  measured"]
    for start, row in zip(starts, rows, strict=True):
        remedy = textwrap.wrap(row.remedy, WIDTH - margin, initial_indent="-> ", subsequent_indent="   ")
        first, *more = [*(textwrap.wrap(row.measured, WIDTH - margin) or [""]), *remedy]
        lines += [f"{start}  {first}".rstrip(), *(f"{'':{margin}}{text}" for text in more)]
    return "\n".join(lines)


def without_names(value: Any, hosts: Sequence[str]) -> Any:
    """Return JSON data without hosts, the user, addresses and paths. A host becomes ``host 0`` and so on."""
    if isinstance(value, Mapping):
        return {key: without_names(item, hosts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(item, hosts) for item in value]
    if not isinstance(value, str):
        return value
    for number, host in sorted(enumerate(dict.fromkeys(hosts)), key=lambda pair: -len(pair[1])):
        value = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", f"host {number}", value)
    value = _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", value))
    try:
        return re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", value)
    except (KeyError, OSError):  # a number that has no name, in a container
        return value
