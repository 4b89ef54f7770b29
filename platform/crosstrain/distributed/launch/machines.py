"""The machines of a run that goes on when machines are lost.

The launcher on node 0 decides, and the launchers on the other nodes start its workers and forward their messages. All
of them exchange messages through queues of a store on node 0: one queue for events, and one per machine for orders.
"""

import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from crosstrain.distributed.launch.local_workers import Ended, LocalWorkers
from crosstrain.utils.errors import UserError

if TYPE_CHECKING:  # a real import would be circular: the launcher imports this file
    from crosstrain.distributed.launch.launcher import Launch

_EVENTS = "events"
_END = 10.0  # seconds for the other launchers to take the last order
_ANSWER = 10.0  # seconds to wait for an answer of the store on node 0

Event = tuple[int, str, Any]  # slot, message, value


@dataclass
class _Machine:
    """A machine beside node 0."""

    node: int  # its rank
    name: str
    address: str
    queue: str = field(default_factory=lambda: str(uuid.uuid4()))  # for its orders
    heard: float = 0.0  # time of the last sign of life, on the clock of node 0


class Machines:
    """The machines of a run, as the launcher on node 0 sees them."""

    def __init__(self, local: LocalWorkers, how: "Launch") -> None:
        self._local, self._nproc, self._nodes = local, how.nproc_per_node, how.nodes
        self._others: dict[int, _Machine] = {}  # node rank -> machine
        self._deadline = time.monotonic()  # for the first nodes to join
        if nodes := self._nodes:
            self._deadline += nodes.rdzv_conf["join_timeout"]
            try:
                self._store = dist.TCPStore(nodes.host, nodes.port, is_master=True, wait_for_workers=False)
            except dist.DistError as error:
                raise UserError(f"--rdzv-endpoint: port {nodes.port} cannot be used here ({error})") from None

    @property
    def address(self) -> str:
        return self._nodes.local_addr if self._nodes else "127.0.0.1"

    def are_missing(self) -> bool:
        """Return True if the run must wait for more machines before its start. Raises UserError after the timeout."""
        missing = self._nodes is not None and 1 + len(self._others) < self._nodes.min_nodes
        if self._nodes and missing and time.monotonic() > self._deadline:
            raise UserError(self._nodes.too_few)
        return missing

    def has(self, slot: int) -> bool:
        """Return True if the slot's machine is not lost."""
        return slot < self._nproc or slot // self._nproc in self._others

    def order(self, action: str, slot: int, *values: Any) -> None:
        if slot < self._nproc:
            self._local.order(action, slot, *values)
        elif self.has(slot):
            self._tell(self._others[slot // self._nproc], action, slot, *values)

    def _tell(self, machine: _Machine, *order: Any) -> None:
        self._store.queue_push(machine.queue, pickle.dumps(order))

    def events(self) -> Iterator[Event]:
        """Wait a moment, and yield the events of all machines."""
        yield from self._local.events()
        if self._nodes is None:
            return
        while self._store.queue_len(_EVENTS):
            sender, events = pickle.loads(self._store.queue_pop(_EVENTS))
            machine = self._others.get(sender.node)
            if events is None:
                yield from self._add(sender)
            elif machine is not None and machine.queue == sender.queue:  # not from a machine that counts as lost
                machine.heard = time.monotonic()
                yield from events
        limit = self._nodes.keep_alive
        for node, machine in list(self._others.items()):
            if time.monotonic() - machine.heard > limit:
                yield from self._lose(node, f"gave no sign of life for {limit} s")

    def _add(self, machine: _Machine) -> Iterator[Event]:
        if machine.node in self._others:
            yield from self._lose(machine.node, f"was replaced by {machine.name}")
        self._others[machine.node] = machine
        machine.heard = time.monotonic()
        yield from ((slot, "added", None) for slot in self._slots(machine.node))

    def _lose(self, node: int, what: str) -> Iterator[Event]:
        machine = self._others.pop(node)
        self._tell(machine, "leave")
        end = Ended(ProcessFailure(0, 0, 1, ""), "", f"node {node} ({machine.name}) {what}", machine.address)
        yield from ((slot, "ended", end) for slot in self._slots(node))

    def _slots(self, node: int) -> range:
        return range(node * self._nproc, (node + 1) * self._nproc)

    def close(self, code: int | None) -> None:
        """End the run on the other machines, with this exit code; None: with an error."""
        for machine in self._others.values():
            self._tell(machine, "end", code)
        deadline = time.monotonic() + _END  # the store ends with this process
        while any(self._store.queue_len(machine.queue) for machine in self._others.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


class Follower:
    """The agent of a machine beside node 0: it carries out the orders of the launcher there.

    The arguments are those of `ElasticAgent`.
    """

    succeeded = False

    def __init__(
        self,
        worker: Callable[..., int],
        args: tuple[Any, ...],
        how: "Launch",
        restarts_left: int,
        stop: list[int],
        folder: str,
    ) -> None:
        assert how.nodes is not None
        self.restarts_left, self._nodes = restarts_left, how.nodes
        self._workers = LocalWorkers(worker, args, how, folder)
        self._machine = _Machine(how.nodes.rank, socket.gethostname(), how.nodes.local_addr)

    def exit_code(self) -> int:
        """Work until the end of the run. Raises DistError if the connection to node 0 is lost."""
        address, answer = (self._nodes.host, self._nodes.port), timedelta(seconds=_ANSWER)
        store = dist.TCPStore(*address, wait_for_workers=False, timeout=answer)
        events = None  # first, this machine joins
        try:
            while True:
                # Without an event, an empty list is a sign of life.
                store.queue_push(_EVENTS, pickle.dumps((self._machine, events)))
                while store.queue_len(self._machine.queue):
                    action, *values = pickle.loads(store.queue_pop(self._machine.queue))
                    if action == "end":
                        return self._end(*values)
                    if action == "leave":
                        raise dist.DistError("node 0 has given this node up")
                    self._workers.order(action, *values)
                events = self._workers.events()
        finally:
            self._workers.close()

    def _end(self, code: int | None) -> int:
        if code is None:
            raise UserError("another node ended the run; see its output for the reason")
        self._workers.close(_END)
        return code
