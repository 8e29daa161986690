"""Messages between watchers: framed, proven, and safe from strangers. It needs the standard library only.

A message is a JSON object. A frame has its length, a tag, and the message. Between watchers both ends first send a few
random bytes. From these and the secret of the job each end makes the key of this one connection, and with the key a tag
of each message, its number and its direction. Who lacks the secret can say nothing, nor change, repeat or turn back
what others say. A process and its own watcher have a socket pair to themselves, without tags.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

GREETING = b"MultiMesh watcher 2\n"  # then the random bytes
RANDOM = 16
TAG = 16
FOREIGN = 1 << 20  # bytes of a message of one who has not proved anything yet
LARGEST = 1 << 26
GRACE = 3.0  # seconds in which a process may end by itself
SPARE = 64  # open files besides one for each process

Message = dict[str, Any]

_KINDS = {
    **dict.fromkeys(("failed", "stack", "refused", "hosts"), str),
    **dict.fromkeys(("show", "done", "all_done", "told"), bool),
    **dict.fromkeys(("hello", "first", "cause"), dict),
    **dict.fromkeys(("at", "note"), list),
    "code": int,
}
_CAUSE = {"rank": int, "text": str, "code": int, "said": bool}


def is_message(said: Any) -> bool:
    """Whether a watcher may say this to another one."""
    if not isinstance(said, dict) or any(type(value) is not _KINDS.get(name) for name, value in said.items()):
        return False
    at, note, cause = said.get("at", [0, 0]), said.get("note"), said.get("cause")
    if len(at) != 2 or any(type(number) is not int for number in at):
        return False
    if note is not None and not _is_note(note):
        return False
    if cause is not None and any(type(cause.get(name)) is not kind for name, kind in _CAUSE.items()):
        return False
    return all(0 <= each.get("code", 0) < 256 for each in (said, cause or {}))


def _is_note(said: list[Any]) -> bool:
    """Whether these are the name and the contents of a note."""
    if len(said) != 2 or any(type(each) is not str for each in said):
        return False
    try:
        base64.b64decode(said[1])
    except ValueError:
        return False
    return True


class Line:
    """A connection for messages to and fro. With a ``secret``, perhaps empty, both ends prove that they know it.

    Such a line never waits: what the system does not take at once is kept for `flush`. One without a secret waits,
    until its socket is told not to.
    """

    def __init__(self, link: socket.socket, secret: bytes | None = None, *, hub: bool = False) -> None:
        self.link = link
        self.reset = False  # whether the connection was cut, not ended
        self.proven = secret is None  # whether the other end has proved that it knows the secret
        self._secret, self._hub, self._rest, self._unsent = secret, hub, bytearray(), bytearray()
        self._one_by_one = threading.Lock()
        self._key: bytes | None = None
        self.kept: list[Message] = []  # have arrived, and `receive` returns them first
        self._early: list[bytes] = []  # said before there is a key
        self._sent = self._got = 0
        self._finished = False
        if secret is None:
            link.settimeout(GRACE)
            return
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._random = os.urandom(RANDOM)
        self._push(GREETING + self._random)

    def fileno(self) -> int:
        """The file descriptor, for a selector."""
        return self.link.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; returns whether all has gone. If the other end is gone, reading will tell."""
        return self.send_encoded(encoded(**message))

    def send_encoded(self, message: bytes) -> bool:
        """Send what `encoded` made."""
        if self._secret is not None and self._key is None:
            self._early.append(message)
            return True  # it goes when the other end greets
        return self._push(len(message).to_bytes(4, "big") + self._tag(self._hub, self._sent, message) + message)

    def flush(self) -> bool:
        """Send what the system did not take before; returns whether all has gone."""
        return self._push(b"")

    def _push(self, data: bytes) -> bool:
        with self._one_by_one:
            self._sent += bool(data and self._key)
            self._unsent += data
            try:
                while self._unsent:
                    del self._unsent[: self.link.send(self._unsent)]
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()
            return True

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None at the end. Call it when something has arrived."""
        if self.kept:
            kept, self.kept = self.kept, []
            return kept
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.reset = isinstance(error, ConnectionResetError)
            return None
        self._rest += data
        try:
            return list(self._messages()) if data else None
        except (ValueError, RecursionError):
            return None

    def _messages(self) -> Iterator[Message]:
        """The whole messages among what has arrived. Raises ValueError if a stranger speaks."""
        if self._secret is not None and self._key is None and not self._greeted():
            return
        tag = 0 if self._secret is None else TAG
        while len(self._rest) >= 4:
            size = int.from_bytes(self._rest[:4], "big")
            if size > (LARGEST if self.proven else FOREIGN):
                raise ValueError("too long")
            start, end = 4 + tag, 4 + tag + size
            if len(self._rest) < end:
                return
            text = bytes(self._rest[start:end])
            if not hmac.compare_digest(self._rest[4:start], self._tag(not self._hub, self._got, text)):
                raise ValueError("a wrong tag")
            self._got, self.proven = self._got + 1, True
            del self._rest[:end]
            message = json.loads(text)
            if self._secret is not None and not is_message(message):
                raise ValueError("no message of a watcher")
            yield message

    def _greeted(self) -> bool:
        """Make the key when the other end has greeted; returns whether it has."""
        if self._rest[: len(GREETING)] != GREETING[: len(self._rest)]:
            raise ValueError("no watcher")
        end = len(GREETING) + RANDOM
        if len(self._rest) < end:
            return False
        theirs = bytes(self._rest[len(GREETING) : end])
        del self._rest[:end]
        both = self._random + theirs if self._hub else theirs + self._random
        self._key = hmac.digest(self._secret or b"", both, "sha256")
        early, self._early = self._early, []
        for message in early:
            self.send_encoded(message)
        return True

    def _tag(self, of_hub: bool, number: int, message: bytes) -> bytes:
        if self._key is None:
            return b""
        return hmac.digest(self._key, b"gh"[of_hub : of_hub + 1] + number.to_bytes(8, "big") + message, "sha256")[:TAG]

    def finish(self) -> None:
        """Say that no more messages follow, as soon as all have gone."""
        if not self._finished and self.flush() and not self._early:
            self._finished = True
            with contextlib.suppress(OSError):
                self.link.shutdown(socket.SHUT_WR)


def encoded(**message: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode()


def drain(lines: Iterable[Line], seconds: float) -> None:
    """Wait a short time until the other ends have read all that was said, and gone."""
    open_ = set(lines)
    with selectors.DefaultSelector() as ready:
        for line in open_:
            ready.register(line, selectors.EVENT_READ, line)
        until = time.monotonic() + seconds
        while open_ and time.monotonic() < until:
            for line in open_:
                line.finish()
            for key, _ in ready.select(0.02):
                if key.data.receive() is None:
                    ready.unregister(key.data)
                    open_.discard(key.data)


def allow_files(count: int) -> int:
    """Let this process have a connection to each of ``count`` processes; returns how many open files it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    for limits in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):  # the first needs a privilege
        if soft < limits[0]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                return limits[0]
    return soft
