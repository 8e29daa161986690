"""The part of GitHub's expression language that our workflows use: names, strings, numbers, calls, ``! == != && ||``.

See https://docs.github.com/en/actions/reference/workflows-and-actions/expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>\d+)|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>==|!=|&&|\|\||[!(),]))"
)
_HOLE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}


def evaluate(text: str, context: Mapping[str, Any], calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the value of one expression; what it does not know is an error of the test, not null."""
    return _Reader(_tokens(text), context, calls).whole()


def expand(value: Any, context: Mapping[str, Any], calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Fill the holes of a string, or of every string in a structure."""
    if isinstance(value, dict):
        return {key: expand(each, context, calls) for key, each in value.items()}
    if isinstance(value, list):
        return [expand(each, context, calls) for each in value]
    if not isinstance(value, str):
        return value
    if (whole := _HOLE.fullmatch(value.strip())) and value.count("${{") == 1:
        return evaluate(whole[1], context, calls)
    return _HOLE.sub(lambda hole: text_of(evaluate(hole[1], context, calls)), value)


def text_of(value: Any) -> str:
    """Return a value as it is written into a string."""
    return (
        {True: "true", False: "false", None: ""}.get(value, str(value)) if value in (True, False, None) else str(value)
    )


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None, f"cannot read {text[at:]!r}"
        found.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return found


class _Reader:
    """A reader of one expression, by recursive descent; both sides of an operator are always evaluated."""

    def __init__(self, tokens: list[tuple[str, str]], context: Mapping[str, Any], calls: Mapping[str, Any]) -> None:
        self._tokens, self._context, self._calls = tokens, context, calls

    def whole(self) -> Any:
        value = self._either()
        assert not self._tokens, f"left over: {self._tokens}"
        return value

    def _take(self, *signs: str) -> str | None:
        if self._tokens and self._tokens[0][0] == "sign" and self._tokens[0][1] in signs:
            return self._tokens.pop(0)[1]
        return None

    def _either(self) -> Any:
        value = self._both()
        while self._take("||"):
            other = self._both()
            value = value or other
        return value

    def _both(self) -> Any:
        value = self._compared()
        while self._take("&&"):
            other = self._compared()
            value = value and other
        return value

    def _compared(self) -> Any:
        value = self._single()
        if sign := self._take("==", "!="):
            return (value == self._single()) == (sign == "==")
        return value

    def _single(self) -> Any:
        if self._take("!"):
            return not self._single()
        if self._take("("):
            value = self._either()
            assert self._take(")")
            return value
        kind, word = self._tokens.pop(0)
        if kind == "string":
            return word[1:-1].replace("''", "'")
        if kind == "number":
            return int(word)
        assert kind == "name", word
        if self._take("("):
            arguments = []
            while not self._take(")"):
                arguments.append(self._either())
                self._take(",")
            return self._calls[word](*arguments)
        return _WORDS[word] if word in _WORDS else self._look_up(word)

    def _look_up(self, name: str) -> Any:
        value: Any = self._context
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        assert value is not None or name.split(".")[0] in self._context, f"no context {name}"
        return "" if value is None else value
