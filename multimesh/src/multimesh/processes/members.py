"""Who the processes of a job are, and in what they differ. It needs the standard library only, as `watcher` does."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

Member = dict[str, Any]  # rank, count, host, pid; facts must be alike: name to a list of words


def named(member: Mapping[str, Any]) -> str:
    """Name a process, as in all messages."""
    return f"process {member['rank']} of {member['count']} ({member['host']}, pid {member['pid']})"


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
            said.append(f"{fact}: {named(first)} has {_quoted(a)} where {named(odd[0])}{more} has {_quoted(b)}")
    return "; ".join(said)


def alike(a: Member, b: Member) -> bool:
    """Whether two processes have the same facts, but for words that hold their own number or host."""
    return all(_alike(a, b, fact) for fact in a["facts"])


def _alike(a: Member, b: Member, fact: str) -> bool:
    mine, theirs = a["facts"][fact], b["facts"].get(fact, [])
    same_length = len(mine) == len(theirs)
    return same_length and all(x == y or _neutral(x, a) == _neutral(y, b) for x, y in zip(mine, theirs, strict=True))


def _neutral(word: str, member: Member) -> str:
    return re.sub(rf"(?<!\d){member['rank']}(?!\d)", "<rank>", word).replace(member["host"], "<host>")


def _without(words: Sequence[str], of: Member, others: Sequence[str], other: Member) -> list[str]:
    """The words that one process has and another lacks."""
    neutral = {_neutral(word, other) for word in others}
    return [word for word in words if word not in others and _neutral(word, of) not in neutral]


def _quoted(words: Sequence[str]) -> str:
    text = " ".join(words)
    return repr(text if len(text) <= 300 else text[:300] + "...") if words else "nothing"


def is_member(said: Any) -> bool:
    """Whether these are the words of a watcher, not of a stranger."""
    if not isinstance(said, dict):
        return False
    kinds = {"rank": int, "count": int, "pid": int, "host": str, "facts": dict}
    if any(type(said.get(name)) is not kind for name, kind in kinds.items()) or not 0 <= said["rank"] < said["count"]:
        return False
    lists = said["facts"].values()
    return all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists)


def folded(hosts: Sequence[str]) -> str:
    """Hosts in few characters: of names that count up only the differences."""
    rows, before = [], ""
    for host in hosts:
        (around, digits), (around_before, digits_before) = _cut(host), _cut(before)
        counts = around == around_before and len(digits) == len(digits_before)
        rows.append(f"+{int(digits or 0) - int(digits_before or 0)}" if counts else f"={host}")
        before = host
    return base64.b64encode(zlib.compress(json.dumps(rows).encode(), 9)).decode()


def unfolded(text: str) -> list[str]:
    """The hosts of `folded`."""
    hosts = [""]
    for row in json.loads(zlib.decompress(base64.b64decode(text))):
        (before, after), digits = _cut(hosts[-1])
        next_ = f"{int(digits or 0) + int(row[1:]):0{len(digits)}d}" if row[0] == "+" and digits else ""
        hosts.append(row[1:] if row[0] == "=" else f"{before}{next_}{after}")
    return hosts[1:]


def _cut(host: str) -> tuple[tuple[str, str], str]:
    """What is around the last number in a host's name before the first dot, and this number."""
    match = re.match(r"([^.]*?)(\d{1,9})([^\d.]*(?:\..*)?)$", host, re.ASCII | re.DOTALL)
    return ((match[1], match[3]), match[2]) if match else ((host, ""), "")
