"""Flags of ``python -m multimesh suggest``."""

from __future__ import annotations

import argparse
from pathlib import Path

from multimesh import schedules
from multimesh.commands import values
from multimesh.hardware import devices, software
from multimesh.hardware.devices import PRECISIONS
from multimesh.planner import models
from multimesh.planner.configuration import RECOMPUTE, SHARDED

ABOUT = """\
  python -m multimesh suggest --model llama3-70b --nodes 8
  python -m multimesh suggest --model deepseek-v3 --nodes 128 --sequence-length 4096 --batch-size 8192 --html page.html
  python -m multimesh suggest --params 70e9 --nodes 8 --tp 8
  python -m multimesh suggest --model llama3-8b --nodes 16 --device h100,b200 --tokens 15e12 --price 2.5

Find the fastest ways to spread the training of a transformer over a cluster: axes of the mesh, schedule, microbatch,
recomputation, layers of the stages. What a flag fixes stays. Seconds are forecasts, with the band in which measured
runs of sources lay that the forecast had not seen. Needs neither devices nor JAX. maxtext/run.py --suggest does the
same for MaxText's models."""

EXIT_CODES = """\
    0  there are configurations that fit
    2  flags that do not fit together, or a budget that no number of these devices reaches
   16  no configuration fits into memory"""


def add(command: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    _model(command.add_argument_group("model"))
    _cluster(command.add_argument_group("cluster and batch"))
    _add_constraints(command.add_argument_group("what stays as you say; all else is searched"))
    _bill(command.add_argument_group("the bill"))
    add = command.add_argument_group("output").add_argument
    text = "draw memory against the time of a step, as SVG"
    add("--picture", type=values.file, metavar="FILE", help=text)
    text = "write a page: the picture, parts of steps, timeline, bill"
    add("--html", type=values.file, metavar="FILE", help=text)
    add("--json", action="store_true", help="one JSON object instead of the table")


def _model(model: argparse._ArgumentGroup) -> None:
    add = model.add_argument
    text = f"a file config.json of Hugging Face or its folder, or one of {', '.join(models.names())}"
    add("--model", metavar="NAME", help=text)
    for flag, text in (
        ("--layers", "decoder layers"),
        ("--hidden", "width of the model"),
        ("--ffn", "width of the MLP, of each expert (default: 4 x hidden)"),
        ("--heads", "heads of attention"),
        ("--kv-heads", "heads of keys and values (default: as --heads)"),
        ("--vocab", "tokens of the vocabulary"),
    ):
        add(flag, type=values.positive, metavar="N", help=text)
    for flag, text in (("--experts", "experts of a layer"), ("--active", "experts that a token passes")):
        add(flag, type=values.positive, default=0, metavar="N", help=text)
    add("--plain-mlp", action="store_true", help="the MLP has no gate: two matrices in place of three")
    add("--tied", action="store_true", help="the head is the embedding transposed")
    text = "parameters, where no more is known: 70e9; the band is wider then"
    add("--params", type=values.time, metavar="N", help=text)
    add("--name", metavar="NAME", help="for the title")


def _cluster(cluster: argparse._ArgumentGroup) -> None:
    add = cluster.add_argument
    text = f"{', '.join(devices.device_names())}; several are compared; default h100"
    add("--device", default="h100", metavar="NAME[,NAME]", help=text)
    add("--devices-file", type=Path, metavar="FILE", help="TOML file of further devices")
    text = "that a device sends to other nodes in a second: 25e9"
    add("--network", type=values.amount, metavar="BYTES", help=text)
    text = "what runs it: " + "; ".join(f"{name}: {software.stack(name).about}" for name in software.stack_names())
    text += " (default: modern, and maxtext-tpu on TPUs)"
    add("--software", choices=software.stack_names(), metavar="NAME", help=text)
    text = "JSON file of a run of yours, to which three constants are fitted"
    add("--calibrate", type=Path, metavar="FILE", help=text)
    text = "GPUs of a node (default: %(default)s)"
    add("--gpus", type=values.positive, default=8, metavar="N", help=text)
    add("--nodes", type=values.positive, default=1, metavar="N", help="default: %(default)s")
    text = "default: %(default)s"
    add("--sequence-length", type=values.positive, default=8192, metavar="N", help=text)
    text = "sequences of a step (default: 2 x devices)"
    add("--batch-size", type=values.positive, metavar="N", help=text)
    text = "of a device that may be used: 72e9 (default: 3/4, as JAX takes)"
    add("--memory", type=values.time, metavar="BYTES", help=text)
    text = "find the fewest nodes up to --nodes that reach so many a second"
    add("--budget", type=values.time, metavar="TOKENS", help=text)


def _add_constraints(fixed: argparse._ArgumentGroup) -> None:
    add = fixed.add_argument
    for name in ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "interleave", "microbatch"):
        add(f"--{name}", type=values.positive, metavar="N")
    text = ", ".join(schedules.names())
    add("--schedule", type=values.schedule, choices=schedules.names(), metavar="NAME", help=text)
    add("--recompute", choices=RECOMPUTE, help="what the backward pass computes again")
    text = "over data parallelism beside the batch (default: optimizer, ZeRO-1)"
    add("--sharded", choices=SHARDED, help=text)
    text = "of products (default bf16); any: all that the device has"
    add("--precision", choices=(*PRECISIONS, "any"), help=text)
    text = "try also activations in the host's memory (default: they are not)"
    add("--offload", action="store_true", help=text)
    text = "of the busiest experts, over the mean"
    add("--load", type=values.at_least(1, float, "a number"), metavar="X", help=text)
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help="default: wherever tp > 1")
    add("--partition", type=values.sizes, metavar="N,N,...", help="layers of each stage")


def _bill(bill: argparse._ArgumentGroup) -> None:
    add = bill.add_argument
    add("--tokens", type=values.amount, metavar="N", help="of the whole training: 15e12")
    text = "of a device for an hour; several are those of --device in turn"
    add("--price", type=_prices, metavar="X[,X]", help=text)
    text = "of a device with its part of hosts, network and cooling (default: 1.5 times its own)"
    add("--power", type=values.amount, metavar="WATTS", help=text)
    text = "failures a day of 1,000 devices, and seconds of a checkpoint: 0.5,60 (default: none)"
    add("--goodput", type=_goodput, metavar="FAILURES,SECONDS", help=text)


def _prices(text: str) -> tuple[float, ...]:
    return tuple(map(values.amount, text.split(",")))


def _goodput(text: str) -> tuple[float, float]:
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"must be failures and seconds, such as 0.5,60, got {text!r}")
    return values.amount(first), values.amount(second)
