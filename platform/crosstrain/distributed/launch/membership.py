"""A worker's membership in a run that our launcher started.

A run is a sequence of *epochs*. In an epoch, the number of ranks is fixed. An epoch ends when a worker is lost, or when
one is added. With `run.on_lost_rank: continue`, every worker then calls `Membership.enter`, and the launcher starts the
next epoch when all of them wait; `current` is None in all other runs, in which the launcher starts new workers.
"""

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from crosstrain.distributed.launch.worker_errors import is_lost_peer
from crosstrain.utils.errors import RankLost

BEAT = 1.0  # seconds between signs of life

current: "Membership | None" = None
news = ""  # the reason for the current epoch; empty for the first one


@dataclass(frozen=True)
class Epoch:
    """The ranks of an epoch, as one worker sees them."""

    number: int
    rank: int
    size: int
    address: str  # of the store where the ranks meet
    port: int
    news: str  # the reason for the change; empty for the first epoch


class Regroup(Exception):
    """This epoch is over. Raised on every rank that goes on."""


class Membership:
    """The connection of this worker to its launcher."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._orders = SimpleQueue[Epoch | None]()  # None: the wish for a new epoch at the end of a step
        self._apart = False  # as in `enter`
        self.epoch = Epoch(0, 0, 0, "", 0, "")
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    def say(self, message: str, value: Any = None) -> None:
        with self._lock, suppress(OSError):  # the launcher has ended
            self._connection.send((message, value))

    def _listen(self) -> None:
        """Take the launcher's orders, and tell it regularly that this process lives."""
        with suppress(EOFError, OSError):
            while True:
                if not self._connection.poll(BEAT):
                    self.say("beat")
                    continue
                order = self._connection.recv()
                if isinstance(order, str):  # a rank was lost
                    _stop_waiting(order, self._apart)
                else:
                    self._orders.put(order)

    @property
    def ends_epoch(self) -> bool:
        """True if the launcher wants a new epoch at the end of this step, because another worker waits."""
        return not self._orders.empty()

    def enter(self, part: str | None = None, apart: bool = False) -> Epoch:
        """Wait for an epoch that includes this worker, and put its address into the environment.

        part: identifies the part of the run's state that this worker holds; None: it holds no state. apart: ranks take
        some steps without each other, so they finish such a step when another rank is lost.
        """
        self._apart = apart
        self.say("waiting", part)
        epoch: Epoch | None = None
        while epoch is None:
            epoch = self._orders.get()  # a wish for a new epoch is already granted by this call
        os.environ |= {
            "RANK": str(epoch.rank),
            "WORLD_SIZE": str(epoch.size),
            "MASTER_ADDR": epoch.address,
            "MASTER_PORT": str(epoch.port),
            # The launcher has a new store for each epoch.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "crosstrain",
            "TORCHELASTIC_RESTART_COUNT": str(epoch.number - 1),
        }
        global news
        self.epoch, news = epoch, epoch.news
        return epoch


def _stop_waiting(lost_address: str, apart: bool) -> None:
    """End this process's collectives that wait for a lost rank, or for a rank that has noticed the loss.

    lost_address: of the machine that was lost with the rank; empty: the machine goes on. apart: as in `enter`.

    NCCL's collectives wait until they are aborted. gloo's end when a connection breaks. Connections to a machine
    without power or network do not break by themselves, and neither do those between ranks that go on. Of two ranks,
    one has accepted the connection between them, so all break when each rank breaks those that it has accepted.
    """
    import psutil  # the command line imports this file before slow imports
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()
    connections = psutil.Process().net_connections("tcp")
    own_ports = set() if apart else {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    for connection in connections:
        accepted = connection.laddr.port in own_ports
        if connection.raddr and (accepted or connection.raddr.ip.removeprefix("::ffff:") == lost_address):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as broken:  # it may be closed by now
                broken.shutdown(socket.SHUT_RDWR)


def ends_only_the_epoch(error: Exception) -> bool:
    """Return True if this worker can go on after `error`: another worker was lost."""
    return current is not None and (isinstance(error, RankLost) or is_lost_peer(str(error)))
