"""Ownership of a run in a bucket: only one process may write to the run's folder.

Each start of a run creates the object `.writers/N`, where N is the next free number, on the condition that the object
does not exist yet. If several processes try to create the same object, only one succeeds. Only the object with the
highest number is valid. The writer renews its object at intervals. If an object is neither renewed nor marked as ended,
the process that created the object was killed.
"""

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

RENEWAL = 10.0  # seconds between two renewals of a claim
_LEASE = 6  # number of missed renewals after which a process counts as killed
_FOLDER, _NUMBER = ".writers", re.compile("[0-9]{6,18}")
_LONGEST = 1 << 16  # maximum number of bytes read from an object


@dataclass
class Writer:
    """A claim on the run's folder at `url`."""

    url: str
    number: int
    id: str
    before: str | None  # ID of the previous writer
    renewals: int = 0

    @staticmethod
    def claim(url: str, killed: str | None) -> "Writer":
        """Become the writer. Waits while the previous writer may be alive.

        killed: ID of a writer that is known to have been killed; this method does not wait for that writer. If the last
        claim is damaged, the method waits to see whether a live process renews the claim. Raises UserError, with
        the name of the other process, if that process is alive or claims the folder first.
        """
        number, text, last = _last(url)
        seconds = _LEASE * RENEWAL
        if number and not last.get("ended") and (not last or last["id"] != killed):
            log.info("%s: waiting up to %.0f s to see whether %s is still alive", url, seconds, _name(last))
            deadline, before = time.monotonic() + seconds, (number, text)
            while time.monotonic() < deadline and not last.get("ended"):
                time.sleep(min(1.0, seconds / 10))
                number, text, last = _last(url)
                if (number, text) != before and not last.get("ended"):
                    raise _refusal(url, last)
        writer = Writer(url, number + 1, uuid.uuid4().hex, last.get("id"))
        if not storage.create(writer._object, writer._text()):
            raise _refusal(url, _last(url)[2])
        return writer

    def renew(self, ended: bool = False) -> None:
        self.renewals += 1
        storage.write(self._object, self._text(ended))

    @property
    def _object(self) -> str:
        return storage.join(self.url, _FOLDER, f"{self.number:06d}")

    def _text(self, ended: bool = False) -> bytes:
        return json.dumps(
            {
                "id": self.id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "user": getpass.getuser(),
                "number": self.number,
                "renewal": RENEWAL,
                "renewals": self.renewals,
                "ended": ended,
            }
        ).encode()


def check(url: str, writer: str) -> None:
    """Raise CheckpointError unless `writer` is the ID of the run's current writer."""
    deadline = time.monotonic() + 2 * RENEWAL
    while not (last := _last(url)[2]) and time.monotonic() < deadline:
        time.sleep(RENEWAL / 10)  # the last claim is damaged or deleted; a live writer renews the claim soon
    if last.get("id") != writer:
        raise CheckpointError(f"{_name(last)} has taken over {url}")


def _last(url: str) -> tuple[int, bytes, dict[str, Any]]:
    """Return the last claim: its number (0: no claim), text and contents ({} for a damaged claim)."""
    claims = storage.listing(storage.join(url, _FOLDER))
    numbers = [int(name) for name, size in claims.items() if size is not None and _NUMBER.fullmatch(name)]
    number, text, found = max(numbers, default=0), b"", None
    with suppress(FileNotFoundError, ValueError, RecursionError):  # the claim was removed meanwhile, or is damaged
        text = storage.read_end(storage.join(url, _FOLDER, f"{number:06d}"), _LONGEST, first=True)
        found = json.loads(text)
    if not isinstance(found, dict) or (type(found.get("id")), type(found.get("ended"))) != (str, bool):
        found = {}
    # A claim that contains a different number is a copy of an earlier claim. Early releases stored no number.
    return number, text, found if found.get("number", number) == number else {}


def _refusal(url: str, other: dict[str, Any]) -> UserError:
    return UserError(f"run.output_dir: {_name(other)} is training in {url}; choose a different folder")


def _name(other: dict[str, Any]) -> str:
    if not other:
        return f"an unknown process (its object in {_FOLDER} is damaged)"
    return "process {pid} of {user} on {host}".format_map({"pid": "?", "user": "?", "host": "?"} | other)
