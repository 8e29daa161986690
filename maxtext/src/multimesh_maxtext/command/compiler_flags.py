"""Flags of ``maxtext/run.py`` for compilers: XLA's, dumps, those of MultiMesh, and those of the original's runtime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from multimesh_maxtext.command.values import XLA_SWITCHES, XLA_THRESHOLDS, count


def switch(group: Any, flag: str, text: str) -> None:
    """Add ``--X`` and ``--no-X``; ``None`` where neither is given."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)


def _xla(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("XLA", "for GPUs; thresholds are bytes")
    add = group.add_argument
    text = "overlap matrix products from this size with the gather or scatter of their operands (default: do not)"
    add("--collective-matmul", type=count(0), metavar="MIB", help=text)
    for name, (text, _) in XLA_SWITCHES.items():
        switch(group, f"--{name.replace('_', '-')}", f"{text} (default on)")
    for name, (operations, size, _) in XLA_THRESHOLDS.items():
        text = f"combine {operations} up to this size (default {size})"
        add(f"--{name.replace('_', '-')}", type=count(0), metavar="BYTES", help=text)


def _dumps(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("dumps")
    add = group.add_argument
    text = "write the plan of the step here, as text, JSON, SVG and for Perfetto (multimesh); else XLA's programs"
    add("--dump", type=Path, metavar="DIR", help=text)
    switch(group, "--dump-all-passes", "with --dump: also XLA's programs, after every pass of XLA (large)")
    switch(group, "--dump-mpmd-passes", "with --dump: also the plan after every pass of MultiMesh (for pipelines)")
    switch(group, "--dump-only", "with --dump: compile, dump, do not train (backend multimesh)")
    add("--dump-hlo", action="store_true", help="with --dump: also XLA's programs, as HLO text")
    text = "compile this HLO module, as text, for the devices of this process, print its memory, and end"
    add("--hlo", type=Path, metavar="FILE", help=text)


def _compiler(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group("compiler options of --backend multimesh", "for pipelines: contexts of MultiMesh")
    switch(group, "--autoshard", "derive layouts that the model leaves open from its sharding constraints (default on)")
    text = (
        "keep each parameter that has fewer elements than a batch has tokens whole on every device of its stage "
        "(default off)"
    )
    switch(group, "--replicate-small-params", text)
    switch(group, "--fuse-tasks", "make one kernel of the tasks that a stage runs one after the other (default on)")
    switch(group, "--only-fuse-loop-tasks", "... only inside the microbatch loop (default off)")


def _realm(root: argparse.ArgumentParser) -> None:
    group = root.add_argument_group(
        "flags of the original's runtime",
        "accepted, so that its scripts run unchanged, and named in a warning: they have no effect here",
    )
    add = group.add_argument
    for flag, metavar, text in (
        ("--zcmem", "GB", "pinned host memory"),
        ("--sysmem", "GB", "host memory"),
        ("--host-offload-min-reuse-distance", "N", "offload values that rest for this many tasks; see --remat"),
        ("--compile-topology-num-slices", "N", "for MaxText's train_compile, which does not run here"),
    ):
        add(flag, type=count(0), metavar=metavar, help=text)
    add("--network", choices=("none", "gasnetex", "ucx"), help="network layer; JAX finds its own")
    for flag, text in (
        ("--hoist-loop-convert", "convert parameters once, before the microbatch loop"),
        ("--load-balance-embeddings", "embed and make logits on all devices; they are on the first and the last stage"),
        ("--load-balance-decoder-norm", "the final norm on other devices than those of the last stage"),
    ):
        switch(group, flag, text)
    text = "eager allocation; likewise all flags like -ll:gpu, -lg:prof, -logfile and -level, with their values"
    add("--eager-*", dest="realm", metavar="VALUE", help=text)


GROUPS = (_xla, _dumps, _compiler, _realm)
"""Each adds its group to a parser, in the order of the help."""
