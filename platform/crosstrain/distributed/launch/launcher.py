"""Start the workers of a run: on node 0, the launcher decides, and on other nodes, it follows the orders of node 0."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError

from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.local_workers import LocalWorkers
from crosstrain.distributed.launch.machines import follow
from crosstrain.distributed.launch.members import Members
from crosstrain.distributed.launch.signals import forwarded
from crosstrain.utils.errors import UserError
from crosstrain.utils.processes import Bond


class _Stopped(BaseException):
    """A signal to stop arrived while no worker was running."""


def launch(
    worker: Callable[..., int], args: tuple[Any, ...], how: Launch,
    sizes: Sequence[int] = (), limit: float | None = None,
) -> int:  # fmt: skip
    """Run `worker(*args)` on every rank and return the exit code.

    `worker` returns the signal that stopped it, or 0. If a worker fails, the others end within seconds. Then all
    workers restart, at most `how.max_restarts` times, unless the user has to fix the error. The last error is raised or
    printed. With `sizes`, the other workers go on instead; `sizes` and `limit` are those of `Members`. Raises UserError
    if the nodes do not find each other.
    """
    if not how.starts_workers:
        stopped = worker(*args)
        # Under torchrun, srun or mpirun, a clean stop is a success. In a shell, the exit code marks an unfinished run.
        return 128 + stopped if stopped and not how.joined else 0

    stop: list[int] = []
    workers: LocalWorkers | None = None

    def check_children(any_left: bool) -> None:
        if not any_left and (workers is None or not workers.results):
            raise _Stopped

    nodes, joins_left, news = how.nodes, how.max_restarts, ""
    if nodes is not None:
        print(
            f"waiting for {nodes.min_nodes} nodes to join at {nodes.host}:{nodes.port}, for at most "
            f"{nodes.rdzv_conf['join_timeout']} s",
            file=sys.stderr,
            flush=True,
        )
    try:
        with forwarded(stop, check_children), environment(how):
            while nodes is not None and not nodes.is_host:
                nodes.wait_for_host()
                workers = LocalWorkers(worker, args, how, goes_on=bool(sizes))
                try:
                    code = follow(workers, nodes, news)
                except DistError as error:
                    if not joins_left or stop:
                        raise UserError(
                            f"lost the connection to node 0 ({nodes.host}:{nodes.port}); see its output, then run the "
                            f"same command on all nodes to resume from the last checkpoint"
                        ) from error
                else:
                    if isinstance(code, str):
                        raise UserError(code)
                    return 128 + stop[0] if stop and code else code
                joins_left, news = joins_left - 1, "node 0 was lost"
                print("note: lost the connection to node 0; this node joins again", file=sys.stderr, flush=True)
            workers = LocalWorkers(worker, args, how, goes_on=bool(sizes))
            return Members(workers, how, stop, sizes, limit).exit_code()
    except _Stopped:
        return 128 + stop[0]  # the workers had not started, so there was nothing to save


@contextmanager
def environment(how: Launch) -> Iterator[None]:
    """Set missing environment variables for the launcher and its workers in the block."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // how.nproc_per_node)),
        # Killed workers leak their semaphores. A warning about the leak would distract from the real error.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if interface := how.nodes.interface if how.nodes else "lo" if sys.platform == "linux" else None:
        wanted["GLOO_SOCKET_IFNAME"] = interface  # avoids name resolution in gloo
        if how.nodes:
            wanted["NCCL_SOCKET_IFNAME"] = interface
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
        for name in missing:
            del os.environ[name]  # the number of workers may differ in the next launch
