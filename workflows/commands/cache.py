"""The command ``cache``, which ``docker/start-cache.sh`` calls."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path

from workflows import errors
from workflows.cache import server
from workflows.helping import Subparsers, command
from workflows.image import digests


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    doors = [f"docker/start-cache.sh{options}" for options in ("", " status", " --max-size 100G")]
    text = "a Bazel cache that containers and checkouts of this machine share"
    add = command(subparsers, "cache", run, text, doors, prog="docker/start-cache.sh").add_argument
    text = "start: does nothing if it runs (default); stop: entries stay"
    add("action", nargs="?", default="start", choices=("start", "stop", "status"), help=text)
    add("--host", default=server.DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=server.DEFAULT_PORT, help="of HTTP (default: %(default)s)")
    add("--grpc-port", type=int, default=server.DEFAULT_GRPC_PORT, metavar="PORT", help="(default: %(default)s)")
    add("--max-size", default=server.DEFAULT_SIZE, metavar="SIZE", help="bound, e.g. 50G or 1T (default: %(default)s)")
    add("--folder", type=Path, help="where entries lie (default: ~/.cache/multimesh-jax/bazel)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Do one action; exit 1 where ``status`` finds no running server."""
    if importlib.util.find_spec("requests") is None:
        raise errors.CacheError("there is no .venv with the tools for a cache; run ./bootstrap.sh --group image")
    place = server.Place(Path(os.path.abspath(args.folder))) if args.folder else server.default_place()
    if args.action == "start":
        pin = digests.load(Path(__file__).resolve().parents[2]).images["bazel-remote"]
        asked = server.Settings(args.host, args.port, args.grpc_port, server.parse_size(args.max_size))
        started = server.start(place, asked, pin.exact if pin.digest else None)
        return _show(place, args.json, "started" if started else "runs already")
    if args.action == "stop":
        stopped = server.stop(place)
        return _show(place, args.json, "stopped" if stopped else "was not running", wanted="stopped")
    return _show(place, args.json, "")


def _show(place: server.Place, as_json: bool, done: str, wanted: str = "running") -> int:
    status = server.status(place)
    if as_json:
        print(json.dumps({"folder": str(place.root), "done": done or None, **asdict(status)}, indent=1))
    else:
        had = status.settings
        address, bound = (had.address, f"{had.max_gib} GiB") if had else ("-", "-")
        print(f"{f'{done}; ' if done else ''}state {status.state}, address {address}")
        print(f"{status.used_bytes / 2**30:.1f} GiB of {bound} in {place.root}")
        if status.state == "running":
            print(f"use it: bazel --bazelrc={place.bazelrc} build ...")
    return 0 if status.state == wanted else 1
