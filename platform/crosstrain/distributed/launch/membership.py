"""A worker's membership in a run whose workers may change; `current` is None in all other runs.

A run with changing workers is a sequence of *epochs*. In an epoch, the number of ranks is fixed. An epoch ends when a
worker is lost, or at the end of a step when a new worker waits. Every worker then calls `Membership.enter`, and the
launcher starts the next epoch when all of them wait.
"""

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from crosstrain.distributed.launch.worker_errors import is_lost_peer
from crosstrain.utils.errors import RankLost

BEAT = 1.0  # seconds between signs of life

current: "Membership | None" = None


@dataclass(frozen=True)
class Epoch:
    """The ranks of an epoch, as one worker sees them."""

    number: int
    rank: int
    size: int
    port: int  # of the store where the ranks meet
    reason: str  # the reason for the change; empty for the first epoch


class Regroup(Exception):
    """This epoch is over. Raised on every rank that goes on."""


class Membership:
    """The connection of this worker to its launcher."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.epoch = Epoch(0, 0, 0, 0, "")
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def say(self, message: str, value: Any = None) -> None:
        with self._lock:
            self._connection.send((message, value))

    def _beat(self) -> None:
        with suppress(OSError):  # the launcher has ended
            while True:
                time.sleep(BEAT)
                self.say("beat")

    @property
    def ends_epoch(self) -> bool:
        """True if the launcher wants a new epoch at the end of this step, because another worker waits."""
        return self._connection.poll()

    def enter(self, part: str | None = None) -> Epoch:
        """Wait for an epoch that includes this worker, and put its address into the environment.

        part: identifies the part of the run's state that this worker holds; None: it holds no state.
        """
        self.say("waiting", part)
        epoch: Epoch | None = None
        while epoch is None:
            epoch = self._connection.recv()  # None is the wish for a new epoch, which this call already grants
        os.environ |= {
            "RANK": str(epoch.rank),
            "WORLD_SIZE": str(epoch.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(epoch.port),
            # The launcher has a new store for each epoch.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "crosstrain",
        }
        self.epoch = epoch
        return epoch


def ends_only_the_epoch(error: Exception) -> bool:
    """Return True if this worker can go on after `error`: another worker was lost."""
    return current is not None and (isinstance(error, RankLost) or is_lost_peer(str(error)))
