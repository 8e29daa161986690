"""The command ``cache``, which ``docker/start-cache.sh`` calls."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from workflows import helping
from workflows.cache import server
from workflows.image import digests


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "cache",
        prog="docker/start-cache.sh",
        **helping.shown(
            "a Bazel cache that containers and checkouts of this machine share",
            "docker/start-cache.sh",
            "docker/start-cache.sh status",
            "docker/start-cache.sh --backend disk --max-size 100G",
        ),
    )
    parser.add_argument(
        "action", nargs="?", default="start", choices=("start", "stop", "status"),
        help="start: does nothing if it runs (default); stop: entries stay",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=server.BACKENDS, default=server.BACKENDS[0],
        help="bazel-remote in a container (default); disk: a folder for the Bazels of this machine, without a server",
    )  # fmt: skip
    parser.add_argument("--host", default=server.DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=server.DEFAULT_PORT, help="(default: %(default)s)")
    parser.add_argument(
        "--max-size",
        default=server.DEFAULT_SIZE,
        metavar="SIZE",
        help="bound, e.g. 500M or 1T (default: %(default)s)",
    )
    parser.add_argument("--folder", type=Path, help="where entries lie (default: ~/.cache/multimesh-jax/bazel)")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="ask clients for the password in this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Do one action; exit 1 where ``status`` finds no running server."""
    place = server.Place(Path(os.path.abspath(args.folder))) if args.folder else server.default_place()
    if args.action == "start":
        started = server.start(place, _asked(args), _pin())
        return _show(place, args.json, "started" if started else "runs already")
    if args.action == "stop":
        stopped = server.stop(place)
        return _show(place, args.json, "stopped" if stopped else "was not running", wanted="stopped")
    return _show(place, args.json, "")


def _asked(args: argparse.Namespace) -> server.Settings:
    return server.Settings(
        backend=args.backend,
        host=args.host,
        port=args.port,
        max_bytes=server.parse_size(args.max_size),
        password_file=os.path.abspath(args.password_file) if args.password_file else None,
    )


def _pin() -> str | None:
    """Return the locked image of bazel-remote; None while its digest is not known."""
    pin = digests.load(Path(__file__).resolve().parent.parent.parent).images["bazel-remote"]
    return pin.exact if pin.digest else None


def _show(place: server.Place, as_json: bool, done: str, wanted: str = "running") -> int:
    status = server.status(place)
    if as_json:
        print(json.dumps({"folder": str(place.root), "done": done or None, **asdict(status)}, indent=1))
    else:
        address = status.settings.address if status.settings else "-"
        bound = server.shown_size(status.settings.max_bytes) if status.settings else "-"
        backend = status.settings.backend if status.settings else "-"
        print(f"{f'{done}; ' if done else ''}state {status.state}, backend {backend}, address {address}")
        print(f"{server.shown_size(status.used_bytes)} of {bound} in {place.root}; {status.hits or 'no lookups known'}")
        if status.state == "running":
            print(f"use it: bazel --bazelrc={place.bazelrc} build ...")
    return 0 if status.state == wanted else 1
