"""Detect slow ranks from the times that each rank measures for its own work.

On CPUs with a watchdog, the time without waits for other ranks is known. It is compared between ranks that do the same
work on different samples, and with the rank's own earlier steps, because other ranks may have other work. Otherwise, a
rank's waits are not known. Its forward and backward times identify a slow rank only if they contain no communication.
If the engine communicates only in the backward pass, the forward times still identify it. If the engine communicates in
both passes (FSDP, ZeRO 3, tensor parallelism, pipelines), all ranks take equally long and no rank is reported.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

from crosstrain import Callback, Step, StepMetrics, registry
from crosstrain.distributed.watchdog.watchdog import seconds_waited

# A rank is a straggler if its time exceeds the expected time by both limits in IN_A_ROW consecutive logged steps.
SLOWER = 1.5  # minimum ratio to the expected time
SLOWER_MS = 10.0  # minimum difference from the expected time
IN_A_ROW = 2  # number of logged steps
USUAL = 20  # number of latest logged steps from which a rank's usual time is computed
ENOUGH = 5  # number of logged steps before times are compared with the usual time
QUIET = 10  # number of logged steps without a problem after which the problem is reported again
# Waits for data are reported if they reach both limits.
WAITING = 0.25  # fraction of the time
WAITING_MS = 5.0  # milliseconds per step


@registry.register_callback("stragglers")
class Stragglers(Callback):
    """Gathers the ranks' times at logged steps, and reports slow ranks and waits for data; every run has this hook."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self._checks = 0
        self._slow = (-1, 0)  # the rank that was slow in the latest logged steps, and the number of these steps
        self._times_told: dict[str, tuple[int, int]] = {}  # problem -> its number of times, and its last check
        # number of ranks -> times of all ranks' own work; a team may log a step alone
        self._past: dict[int, deque[Sequence[float]]] = defaultdict(lambda: deque(maxlen=USUAL))
        self._begun = _own_time()

    def before_step(self, batch: Step) -> None:
        self._begun = _own_time()

    def after_step(self, metrics: StepMetrics) -> None:
        """Compare the ranks of a logged step. Collective."""
        trainer, clock, step, work = self.trainer, self.trainer.throughput, metrics.step, _own_time() - self._begun
        if not trainer.logs(step):
            return
        timers = trainer.runner.timers.seconds
        own = clock.waited, timers.get("forward", 0.0), timers.get("backward", 0.0), work, trainer.runner.dp.rank
        waits, forward, backward, works, dp_ranks = zip(*trainer.ranks.all_gather(own), strict=True)
        self._checks += 1
        peers, others = _peers(dp_ranks), "{:.1f}x the median of the other ranks"
        if trainer.runner.device.type == "cpu" and seconds_waited():
            past = self._past[len(works)]
            usual = _of_past(works, past)
            slow = _slowest(works, _of_peers(works, peers), f"work takes {others}")
            slow = slow or _slowest(works, usual, "work takes {:.1f}x the usual time")
            past.append([u if w >= SLOWER * u else w for w, u in zip(works, usual, strict=True)])  # slow is never usual
        else:
            both = [f + b for f, b in zip(forward, backward, strict=True)]
            slow = _slowest(both, _of_peers(both, peers), f"forward and backward take {others}")
            slow = slow or _slowest(forward, _of_peers(forward, peers), f"forward takes {others}")
        found = [self._straggler(step, slow), self._data_bound(step, clock.steps, clock.seconds, waits)]
        metrics.notes = [sentence for sentence in found if sentence]
        if max(waits) > 0:
            metrics.loader_samples_per_second = trainer.plan.global_batch * clock.steps / max(waits)

    def _straggler(self, step: int, slow: tuple[int, str] | None) -> str | None:
        rank, problem = slow or (-1, "")
        self._slow = (rank, self._slow[1] + 1 if rank == self._slow[0] else 1)
        if slow is None or self._slow[1] < IN_A_ROW:
            return None
        key = f"rank {rank} is a straggler"
        return self._seldom(key, f"{key}: at step {step}, as at the previous logged step, its {problem}")

    def _data_bound(self, step: int, steps: int, seconds: float, waited: Sequence[float]) -> str | None:
        if self._checks == 1:  # the data-loading processes started in this interval
            return None
        bad = [r for r, w in enumerate(waited) if w >= WAITING * seconds and 1000 * w / steps >= WAITING_MS]
        if not bad:
            return None
        worst = max(bad, key=waited.__getitem__)
        others = f" and nearly as much on {len(bad) - 1} other(s)" if len(bad) > 1 else ""
        when = f"steps {step - steps + 1} to {step}" if steps > 1 else f"step {step}"
        return self._seldom(
            "waiting for data",
            f"{when} waited {min(waited[worst] / seconds, 1):.0%} of their time for data on rank {worst}{others}; "
            f"raise run.num_workers, now {self.trainer.run.num_workers}",
        )

    def _seldom(self, key: str, sentence: str) -> str | None:
        """Return the sentence on the 1st, 10th, 100th, ... occurrence, else None."""
        times, last = self._times_told.get(key, (0, 0))
        times = times + 1 if self._checks - last <= QUIET else 1
        self._times_told[key] = times, self._checks
        suffix = f" (for the {times}th time)" if times > 1 else ""
        return sentence + suffix if str(times).strip("0") == "1" else None


def _own_time() -> float:
    """Return a clock that stands still while this rank waits for others."""
    return time.perf_counter() - seconds_waited()


def _slowest(seconds: Sequence[float], expected: Sequence[float], clause: str) -> tuple[int, str] | None:
    """Return the slowest rank, and `clause` with its ratio to the expected seconds; None if no rank is slow."""
    slow = [
        (taken / normal, rank)
        for rank, (taken, normal) in enumerate(zip(seconds, expected, strict=True))
        if 1000 * (taken - normal) >= SLOWER_MS and taken >= SLOWER * normal > 0
    ]
    if not slow:
        return None
    ratio, rank = max(slow)
    return rank, f"{clause.format(ratio)} ({1000 * seconds[rank]:.0f} ms against {1000 * expected[rank]:.0f} ms)"


def _of_peers(seconds: Sequence[float], groups: list[tuple[int, ...]]) -> list[float]:
    """Return the median of each rank's peers; infinity for a rank without peers."""
    expected = [inf] * len(seconds)
    for peers in groups:
        for rank in peers if len(peers) > 1 else ():
            expected[rank] = median(seconds[peer] for peer in peers if peer != rank)
    return expected


def _of_past(seconds: Sequence[float], past: Sequence[Sequence[float]]) -> list[float]:
    """Return each rank's median of earlier steps, times the factor by which the other ranks have become slower."""
    if len(past) < ENOUGH or len(seconds) == 1:
        return [inf] * len(seconds)
    usual = [median(times) for times in zip(*past, strict=True)]
    changes = [taken / normal for taken, normal in zip(seconds, usual, strict=True)]
    return [u * max(1.0, median(changes[:rank] + changes[rank + 1 :])) for rank, u in enumerate(usual)]


def _peers(dp_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Group ranks that do the same work on different samples: ranks at the same position in different replicas."""
    members: dict[int, list[int]] = {}
    for rank, dp_rank in enumerate(dp_ranks):
        members.setdefault(dp_rank, []).append(rank)
    return list(zip(*members.values(), strict=False))
