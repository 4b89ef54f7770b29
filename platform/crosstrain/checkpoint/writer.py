"""The one process that writes to a run in a bucket.

Each start of a run puts `.writers/N`, with the next number N, unless somebody else has: so one of several wins, and a
higher number ends the right of a lower one. The writer renews its object; one that is neither renewed nor ended belongs
to a process that was killed.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, UserError
from crosstrain.utils.logging import log

RENEWAL = 10.0  # seconds between two renewals
_LEASE = 6  # renewals that a process misses before it counts as killed
_FOLDER, _NUMBER = ".writers", re.compile("[0-9]{6,18}")
_LONGEST = 1 << 16  # bytes of an object that are read


@dataclass
class Writer:
    """A claim to the folder of a run at `url`."""

    url: str
    number: int
    id: str
    before: str | None  # id of the writer before it
    renewals: int = 0

    @staticmethod
    def claim(url: str, killed: str | None) -> Writer:
        """Become the writer. Waits while the last one may be alive, unless it is known, by its id, to be `killed`.

        A damaged claim may be that of a living process, which would renew it. Raises UserError, which names the other
        process, where it is alive or quicker.
        """
        number, text, last = _last(url)
        seconds = _LEASE * RENEWAL
        if number and not last.get("ended") and (not last or last["id"] != killed):
            log.info("%s: waiting up to %.0f s to see if %s is alive", url, seconds, _name(last))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(min(1.0, seconds / 10))
                now, changed, last = _last(url)
                if last.get("ended"):
                    number = now
                    break
                if (now, changed) != (number, text):
                    raise _refusal(url, last)
        writer = Writer(url, number + 1, uuid.uuid4().hex, last.get("id"))
        if not storage.create(writer._object, writer._text()):
            raise _refusal(url, _last(url)[2])
        for name in storage.listing(storage.join(url, _FOLDER)):
            if name != f"{writer.number:06d}":
                storage.remove(storage.join(url, _FOLDER, name))
        return writer

    def renew(self, ended: bool = False) -> None:
        self.renewals += 1
        storage.write(self._object, self._text(ended))

    @property
    def _object(self) -> str:
        return storage.join(self.url, _FOLDER, f"{self.number:06d}")

    def _text(self, ended: bool = False) -> bytes:
        who = {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "user": getpass.getuser()}
        state = {"number": self.number, "renewal": RENEWAL, "renewals": self.renewals, "ended": ended}
        return json.dumps(who | state).encode()


def check(url: str, writer: str) -> None:
    """Raise CheckpointError where another process than `writer`, given by its id, is now the run's writer."""
    deadline = time.monotonic() + 2 * RENEWAL
    while not (last := _last(url)[2]) and time.monotonic() < deadline:
        time.sleep(RENEWAL / 10)  # the last claim is damaged or deleted, and its process is about to renew it
    if last.get("id") != writer:
        raise CheckpointError(f"{_name(last)} has taken over {url}")


def _last(url: str) -> tuple[int, bytes, dict[str, Any]]:
    """Return the number, the text and the contents of the last claim: 0 where there is none, {} for a damaged one."""
    claims = storage.listing(storage.join(url, _FOLDER))
    numbers = [int(name) for name, size in claims.items() if size is not None and _NUMBER.fullmatch(name)]
    number, text, found = max(numbers, default=0), b"", None
    with suppress(FileNotFoundError, ValueError, RecursionError):  # removed meanwhile; damaged
        text = storage.read_end(storage.join(url, _FOLDER, f"{number:06d}"), _LONGEST, first=True)
        found = json.loads(text)
    if not isinstance(found, dict) or (type(found.get("id")), type(found.get("ended"))) != (str, bool):
        found = {}
    # A claim with a different number is a copy of an earlier one. Early releases wrote no number.
    return number, text, found if found.get("number", number) == number else {}


def _refusal(url: str, other: dict[str, Any]) -> UserError:
    return UserError(f"run.output_dir: {_name(other)} is training in {url}; choose another folder")


def _name(other: dict[str, Any]) -> str:
    if not other:
        return f"a process that a damaged object in {_FOLDER} does not name"
    return "process {pid} of {user} on {host}".format_map({"pid": "?", "user": "?", "host": "?"} | other)
