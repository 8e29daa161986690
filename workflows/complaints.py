"""Reads the complaints of programs. No other module reads the English of git, pip, apt and engines."""

from __future__ import annotations

import re

from workflows import errors

_NETWORK = re.compile(
    r"could ?n.t (resolve|connect)|could not (resolve|connect)|(failed|unable) to (connect|establish a new connection)|"
    r"connection (refused|reset|timed out|aborted|broken)|reset by peer|recv failure|transfer closed|empty reply|"
    r"rpc failed|\beof\b|broken pipe|timed out|(i/o|handshake|connect|operation) timeout|deadline exceeded|too slow|"
    r"no route to host|network is unreachable|no such host|temporary failure|name resolution|remote end hung up|"
    r"(unable|failed) to fetch|"
    r"unexpected disconnect|curl (18|56)|could not read from remote|max retries|proxyerror|newconnectionerror|"
    r"certificate (verify failed|problem|signed by unknown)|tls: failed to verify|too ?many ?requests|"
    r"(status|http|error|code):? (429|50[0234])\b|\b50[0234] (internal|bad|service|gateway|server)|server error|"
    r"unexpected status from \w+ request to \S+ (429|50[0234])\b|"
    r"service unavailable|blob upload (unknown|invalid)",
    re.IGNORECASE,
)
_FULL = re.compile(r"no space left|disk quota", re.IGNORECASE)
OTHER_FILES = re.compile(r"do not match the hashes", re.IGNORECASE)


def network_failed(said: str) -> bool:
    """Say whether the network is at fault, or a server that may answer later."""
    return _NETWORK.search(said) is not None


def disk_full(said: str) -> bool:
    """Say whether a disk is full."""
    return _FULL.search(said) is not None


def of_pip(said: str, label: str) -> errors.WorkflowsError | None:
    """Return the meaning of a failed pip's complaint, if it is known."""
    if OTHER_FILES.search(said):
        return errors.IntegrityError(
            f"{label}: the package index offers other files than the locked ones; do not use them"
        )
    if disk_full(said):
        return errors.DiskError(f"{label}: the disk is full; free some space and run the same command again")
    if network_failed(said):
        return errors.NetworkError(f"{label}: the package index cannot be reached; check the network and run again")
    return None


def shortened(said: str, most: int = 600) -> str:
    """Return a complaint that fits into an error: of a long one both ends, for reasons come last."""
    return said if len(said) <= most else f"{said[: most // 3]} ... {said[-most * 2 // 3 :]}"
