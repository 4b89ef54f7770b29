"""torch's elastic agent with our rules: some failures are final, and a request to stop is not a failure.

Only this file uses private APIs of torch.distributed.elastic, as of torch 2.13 and 2.14: `_rendezvous`,
`_start_workers`, `_monitor_workers`, `_worker_group`, `_pcontext` and `_remaining_restarts` of the agent, and
`get_method_name` of the rendezvous. This file also uses `_config` of multiprocessing processes.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from tempfile import TemporaryDirectory
from threading import Timer
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as rdzv
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, registry

from crosstrain.distributed.launch.cluster_env import set_restart_reason
from crosstrain.distributed.launch.signals import forwarded
from crosstrain.distributed.launch.worker_errors import Failure, WorkerFailure, first_failure, run_worker
from crosstrain.utils.errors import UserError
from crosstrain.utils.processes import Bond

if TYPE_CHECKING:  # a real import would be circular: the launcher imports this file
    from crosstrain.distributed.launch.launcher import Launch
    from crosstrain.distributed.launch.rendezvous import Nodes

_QUIET = 10.0  # seconds until a node that waits for the others prints a note
_SHUTDOWN_TIMEOUT = 5  # seconds until SIGKILL is sent to ranks that wait for a dead rank and ignore SIGTERM
_EXIT_TIMEOUT = 30  # seconds to wait for the other nodes' launchers after all workers have ended


# Before torch writes the state of the rendezvous, it reads the source files of the whole call stack, only to name an
# event that nobody uses. If many nodes joined at once, they would invalidate each other's state for minutes. This
# replacement reads only the stack frame.
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class _Stopped(BaseException):
    """A signal to stop arrived while no worker was running."""


class Agent(Protocol):
    """Runs the workers of one machine, and agrees with the agents of the other machines on when they start."""

    @property
    def restarts_left(self) -> int: ...

    @property
    def succeeded(self) -> bool:
        """True if all workers have finished, but the agent waits for other machines."""

    def exit_code(self) -> int:
        """Run to the end. Raises DistError if the connection to node 0 is lost, and the error that ended the run."""


def run_agent(kind: Callable[..., Agent], worker: Callable[..., int], args: tuple[Any, ...], how: "Launch") -> int:
    """Run `worker(*args)` in processes on this machine, together with the other nodes, and return the exit code.

    kind: makes an agent from the arguments of `ElasticAgent`. If no restart is left, raises the error of the worker
    that failed first. Raises UserError if the nodes do not find each other.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the caller prints errors once
    stop: list[int] = []
    agent: Agent | None = None

    def check_children(any_left: bool) -> None:
        if not any_left and (agent is None or not agent.succeeded):
            raise _Stopped

    restarts_left, nodes = how.max_restarts, how.nodes
    try:
        with (
            forwarded(stop, check_children),
            environment(how),
            TemporaryDirectory(prefix="crosstrain-", ignore_cleanup_errors=True) as logs,
        ):
            while True:
                if nodes:
                    with announced(nodes):
                        nodes.wait_for_host()
                agent = kind(worker, args, how, restarts_left, stop, logs)
                try:
                    return agent.exit_code()
                except (rdzv.RendezvousConnectionError, DistError):
                    # The node that hosts the rendezvous is lost. A replacement of that node hosts a new rendezvous. The
                    # host itself must not retry, because it would connect to its own old rendezvous.
                    restarts_left = agent.restarts_left
                    if nodes is None or nodes.is_host or restarts_left == 0 or stop:
                        raise
                    restarts_left -= 1
                    print("note: lost the connection to node 0; this node joins again", file=sys.stderr, flush=True)
    except _Stopped:
        return 128 + stop[0]  # the workers had not started, so there was nothing to save
    except (rdzv.RendezvousConnectionError, DistError) as error:
        at = f" ({nodes.host}:{nodes.port})" if nodes else ""
        raise UserError(
            f"lost the connection to node 0{at}, which hosts the rendezvous; see its output, then run the same command "
            f"on all nodes to resume from the last checkpoint"
        ) from error
    except rdzv.RendezvousClosedError:
        raise UserError("another node ended the run; see its output for the reason") from None
    except rdzv.RendezvousTimeoutError:
        assert nodes is not None
        raise UserError(nodes.too_few) from None


class ElasticAgent(LocalElasticAgent):
    """The agent of one machine. The agent restarts workers unless the failure is final or a stop was requested."""

    def __init__(
        self,
        worker: Callable[..., int],
        args: tuple[Any, ...],
        how: "Launch",
        restarts_left: int,
        stop: list[int],
        logs: str,
    ) -> None:
        rendezvous = rdzv.RendezvousParameters("c10d", "localhost:0", f"crosstrain-{os.getpid()}", 1, 1, "127.0.0.1")
        if nodes := how.nodes:
            host = f"[{nodes.host}]" if ":" in nodes.host else nodes.host
            rendezvous = rdzv.RendezvousParameters(
                "c10d",
                f"{host}:{nodes.port}",
                "crosstrain",
                nodes.min_nodes,
                nodes.max_nodes,
                nodes.local_addr,
                is_host=nodes.is_host,
                **nodes.rdzv_conf,
            )
        spec = WorkerSpec(
            role="worker",
            local_world_size=how.nproc_per_node,
            entrypoint=run_worker,
            args=(worker, args),
            rdzv_handler=registry.get_rendezvous_handler(rendezvous),
            max_restarts=how.max_restarts,
            monitor_interval=0.1,
            local_addr=rendezvous.local_addr,
        )
        super().__init__(
            spec, DefaultLogsSpecs(logs), how.start_method, _EXIT_TIMEOUT, shutdown_timeout=_SHUTDOWN_TIMEOUT
        )
        self._remaining_restarts = restarts_left
        self._stop, self._nodes = stop, nodes
        self._where = f" on {socket.gethostname()}" if nodes else ""
        self._failure: Failure | None = None  # the latest failure
        # Reason for the next restart, and this node's certainty about the reason.
        self._reason, self._certainty = ("", 0) if restarts_left == how.max_restarts else ("node 0 was lost", 2)

    @property
    def restarts_left(self) -> int:
        return self._remaining_restarts

    @property
    def succeeded(self) -> bool:
        return self._worker_group.state == WorkerState.SUCCEEDED

    def exit_code(self) -> int:
        """Run the agent to its end; return 0, or 128 + the signal that stopped the workers. Raises a worker's error."""
        result = self.run()
        self._worker_group.spec.rdzv_handler.shutdown()  # so that the other nodes do not wait for this node
        if result is None:  # this node was not needed, and the others have finished
            return 0
        if self.succeeded:
            signals = [number for number in result.return_values.values() if number]
            return 128 + (self._stop or signals)[0] if signals else 0
        if self._stop and all(-f.exitcode in (signal.SIGUSR1, signal.SIGTERM) for f in result.failures.values()):
            return 128 + self._stop[0]  # the workers were killed by a second Ctrl-C, or had nothing to save yet
        assert self._failure is not None
        if (most := self._worker_group.spec.max_restarts) and not self._failure.is_final and not self._stop:
            print(
                f"note: run.max_restarts: all {most} restarts are used up, so the run ends", file=sys.stderr, flush=True
            )
        raise self._failure.error

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wake_workers()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            failure = self._failure = first_failure(result.failures, self._where)
            if failure.is_final or self._stop:
                self._remaining_restarts = 0
            if self._remaining_restarts:
                self._reason, self._certainty = failure.summary, 1 if failure.lost_another else 3
                if isinstance(failure.error, WorkerFailure) and not failure.lost_another:
                    print(failure.error, file=sys.stderr, flush=True)  # the traceback is not printed anywhere else
        return result

    def _wake_workers(self) -> None:
        """Continue stopped workers after a worker has ended: SIGTERM does not end them, and torch would wait 30 s."""
        running = {child.pid for child in multiprocessing.active_children()}
        workers = set(self._pcontext.pids().values()) if self._pcontext else set()
        if workers - running:
            for worker in workers & running:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGCONT)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with announced(self._nodes) if self._nodes else nullcontext():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop:
            raise _Stopped
        most = worker_group.spec.max_restarts
        set_restart_reason(self._reason, self._certainty, most - self._remaining_restarts, most)
        self._reason, self._certainty = "a node joined or left", 0  # a failure replaces this reason
        return super()._start_workers(worker_group)


@contextmanager
def announced(nodes: "Nodes") -> Iterator[None]:
    """Print a note if the block, which waits for the other nodes, takes more than `_QUIET` seconds."""
    said = (
        f"waiting for {nodes.min_nodes} nodes to join at {nodes.host}:{nodes.port}, for at most "
        f"{nodes.rdzv_conf['join_timeout']} s"
    )
    timer = Timer(_QUIET, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def environment(how: "Launch") -> Iterator[None]:
    """Set missing environment variables for the agent and its workers in the block."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // how.nproc_per_node)),
        # Killed workers leak their semaphores. A warning about the leak would distract from the real error.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
        # torch's handlers would end the workers. Our handlers in `run_agent` let the workers save first.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }
    if interface := how.nodes.interface if how.nodes else "lo" if sys.platform == "linux" else None:
        wanted["GLOO_SOCKET_IFNAME"] = interface  # avoids name resolution in gloo
        if how.nodes:
            wanted["NCCL_SOCKET_IFNAME"] = interface
    if how.nodes or how.max_restarts:
        # A shared store outlives the workers. Old values in the store would mislead restarted workers, and a surviving
        # node would not publish its address again.
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    # Each spawned process reads this dictionary before any slow import. Under "forkserver", a worker's parent is the
    # fork server, and the fork server ends with this process.
    read_first = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    read_first["bond"] = Bond() if how.start_method == "spawn" else None
    try:
        yield
    finally:
        del read_first["bond"]
        set_restart_reason("", 0, 0, 0)
        for name in missing:
            del os.environ[name]  # the number of workers may differ in the next launch
