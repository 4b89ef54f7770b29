"""The machines of a run.

The launcher on node 0 decides, and the launchers on the other nodes start its workers and forward their messages. All
of them exchange messages through queues of a store on node 0: one queue for events, and one per machine for orders.
"""

import pickle
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.local_workers import Ended, Event, LocalWorkers
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.utils.errors import UserError

_EVENTS = "events"
_END = 10.0  # seconds for the other launchers to take the last order
_ANSWER = timedelta(seconds=10)  # time to wait for an answer of the store on node 0


@dataclass
class _Machine:
    """A machine beside node 0."""

    node: int  # its rank
    name: str
    address: str
    workers: int  # number of workers
    news: str  # the reason for joining again; empty at first
    queue: str = field(default_factory=lambda: str(uuid.uuid4()))  # for its orders
    heard: float = 0.0  # time of the last sign of life, on the clock of node 0


class Machines:
    """The machines of a run, as the launcher on node 0 sees them."""

    def __init__(self, local: LocalWorkers, how: Launch) -> None:
        self._local, self._nproc, self._nodes = local, how.nproc_per_node, how.nodes
        self.address = how.nodes.local_addr if how.nodes else "127.0.0.1"
        self._others: dict[int, _Machine] = {}  # node rank -> machine
        self._changed = time.monotonic()  # time of the last loss or arrival of a machine
        if nodes := self._nodes:
            try:
                self._store = dist.TCPStore(nodes.host, nodes.port, is_master=True, wait_for_workers=False)
            except dist.DistError as error:
                raise UserError(f"--rdzv-endpoint: port {nodes.port} cannot be used here ({error})") from None

    @property
    def slots(self) -> list[int]:
        """Slots of the machines that are not lost."""
        return [slot for node in (0, *sorted(self._others)) for slot in self._slots(node)]

    def _slots(self, node: int) -> range:
        return range(node * self._nproc, (node + 1) * self._nproc)

    def are_missing(self) -> bool:
        """Return True if more machines may join before the ranks meet. Raises UserError after the join timeout."""
        if (nodes := self._nodes) is None:
            return False
        count, waited = 1 + len(self._others), time.monotonic() - self._changed
        if count < nodes.min_nodes and waited > nodes.rdzv_conf["join_timeout"]:
            raise UserError(
                f"--nnodes: fewer than {nodes.min_nodes} nodes joined at {nodes.host}:{nodes.port} within "
                f"{nodes.rdzv_conf['join_timeout']} s; start the same command on each node, with its own --node-rank"
            )
        return count < nodes.min_nodes or (count < nodes.max_nodes and waited < nodes.rdzv_conf["last_call_timeout"])

    def order(self, action: str, slot: int, value: Any = None) -> None:
        if slot < self._nproc:
            self._local.order(action, slot, value)
        elif machine := self._others.get(slot // self._nproc):
            self._tell(machine, action, slot, value)

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
        limit = self._nodes.rdzv_conf["keep_alive_interval"] * self._nodes.rdzv_conf["keep_alive_max_attempt"]
        for node, machine in list(self._others.items()):
            if time.monotonic() - machine.heard > limit:
                yield from self._lose(node, f"gave no sign of life for {limit} s")

    def _add(self, machine: _Machine) -> Iterator[Event]:
        if machine.workers != self._nproc:
            self._tell(
                machine,
                "end",
                f"--nproc-per-node: node {machine.node} has {machine.workers} workers, and node 0 has {self._nproc}; "
                f"give the same number on each node",
            )
            return
        if machine.node in self._others:
            yield from self._lose(machine.node, f"was replaced by {machine.name}")
        self._others[machine.node] = machine
        machine.heard = self._changed = time.monotonic()
        yield from (Event(slot, 0, "added", machine.news) for slot in self._slots(machine.node))

    def _lose(self, node: int, what: str) -> Iterator[Event]:
        machine = self._others.pop(node)
        self._tell(machine, "leave")
        self._changed = time.monotonic()
        end = Ended(1, reason=f"node {node} ({machine.name}) {what}", address=machine.address)
        yield from (Event(slot, 0, "ended", end) for slot in self._slots(node))

    def close(self, code: int | str) -> None:
        """End the run on the other machines, with this exit code or error."""
        for machine in self._others.values():
            self._tell(machine, "end", code)
        deadline = time.monotonic() + _END  # the store ends with this process
        while time.monotonic() < deadline and any(self._store.queue_len(m.queue) for m in self._others.values()):
            time.sleep(0.05)


def follow(workers: LocalWorkers, nodes: Nodes, news: str) -> int | str:
    """Carry out the orders of the launcher on node 0 until the end of the run, and return the exit code or the error.

    news: the reason for joining again; empty at first. Raises DistError if the connection to node 0 is lost.
    """
    machine = _Machine(nodes.rank, socket.gethostname(), nodes.local_addr, workers.how.nproc_per_node, news)
    events = None  # first, this machine joins
    try:
        store = dist.TCPStore(nodes.host, nodes.port, wait_for_workers=False, timeout=_ANSWER)
        while True:
            # Without an event, an empty list is a sign of life.
            store.queue_push(_EVENTS, pickle.dumps((machine, events)))
            while store.queue_len(machine.queue):
                action, *values = pickle.loads(store.queue_pop(machine.queue))
                if action == "end":
                    workers.close(_END)
                    return values[0]
                if action == "leave":
                    raise dist.DistError("node 0 has given this node up")
                workers.order(action, *values)
            events = workers.events()
    except dist.DistError:
        while workers.running and not workers.goes_on:  # if only the launcher on node 0 was killed, all ranks save
            workers.events()
        if not workers.results:
            raise
        return 128 + max(workers.results) if any(workers.results) else 0
    finally:
        workers.close()
