"""The one process that writes to a run in a bucket.

Each start of a run puts `.writers/N`, with the next number N, unless somebody else has: so one of several wins, and a
higher number ends the right of a lower one. The writer renews its object; one that is neither renewed nor ended belongs
to a process that was killed.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, UserError
from crosstrain.utils.logging import log

RENEWAL = 10.0  # seconds between two renewals
_LEASE = 6  # renewals that a process misses before it counts as killed
_FOLDER = ".writers"


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

        Raises UserError, which names the other process, where it is alive or quicker.
        """
        number, last = _last(url)
        seconds = _LEASE * last.get("renewal", RENEWAL)
        if number and last["id"] != killed and not last.get("ended"):
            log.info("%s: waiting up to %.0f s to see if %s is alive", url, seconds, _name(last))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(min(1.0, seconds / 10))
                now = _last(url)
                if now[1].get("ended"):
                    number, last = now
                    break
                if now != (number, last):
                    raise _refusal(url, now[1])
        writer = Writer(url, number + 1, uuid.uuid4().hex, last.get("id"))
        if not storage.create(writer._object, writer._text()):
            raise _refusal(url, _last(url)[1])
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
        return json.dumps(who | {"renewal": RENEWAL, "renewals": self.renewals, "ended": ended}).encode()


def check(url: str, writer: str) -> None:
    """Raise CheckpointError where another process than `writer`, given by its id, is now the run's writer."""
    _, last = _last(url)
    if last.get("id") != writer:
        raise CheckpointError(f"{_name(last)} has taken over {url}")


def _last(url: str) -> tuple[int, dict[str, Any]]:
    """Return the number and the contents of the last claim; 0 where there is none."""
    numbers = [int(name) for name in storage.listing(storage.join(url, _FOLDER)) if name.isdecimal()]
    if not numbers:
        return 0, {}
    found = json.loads(storage.read(storage.join(url, _FOLDER, f"{max(numbers):06d}")))
    return max(numbers), found


def _refusal(url: str, other: dict[str, Any]) -> UserError:
    return UserError(f"run.output_dir: {_name(other)} is training in {url}; choose another folder")


def _name(other: dict[str, Any]) -> str:
    return "process {pid} of {user} on {host}".format_map({"pid": "?", "user": "?", "host": "?"} | other)
