"""Ranks that hold the others up are named in the log, seldom enough to be read."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from crosstrain_plugins.builtin.callbacks import stragglers
from crosstrain_plugins.builtin.callbacks.stragglers import Stragglers

from conftest import ROOT, Workspace
from crosstrain.distributed.group import Group
from crosstrain.monitor.metrics import StepMetrics
from fixtures_ranks import make_trainer, mostly_slow, run_ranks


class Together(Group):
    """The ranks of a world as one of them sees it: `others` are the numbers that the others contribute.

    works: seconds of own work of each rank, also of this one.
    """

    def __init__(self, rank: int, others: list[list[float]]) -> None:
        super().__init__()
        self.rank, self.size, self.others = rank, len(others), others
        self.works = [1.0] * len(others)

    def all_gather(self, value: Any) -> list[Any]:
        waited, forward, backward, _, dp_rank = value
        rows = [*self.others]
        rows[self.rank] = [waited, forward, backward, dp_rank]
        return [[*row[:3], work, row[3]] for row, work in zip(rows, self.works, strict=True)]


def detector(others: list[list[float]], device: str = "cuda") -> Stragglers:
    """Rank 0 of a world in which rank r waits, computes forward and backward, and is at a dp rank: others[r]."""
    waited, forward, backward, dp_rank = others[0]
    seconds = {"data loader": waited, "forward": forward, "backward": backward}
    runner = SimpleNamespace(
        dp=SimpleNamespace(rank=int(dp_rank)),
        timers=SimpleNamespace(seconds=seconds),
        device=SimpleNamespace(type=device),
    )
    trainer = SimpleNamespace(
        runner=runner,
        ranks=Together(0, others),
        run=SimpleNamespace(num_workers=2),
        logs=lambda step: True,
        plan=SimpleNamespace(global_batch=8),
        throughput=SimpleNamespace(steps=1, waited=waited),
    )
    return Stragglers(None, trainer)  # type: ignore[arg-type]


def notes_of(ours: Stragglers, intervals: int = 1, seconds: float = 1.0) -> list[str]:
    """What is said in the last of so many intervals of one step."""
    metrics = StepMetrics(0, 1.0, 1e-4, 1.0, 1.0, 8, 0)
    ours.trainer.throughput.seconds = seconds  # type: ignore[misc]
    for step in range(1, intervals + 1):
        metrics.step = step * 10
        ours.after_step(metrics)
    return metrics.notes


EVEN = [0.0, 0.1, 0.2]


@pytest.fixture(autouse=True)
def watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has waited for others."""
    monkeypatch.setattr(stragglers, "seconds_waited", lambda: 1.0)


def test_a_slow_rank_is_named_when_it_was_slow_twice() -> None:
    ours = detector([[*EVEN, 0], [*EVEN, 1], [0.0, 0.2, 0.37, 2], [*EVEN, 3]])
    assert notes_of(ours) == []
    assert notes_of(ours, 1) == [
        "rank 2 is a straggler: at step 10, as at the previous logged step, its forward and backward take 1.9x the "
        "median of the other ranks (570 ms against 300 ms)"
    ]


def test_where_the_backward_waits_the_forward_tells() -> None:
    (note,) = notes_of(detector([[0, 0.1, 0.9, 0], [0, 0.5, 0.5, 1]]), 2)
    assert "rank 1 is a straggler" in note
    assert "its forward takes 5.0x the median of the other ranks (500 ms against 100 ms)" in note


def test_only_ranks_that_do_the_same_are_compared() -> None:
    """Two stages of a pipeline, the second of which has more to do on both data-parallel ranks."""
    assert notes_of(detector([[0, 0.1, 0.1, 0], [0, 0.4, 0.4, 0], [0, 0.1, 0.1, 1], [0, 0.4, 0.4, 1]]), 5) == []
    (note,) = notes_of(detector([[0, 0.1, 0.1, 0], [0, 0.4, 0.4, 0], [0, 0.1, 0.1, 1], [0, 0.9, 0.9, 1]]), 2)
    assert note.startswith("rank 3 is a straggler")


ALIKE = [[*EVEN, 0], [*EVEN, 0], [*EVEN, 0]]  # times that contain waits for each other, of three tensor-parallel ranks


def works(ours: Stragglers, *seconds: float, steps: int) -> list[str]:
    """What is said in the last of so many steps with these seconds of own work."""
    ours.trainer.ranks.works = seconds  # type: ignore[attr-defined]
    return notes_of(ours, steps)


def test_a_rank_that_all_wait_for_is_compared_with_its_own_earlier_steps() -> None:
    ours = detector(ALIKE, "cpu")
    assert works(ours, 0.1, 0.3, 0.1, steps=stragglers.ENOUGH) == []  # more work is not slower
    assert works(ours, 0.1, 0.33, 0.2, steps=1) == []
    assert works(ours, 0.1, 0.33, 0.2, steps=1) == [
        "rank 2 is a straggler: at step 10, as at the previous logged step, its work takes 1.9x the usual time (200 ms "
        "against 105 ms)"
    ]


def test_longer_steps_of_all_ranks_are_nobodys_fault() -> None:
    ours = detector(ALIKE, "cpu")
    works(ours, 0.1, 0.3, 0.1, steps=10)
    assert works(ours, 0.2, 0.6, 0.2, steps=3) == []


def test_a_rank_that_stays_slow_does_not_become_usual() -> None:
    ours = detector(ALIKE, "cpu")
    works(ours, 0.1, 0.1, 0.1, steps=10)
    ours._times_told.clear()
    said = [note for _ in range(120) for note in works(ours, 0.1, 0.1, 0.2, steps=1)]
    assert [re.search(r"(\d+)th time|$", note)[1] for note in said] == [None, "10", "100"]  # type: ignore[index]


def test_nobody_is_slow_where_another_rank_becomes_faster() -> None:
    ours = detector(ALIKE[:2], "cpu")
    works(ours, 0.1, 0.2, steps=10)
    assert works(ours, 0.1, 0.1, steps=5) == []


def test_without_a_watchdog_forward_and_backward_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "seconds_waited", lambda: 0.0)
    ours = detector([[*EVEN, 0], [0.0, 0.5, 0.5, 1]], "cpu")
    (note,) = notes_of(ours, 2)
    assert "its forward and backward take" in note


def test_a_rank_that_is_slow_again_is_named_again() -> None:
    ours = detector(ALIKE, "cpu")
    works(ours, 0.1, 0.1, 0.1, steps=10)
    assert works(ours, 0.1, 0.1, 0.2, steps=2)
    assert works(ours, 0.1, 0.1, 0.2, steps=1) == []
    works(ours, 0.1, 0.1, 0.1, steps=stragglers.QUIET)
    assert works(ours, 0.1, 0.1, 0.2, steps=2)


@pytest.mark.parametrize("busy", [[0.1, 0.14], [0.001, 0.004], [0.0, 0.0]])
def test_small_differences_are_nobodys_fault(busy: list[float]) -> None:
    assert notes_of(detector([[0, busy[0], 0, 0], [0, busy[1], 0, 1]]), 5) == []


def test_the_same_is_said_the_first_the_tenth_and_the_hundredth_time() -> None:
    ours = detector([[*EVEN, 0], [0.0, 0.5, 0.5, 1]])
    said = [note for _ in range(1, 202) for note in notes_of(ours)]
    assert len(said) == 3
    assert said[1].endswith("(for the 10th time)")
    assert said[2].endswith("(for the 100th time)")


def test_waiting_for_data_is_named_with_the_rank_and_the_remedy() -> None:
    ours = detector([[0.1, 0.1, 0.2, 0], [0.38, 0.1, 0.2, 1]])
    assert notes_of(ours) == []  # the loader's processes started in this one
    ours.trainer.throughput.steps = 10
    metrics = StepMetrics(50, 1.0, 1e-4, 1.0, 1.0, 8, 0)
    ours.after_step(metrics)
    assert metrics.loader_samples_per_second == pytest.approx(8 * 10 / 0.38)
    assert metrics.notes == ["steps 41 to 50 waited 38% of their time for data on rank 1; raise run.num_workers, now 2"]


@pytest.mark.parametrize("wait", [0.24, 0.0])
def test_a_little_waiting_is_not_worth_a_word(wait: float) -> None:
    assert notes_of(detector([[wait, 0.1, 0.1, 0]]), 3) == []


def held_up(project: str, options: tuple[str, ...], fault: str) -> list[str]:
    """For ranks: train with rank 1 at fault; the notes in the rows."""
    trainer = make_trainer(project, options)
    if trainer.runner.world.rank == 1:
        if fault == "later":
            step = trainer.runner.forward_backward

            def slow_step(*args: Any) -> Any:
                time.sleep(0.3 if trainer.state.step >= 7 else 0.0)
                return step(*args)

            trainer.runner.forward_backward = slow_step
        elif fault == "compute":
            compute = trainer.runner.compute_loss

            def slowly(batch: Any) -> Any:
                time.sleep(0.3)
                return compute(batch)

            trainer.runner.compute_loss = slowly
        else:
            get = trainer.dataset.get

            def late(index: int, rng: Any) -> Any:
                time.sleep(0.3)
                return get(index, rng)

            trainer.dataset.get = late
    trainer.fit()
    trainer.runner.close()
    return []


TENSOR_PARALLEL, PIPELINE = "{name: megatron, tensor_parallel: 2}", "{name: megatron, pipeline_parallel: 2}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "compared"),
    [
        ("fsdp", "the median of the other ranks"),
        ("zero3", "the median of the other ranks"),
        (TENSOR_PARALLEL, "the usual time"),
        (PIPELINE, "the usual time"),
    ],
)
def test_a_rank_that_becomes_slow_is_named_where_all_ranks_wait_for_it(
    workspace: Workspace, runner: str, compared: str
) -> None:
    options = ("run.max_iters=12", "run.log_interval=1", f"run.runner={runner}", "run.global_batch_size=4")
    options = (*options, f"run.output_dir={workspace.path}/out", "run.micro_batch_size=1")
    run_ranks(2, held_up, str(workspace.project), options, "later")
    log = (workspace.path / "out" / "log.txt").read_text().splitlines()
    (straggler,) = [line for line in log if "is a straggler" in line]
    assert "rank 1 is a straggler: at step 9" in straggler
    assert compared in straggler


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "zero1", "zero2"], []))
@pytest.mark.parametrize("fault", mostly_slow(["compute", "data"], ["compute"]))
def test_a_rank_at_fault_is_named_in_the_log(workspace: Workspace, fault: str, runner: str) -> None:
    """Real ranks; what rank 1 sleeps is far more than a tiny model takes, also on a busy machine."""
    options = ("run.output_dir=out", "run.max_iters=6", "run.log_interval=2", f"run.runner={runner}")
    project = str(workspace.project)
    options = (*options, f"run.output_dir={workspace.path}/out", "run.micro_batch_size=1", "run.global_batch_size=4")
    run_ranks(2, held_up, project, options, fault)
    log = (workspace.path / "out" / "log.txt").read_text().splitlines()
    straggler = [line for line in log if "rank 1 is a straggler" in line]
    waiting = [line for line in log if "of their time for data on rank 1" in line]
    if fault == "compute":
        assert len(straggler) == 1
        assert "x the median of the other ranks" in straggler[0]
    else:
        assert len(waiting) == 1
        assert re.search(r"steps \d to \d waited \d+% of their time", waiting[0])
        assert "raise run.num_workers, now 0" in waiting[0]
    noted = [json.loads(line).get("notes", []) for line in (workspace.path / "out" / "metrics.jsonl").open()]
    assert (straggler + waiting)[0].endswith(next(note for notes in noted for note in notes if "rank 1" in note))


def test_the_thresholds_are_the_documented_ones() -> None:
    documented = (ROOT / "docs" / "monitoring.md").read_text()
    assert f"{stragglers.SLOWER} times the expected time" in documented
    assert f"{stragglers.WAITING:.0%} of" in documented
