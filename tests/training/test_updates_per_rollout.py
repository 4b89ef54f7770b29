"""Several optimizer steps on the same completions: the paper's loss in each of them, exact resumes between them, the
same bits on any number of ranks, and the number of samples that they consume."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstrain.checkpoint.digests import recorded
from crosstrain.checkpoint.folders import find_checkpoint
from crosstrain.config.load import load_config
from crosstrain.engine.checks import batch_plan
from fixtures_policy import make_guesser
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

THREE = "run.objective.updates_per_rollout=3"
FAST = ("run.init_lr=1e-2", "run.min_lr=1e-2")  # so that ratios reach the clip


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guesser(tmp_path_factory.mktemp("reuse"))


def _recorded(project: str, options: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """Of each step: its batch, the logits of the weights before it, its loss, and what the run's state says after."""
    import torch

    trainer = make_trainer(project, options)
    stream, runner, out = trainer.batches(), trainer.runner, []
    for _ in range(count):
        step = next(stream)
        (micro,) = step
        with torch.no_grad():
            logits = runner.model.lm(input_ids=micro.data["input_ids"]).logits.double().numpy()
        batch = {key: micro.data[key].numpy() for key in ("input_ids", "labels", "reward")}
        metrics = trainer.train_step(iter([step]))
        state = trainer.state.samples, trainer.state.uses
        out.append({"numbers": step.numbers, "logits": logits, "loss": metrics.loss, "state": state} | batch)
    return out


def _log_probability(logits: Any, token: int) -> float:
    return float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


def _by_the_paper(step: dict[str, Any], sampled_by: dict[str, Any], group: int) -> tuple[float, int, int]:
    """Equation 3 of Shao et al. without the divergence; also the numbers of ratios that are not 1, and are clipped.

    sampled_by: the step whose weights sampled the completions.
    """
    total, moved, clipped = 0.0, 0, 0
    for row, labels in enumerate(step["labels"]):
        rewards = step["reward"][row // group * group :][:group].astype(float)
        advantage = (step["reward"][row] - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        places = np.flatnonzero(labels != -100)
        for place in places:
            now, old = (_log_probability(of["logits"][row, place], labels[place]) for of in (step, sampled_by))
            ratio = math.exp(now - old)
            bounded = min(max(ratio, 0.8), 1.2)
            moved, clipped = moved + (ratio != 1), clipped + (bounded != ratio)
            total += min(ratio * advantage, bounded * advantage) / len(places)
    return -total / len(step["labels"]), moved, clipped


def test_each_step_has_the_papers_loss_of_the_policy_that_sampled(guesser: Path, tmp_path: Path) -> None:
    options = (f"run.output_dir={tmp_path}/out", "run.micro_batch_size=8", THREE, *FAST)
    (steps,) = run_ranks(1, _recorded, str(guesser / "grpo.yaml"), options, 6)
    numbers, state = [step["numbers"] for step in steps], [step["state"] for step in steps]
    assert numbers == [[*range(8)]] * 3 + [[*range(8, 16)]] * 3
    assert state == [(0, 1), (0, 2), (8, 0), (8, 1), (8, 2), (16, 0)]
    clipped = 0
    for number, step in enumerate(steps):
        first = steps[number // 3 * 3]
        assert (step["input_ids"] == first["input_ids"]).all()
        assert (step["labels"] == first["labels"]).all()
        loss, moved, beyond = _by_the_paper(step, first, 4)
        assert (moved > 0) == (number % 3 > 0)
        assert step["loss"] == pytest.approx(loss, rel=2e-5, abs=2e-6)
        clipped += beyond
    assert clipped > 0
    assert abs(steps[0]["loss"]) < 1e-6, "the loss of new completions is the mean advantage"
    assert abs(steps[2]["loss"]) > 1e-3


def _killed(project: str, options: tuple[str, ...], step: int) -> None:
    """Train, and kill this process after a step has been saved."""
    trainer = make_trainer(project, options)
    go_on = trainer.train_step

    def train_step(batches: Any) -> Any:
        if trainer.state.step == step:
            trainer.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(batches)

    trainer.train_step = train_step
    trainer.fit()


OPTIONS = (
    THREE, "run.bitwise=true", "run.micro_batch_size=2", "run.max_iters=7", "run.save_interval=1",
    "run.objective.kl=0.1", *FAST,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(guesser: Path) -> Any:
    return train(guesser / "grpo.yaml", "whole", *OPTIONS)


def test_a_run_that_is_killed_between_the_steps_has_the_bits_of_one_that_is_not(guesser: Path, whole: Any) -> None:
    folder = guesser / "killed"
    for step in (1, 5):  # after one and after two of three steps
        with pytest.raises(AssertionError, match="died"):
            run_ranks(1, _killed, str(guesser / "grpo.yaml"), (f"run.output_dir={folder}", *OPTIONS), step)
    killed = train(guesser / "grpo.yaml", "killed", *OPTIONS)
    for key in ("step", "loss", "grad_norm", "reward", "length", "kl", "clipped", "parity", "off_policy_steps"):
        assert killed.column(key) == whole.column(key), key
    assert whole.column("off_policy_steps") == [0, 1, 2, 0, 1, 2, 0]
    assert whole.column("samples") == [0, 0, 8, 8, 8, 16, 16]
    assert recorded(find_checkpoint(killed.folder)) == recorded(find_checkpoint(whole.folder)) is not None


@pytest.mark.parametrize("layout", mostly_slow(["ddp@2", "fsdp@2", "zero3@2", "megatron_pp2@2"], ["ddp@2", "fsdp@2"]))
def test_the_bits_are_those_of_one_rank(guesser: Path, whole: Any, layout: str) -> None:
    name, size = layout.split("@")
    options = ("run.save_interval=null", f"run.runner={name}")
    run = train(guesser / "grpo.yaml", f"bits_{name}", *OPTIONS, *options, size=int(size))
    for key in ("loss", "reward", "off_policy_steps"):
        assert run.column(key) == whole.column(key), key
    assert recorded(find_checkpoint(run.folder)) == recorded(find_checkpoint(whole.folder)) is not None


@pytest.mark.slow
def test_completions_of_old_samplers_are_used_several_times(guesser: Path) -> None:
    """With both options, the sampler is renewed after `sampler_steps` batches of `updates_per_rollout` steps."""
    options = (*OPTIONS, "run.objective.updates_per_rollout=2", "run.objective.sampler_steps=2")
    run = train(guesser / "grpo.yaml", "both", *options)
    assert run.column("off_policy_steps") == [0, 1, 2, 3, 0, 1, 2]


def test_an_epoch_takes_each_sample_once(guesser: Path, tmp_path: Path) -> None:
    config = load_config(guesser / "grpo.yaml", ("run.max_iters=null", "run.max_epoch=2", THREE))
    plan = batch_plan(config, 1)
    assert plan.steps(config.run, 20) == 3 * 5  # 40 samples in batches of 8


def _after(project: str, options: tuple[str, ...], uses: int, left_out: list[list[int]]) -> list[tuple[int, int]]:
    """First sample of a step after sample 0, and number of earlier steps with it; the same of the step after that."""
    trainer, found = make_trainer(project, options), []
    trainer.state.uses, trainer.state.left_out = uses, left_out
    for _ in range(2):
        step = next(trainer.batches())  # as after a restart
        trainer.train_step(iter([step]))
        found.append((step.numbers[0], step.use))
    return found


@pytest.mark.parametrize(
    ("uses", "left_out", "expected"),
    [
        (1, [], [(0, 1), (0, 2)]), (2, [], [(0, 2), (8, 0)]), (3, [], [(8, 0), (8, 1)]),
        (1, [[0, 7]], [(8, 0), (8, 1)]),
    ],
    ids=["first", "second", "the option was larger before", "rolled back and left out"],
)  # fmt: skip
def test_a_resume_takes_the_next_step(
    guesser: Path, tmp_path: Path, uses: int, left_out: list[list[int]], expected: list[tuple[int, int]]
) -> None:
    options = (f"run.output_dir={tmp_path}/out", THREE)
    assert run_ranks(1, _after, str(guesser / "grpo.yaml"), options, uses, left_out) == [expected]
