"""Detect slow ranks from the times that each rank measures for its own work.

Forward and backward times are compared between ranks that do the same work on different samples. The comparison
works only if the times contain no communication. If an engine communicates in both passes (FSDP, ZeRO 3), the other
ranks wait in both passes for a slow rank, so all ranks take equally long and no rank is reported. If the engine
communicates only in the backward pass, the forward times still identify the slow rank.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from crosstrain import Callback, StepMetrics, registry

# A rank is a straggler if its time exceeds its peers' median by both limits in IN_A_ROW consecutive logged steps.
SLOWER = 1.5  # minimum ratio to the median
SLOWER_MS = 10.0  # minimum difference from the median
IN_A_ROW = 2  # number of logged steps
# Waits for data are reported if they reach both limits.
WAITING = 0.25  # fraction of the time
WAITING_MS = 5.0  # milliseconds per step


@registry.register_callback("stragglers")
class Stragglers(Callback):
    """Gathers the ranks' times at logged steps, and reports slow ranks and waits for data; every run has this hook."""

    _checks = 0
    _slow = (-1, 0)  # the rank that was slow in the latest logged steps, and the number of these steps
    _times_told: Mapping[str, int] = {}

    def on_start(self) -> None:
        self._checks, self._slow, self._times_told = 0, (-1, 0), {}

    def after_step(self, metrics: StepMetrics) -> None:
        """Compare the ranks of a logged step. Collective."""
        trainer, clock, step = self.trainer, self.trainer.throughput, metrics.step
        if not trainer.logs(step):
            return
        timers = trainer.runner.timers.seconds
        own = clock.waited, timers.get("forward", 0.0), timers.get("backward", 0.0), trainer.runner.dp.rank
        waits, forward, backward, dp_ranks = zip(*trainer.ranks.all_gather(own), strict=True)
        self._checks += 1
        peers = _peers(dp_ranks)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        slow = _slowest(both, peers, "forward and backward take") or _slowest(forward, peers, "forward takes")
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
        times = self._times_told.get(key, 0) + 1
        self._times_told = {**self._times_told, key: times}
        suffix = f" (for the {times}th time)" if times > 1 else ""
        return sentence + suffix if str(times).strip("0") == "1" else None


def _slowest(seconds: Sequence[float], groups: list[tuple[int, ...]], clause: str) -> tuple[int, str] | None:
    """Return the rank that is slowest compared with its peers, and a phrase with the ratio; None if no rank is slow."""
    slow = []
    for peers in groups:
        for rank in peers if len(peers) > 1 else ():
            others = median(seconds[peer] for peer in peers if peer != rank)
            if 1000 * (seconds[rank] - others) >= SLOWER_MS and seconds[rank] >= SLOWER * others > 0:
                slow.append((seconds[rank] / others, rank, others))
    if not slow:
        return None
    ratio, rank, others = max(slow)
    times = f"{1000 * seconds[rank]:.0f} ms against {1000 * others:.0f} ms"
    return rank, f"{clause} {ratio:.1f}x the median of the other ranks ({times})"


def _peers(dp_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Group ranks that do the same work on different samples: ranks at the same position in different replicas."""
    members: dict[int, list[int]] = {}
    for rank, dp_rank in enumerate(dp_ranks):
        members.setdefault(dp_rank, []).append(rank)
    return list(zip(*members.values(), strict=False))
