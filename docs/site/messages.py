"""Every error message that the code can raise, read from its source: no second copy of them can go out of date."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "multimesh": ROOT / "multimesh" / "src" / "multimesh",
    "multimesh_planner": ROOT / "planner" / "src" / "multimesh_planner",
    "multimesh_numerics": ROOT / "numerics" / "src" / "multimesh_numerics",
    "multimesh_maxtext": ROOT / "maxtext" / "src" / "multimesh_maxtext",
    "tooling": ROOT / "tooling",
}
GAP = "\0"  # between a hole's name and the text around it
NOT_FOR_USERS = ("AttributeError", "AssertionError", "TimeoutError", "ConstructorError", "TarError")
LETTERS = 8  # of a message's own; with fewer it is another's text, which is listed where that is written
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")
_REMEDY = re.compile(
    r"(.*)(?:; (?!(?:it|got|the|an?|no|is|was|there|axes|fields|letters|phases|shapes) )"
    r"|: (?=(?:call|choose|drop|give|leave|pip install|reinstall|use|write) ))(.*)",
    re.DOTALL,
)
_CODE = re.compile(  # flags, dotted names, names with underscores, calls, parameters
    r"(?<![\w`/-])(--[a-z][\w-]*=?|[a-z]\w*(?:\.[a-z_]\w*)+(?:\(\))?|[a-z]+_\w+(?:\(\)|=)?"
    r"|[a-z]\w*(?:\(\)|=(?=[\s,;:)]|$)))(?![\w`/-])"
)


@dataclass(frozen=True)
class Message:
    """One message: what is wrong, what to do (empty where the first says it), and the name of its class."""

    kind: str
    text: str

    @property
    def parts(self) -> tuple[str, str]:
        """Return what is wrong and the remedy, which comes last: behind a semicolon, or as an order behind a colon."""
        match = _REMEDY.fullmatch(self.text)
        return (match[1], match[2]) if match else (self.text, "")

    @property
    def cause(self) -> str:
        """Markdown of what is wrong."""
        return plain(self.parts[0])

    @property
    def remedy(self) -> str:
        """Markdown of what to do."""
        return plain(self.parts[1])

    @property
    def pattern(self) -> re.Pattern[str]:
        """What a raised message of this template matches."""
        return re.compile(".*".join(map(re.escape, self.text.split(GAP)[::2])), re.DOTALL)


def collect(package: str) -> Iterator[tuple[str, str, list[Message]]]:
    """Yield name, subject and messages of every module of a package that raises errors, in their order."""
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        collected = [message for node in ast.walk(tree) if isinstance(node, ast.Call) for message in _messages(node)]
        if collected:
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
            about = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            yield name, plain(about), list(dict.fromkeys(collected))
    for path in folder.rglob("complaints.toml"):  # what it says of a program that failed
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["complaint"]
        texts = [(row["error"], re.sub(r"\{(\w+)\}", rf"{GAP}\1{GAP}", row["message"])) for row in rows]
        messages = [Message(kind, text) for kind, text in texts if _has_words(text)]
        yield f"{folder.name}.core.complaints", "What git, pip or a build complains of.", list(dict.fromkeys(messages))


def _messages(call: ast.Call) -> Iterator[Message]:
    kind = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if kind == "refuse" and len(call.args) == 3:
        name, expected = (_template(arg) for arg in call.args[:2])
        yield Message("UsageError", f"{name} must be {expected}, got {GAP}value{GAP}")
    elif (kind.endswith("Error") and kind not in NOT_FOR_USERS) or kind == "Refused":
        for arg in call.args[:1]:
            for choice in (arg.body, arg.orelse) if isinstance(arg, ast.IfExp) else (arg,):
                text = _template(choice)
                if _has_words(text):
                    yield Message(kind, text)


def _has_words(text: str) -> bool:
    return len(re.sub(rf"{GAP}[^{GAP}]*{GAP}|\W", "", text)) >= LETTERS


def _template(node: ast.expr) -> str:
    """Text of an expression; what only a run can know is a hole, with a name, between two gaps."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    if isinstance(node, ast.FormattedValue):
        return _template(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    return f"{GAP}{getattr(node, name).strip('_') if name else '...'}{GAP}"


def plain(text: str) -> str:
    """Markdown that shows a text as it is, on one line: its holes in italics, what looks like code as code."""
    parts = []
    for number, piece in enumerate(" ".join(text.replace("`", "").split()).split(GAP)):
        for code, part in enumerate([piece] if number % 2 else _CODE.split(piece)):
            parts.append(f"`{part}`" if code % 2 else _SPECIAL.sub(r"\\\1", part))
        if number % 2:
            parts[-1] = f"*{parts[-1]}*"
    return "".join(parts)
