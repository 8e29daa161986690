"""The environment of git here: no configuration but ours, no hooks, no prompts, only the listed transports."""

from __future__ import annotations

import os

SCHEMES = ("https", "http", "ssh", "git", "file")
_SETTINGS = {
    "advice.detachedHead": "false",
    "checkout.workers": "0",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.fsync": "none",  # a tree that a power cut spoils is fetched again; the verified hash tells
    "core.hooksPath": os.devnull,
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.quotePath": "false",
    "core.untrackedCache": "true",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "fastimport.unpackLimit": "1",
    "fetch.unpackLimit": "1",  # a pack appears whole or not at all, so a killed fetch leaves no half of a tree
    "gc.auto": "0",
    "http.followRedirects": "initial",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "init.defaultBranch": "patched",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "transfer.fsckObjects": "true",
} | {f"protocol.{scheme}.allow": "always" for scheme in SCHEMES}


def environment(directory: str) -> dict[str, str]:
    """Return the environment of a git process that works in ``directory``."""
    kept = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in kept}
    # A clone that is mounted into a container belongs to another user there; this directory is one that we made.
    settings = [*_SETTINGS.items(), ("safe.directory", directory)]
    for number, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return env | {
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        "GIT_CEILING_DIRECTORIES": os.path.dirname(directory),
        "GIT_NO_REPLACE_OBJECTS": "1",
        "LC_ALL": "C",
    }
