"""Who the processes of a job are, and in what they differ."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Member = dict[str, Any]  # rank, count, host, pid, machine; facts must be alike: name to a list of words


def name_of(member: Mapping[str, Any]) -> str:
    """Name a process, as in all messages."""
    return f"process {member['rank']} of {member['count']} ({member['host']}, pid {member['pid']})"


def machine() -> str:
    """Return a name of this machine and its process numbers, alike in processes that see each other; empty if none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def neighbors(members: Sequence[Member]) -> dict[int, int]:
    """Map processes that share a machine to the next one there, in a ring."""
    rooms: dict[str, list[int]] = {}
    for member in members:
        rooms.setdefault(member["machine"] or str(member["rank"]), []).append(member["rank"])
    return {
        rank: ranks[(place + 1) % len(ranks)]
        for ranks in rooms.values()
        if len(ranks) > 1
        for place, rank in enumerate(ranks)
    }


def difference(members: Sequence[Member]) -> str:
    """Say in which facts processes differ, and which processes; empty if they do not.

    A word may differ if it holds the process's own number or host, as in ``train.py 3`` and ``--log=/tmp/3.log``. Those
    whose facts were forgotten are `alike`.
    """
    first, *others = members
    said = []
    for fact, mine in first["facts"].items():
        odd = [other for other in others if "facts" in other and not _alike(first, other, fact)]
        if odd:
            theirs = odd[0]["facts"].get(fact, [])
            a, b = _without(mine, first, theirs, odd[0]), _without(theirs, odd[0], mine, first)
            if not a and not b:  # another order
                a, b = mine, theirs
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            said.append(f"{fact}: {name_of(first)} has {_quote(a)} where {name_of(odd[0])}{more} has {_quote(b)}")
    return "; ".join(said)


def alike(a: Member, b: Member) -> bool:
    """Return whether two processes have the same facts, but for words that hold their own number or host."""
    return all(_alike(a, b, fact) for fact in a["facts"])


def _alike(a: Member, b: Member, fact: str) -> bool:
    mine, theirs = a["facts"][fact], b["facts"].get(fact, [])
    same_length = len(mine) == len(theirs)
    return same_length and all(x == y or _neutral(x, a) == _neutral(y, b) for x, y in zip(mine, theirs, strict=True))


def _neutral(word: str, member: Member) -> str:
    return re.sub(rf"(?<!\d){member['rank']}(?!\d)", "<rank>", word).replace(member["host"], "<host>")


def _without(words: Sequence[str], of: Member, others: Sequence[str], other: Member) -> list[str]:
    """Return the words that one process has and another lacks."""
    neutral = {_neutral(word, other) for word in others}
    return [word for word in words if word not in others and _neutral(word, of) not in neutral]


def _quote(words: Sequence[str]) -> str:
    text = " ".join(words)
    return repr(text if len(text) <= 300 else text[:300] + "...") if words else "nothing"


def is_member(said: Any) -> bool:
    """Return whether a message comes from a process of a job, not from a stranger."""
    if not isinstance(said, dict):
        return False
    kinds = {"rank": int, "count": int, "pid": int, "host": str, "machine": str, "facts": dict}
    if any(type(said.get(name)) is not kind for name, kind in kinds.items()) or not 0 <= said["rank"] < said["count"]:
        return False
    lists = said["facts"].values()
    return all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists)
