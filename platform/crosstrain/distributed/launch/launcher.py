"""One command, N workers.

Run plainly, the program starts one worker per visible GPU (one on a CPU) through torch's elastic agent, on one machine
or, together with the same command on others, on several; a single worker that need not be started again runs in this
very process. Run by torchrun, srun or mpirun, it is a worker already and joins the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crosstrain.distributed.launch.signals import ending_at_once
from crosstrain.distributed.launch.topology import Launch


def launch(worker: Callable[..., int], args: tuple[Any, ...], how: Launch) -> int:
    """Run `worker(*args)` on every rank; returns the exit code. `worker` returns the signal that stopped it, or 0.

    A worker that fails ends the others within seconds. Then all start again, if that can help and has not been done
    `how.max_restarts` times, or its error is the one that is raised or shown.
    """
    if not how.starts_workers:
        stopped = worker(*args)
        # Under another launcher a clean stop is success; on its own the shell should see that the run did not finish.
        return 128 + stopped if stopped and not how.joined else 0

    with ending_at_once():
        from crosstrain.distributed.launch.elastic_agent import supervise

    return supervise(worker, args, how)
