"""The command ``cache``, which ``docker/start-cache.sh`` calls."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from workflows.cache import server
from workflows.helping import Subparsers, command
from workflows.image import digests


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    doors = [f"docker/start-cache.sh{options}" for options in ("", " status", " --backend disk --max-size 100G")]
    text = "a Bazel cache that containers and checkouts of this machine share"
    add = command(subparsers, "cache", run, text, doors, prog="docker/start-cache.sh").add_argument
    text = "start: does nothing if it runs (default); stop: entries stay"
    add("action", nargs="?", default="start", choices=("start", "stop", "status"), help=text)
    text = "bazel-remote in a container (default); disk: a folder for the Bazels of this machine, without a server"
    add("--backend", choices=server.BACKENDS, default=server.BACKENDS[0], help=text)
    add("--host", default=server.DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=server.DEFAULT_PORT, help="(default: %(default)s)")
    text = "bound, e.g. 500M or 1T (default: %(default)s)"
    add("--max-size", default=server.DEFAULT_SIZE, metavar="SIZE", help=text)
    add("--folder", type=Path, help="where entries lie (default: ~/.cache/multimesh-jax/bazel)")
    add("--password-file", type=Path, metavar="FILE", help="ask clients for the password in this file")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Do one action; exit 1 where ``status`` finds no running server."""
    place = server.Place(Path(os.path.abspath(args.folder))) if args.folder else server.default_place()
    if args.action == "start":
        pin = digests.load(Path(__file__).resolve().parents[2]).images["bazel-remote"]
        started = server.start(place, _asked(args), pin.exact if pin.digest else None)
        return _show(place, args.json, "started" if started else "runs already")
    if args.action == "stop":
        stopped = server.stop(place)
        return _show(place, args.json, "stopped" if stopped else "was not running", wanted="stopped")
    return _show(place, args.json, "")


def _asked(args: argparse.Namespace) -> server.Settings:
    password = os.path.abspath(args.password_file) if args.password_file else None
    bound = server.parse_size(args.max_size)
    return server.Settings(args.backend, args.host, args.port, max_bytes=bound, password_file=password)


def _show(place: server.Place, as_json: bool, done: str, wanted: str = "running") -> int:
    status = server.status(place)
    if as_json:
        print(json.dumps({"folder": str(place.root), "done": done or None, **asdict(status)}, indent=1))
    else:
        had, backend, address, bound = status.settings, "-", "-", "-"
        if had is not None:
            backend, address, bound = had.backend, had.address, server.shown_size(had.max_bytes)
        print(f"{f'{done}; ' if done else ''}state {status.state}, backend {backend}, address {address}")
        used = server.shown_size(status.used_bytes)
        print(f"{used} of {bound} in {place.root}; {status.hits or 'no lookups known'}")
        if status.state == "running":
            print(f"use it: bazel --bazelrc={place.bazelrc} build ...")
    return 0 if status.state == wanted else 1
