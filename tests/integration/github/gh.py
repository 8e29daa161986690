#!/usr/bin/env python3
"""Stands for GitHub's command line: keeps what it is told in the folder GH_KEEPS; nothing without the token."""

import json
import os
import shutil
import sys
from pathlib import Path

TOKEN = "a-token-that-must-not-be-seen"
RIGHTS = {
    "issue": "issues:write",
    "label": "issues:write",
    "release": "contents:write",
}  # of GH_TOKEN, where the job is known
LIMITS = {"--body-file": 65_536, "--notes-file": 125_000}  # of characters, as GitHub has them


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


def text(words: list[str], name: str) -> str:
    return Path(option(words, name)).read_text() if name in words else ""


def main(words: list[str]) -> int:
    if os.environ.get("GH_TOKEN") != TOKEN or "/" not in os.environ.get("GH_REPO", ""):
        print("gh: GH_TOKEN or GH_REPO is missing", file=sys.stderr)
        return 4
    granted = os.environ.get("GH_RIGHTS")
    if granted is not None and RIGHTS.get(words[0], "") not in granted.split():
        print(f"gh: Resource not accessible by integration: {words[:2]} needs {RIGHTS.get(words[0])}", file=sys.stderr)
        return 1
    keeps = Path(os.environ["GH_KEEPS"])
    file = keeps / "told.json"
    told = (
        json.loads(file.read_text()) if file.exists() else {"issues": [], "pulls": [], "releases": [], "comments": []}
    )
    issues = [each for each in told["issues"] if each["state"] == "open"]
    head, body = words[:2], {"title": option(words, "--title"), "body": text(words, "--body-file")}
    for name, most in LIMITS.items():
        if len(text(words, name)) > most:
            print(f"gh: body is too long (maximum is {most} characters)", file=sys.stderr)
            return 1
    if head == ["issue", "list"]:
        print(*(each["number"] for each in issues))
    elif head == ["issue", "create"]:
        told["issues"].append(
            body | {"number": len(told["issues"]) + 1, "state": "open", "label": option(words, "--label")}
        )
    elif head == ["issue", "edit"]:
        issues[0].update(body)
    elif head == ["issue", "close"]:
        issues[0]["state"] = "closed"
        told["comments"].append(option(words, "--comment"))
    elif head == ["pr", "list"]:
        print(*(each["number"] for each in told["pulls"] if each["state"] == "open"))
    elif head == ["pr", "edit"]:
        told["pulls"][int(words[2]) - 1].update(body)
    elif head == ["pr", "create"]:
        made = {"number": len(told["pulls"]) + 1, "state": "open", "head": option(words, "--head")}
        told["pulls"].append(body | made | {"base": option(words, "--base")})
    elif head == ["release", "create"]:
        files = [Path(word) for word in words[3:] if Path(word).is_file() and word != option(words, "--notes-file")]
        for each in files:
            shutil.copy(each, keeps)
        notes = text(words, "--notes-file")
        told["releases"].append(
            {
                "tag": words[2],
                "files": sorted(each.name for each in files),
                "body": notes,
                "generated": "--generate-notes" in words,
            }
        )
    elif head not in (["auth", "setup-git"], ["label", "create"]):
        print(f"gh: {words} is not known here", file=sys.stderr)
        return 1
    file.write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
