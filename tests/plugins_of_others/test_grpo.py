"""On-policy GRPO: one file of public names; its numbers computed again, and the same samples under every runner."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

HERE = Path(__file__).parent
END, EQUALS = 12, 11


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project.yaml"
    model = {"arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 8, "vocab_size": 13, "dropout": 0}
    run = {
        "plugins": [str(HERE)], "runner": "ddp", "objective": {"name": "short_grpo", "completions": 8}, "max_iters": 60,
        "global_batch_size": 8, "micro_batch_size": 4, "init_lr": 3e-3, "min_lr": 3e-3, "log_interval": 1,
        "eval_interval": None, "device": "cpu", "output_dir": "out",
    }  # fmt: skip
    datasets = {"sums": {"name": "digit_sums", "digits": 3}}
    path.write_text(yaml.safe_dump({"model": model, "datasets": datasets, "run": run}))
    return path


Steps = list[tuple[float, float, dict[int, list[list[int]]]]]


def _steps(project: str, options: tuple[str, ...], count: int) -> Steps:
    """Loss, gradient norm and this rank's sampled rows, by the first sample of their micro batch, of each step."""
    trainer = make_trainer(project, options)
    stream, out = trainer.batches(), []
    for _ in range(count):
        step = next(stream)
        metrics = trainer.train_step(iter([step]))
        rows = {micro.first_sample: micro.data["input_ids"].tolist() for micro in step}
        out.append((metrics.loss, metrics.grad_norm, rows))
    trainer.runner.close()
    return out


RUNNERS = ["ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_pp2@2"]


@pytest.mark.parametrize("runner", mostly_slow(RUNNERS, []))
def test_every_runner_draws_the_same_samples(project: Path, runner: str) -> None:
    (one,) = run_ranks(1, _steps, str(project), (f"run.output_dir={project.parent / 'one'}",), 3)
    name, _, size = runner.partition("@")
    options = (f"run.output_dir={project.parent / 'other'}", f"run.runner={name}")
    ranks = run_ranks(int(size), _steps, str(project), options, 3, seconds=240)
    for number, (loss, norm, rows) in enumerate(one):
        drawn: dict[int, list[list[int]]] = {}
        for rank in ranks:
            drawn |= rank[number][2]
        assert drawn == rows
        # A step's loss is a difference of near-equal gains, so its rounding is larger than a mean's.
        assert ranks[0][number][:2] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))


def _first_step(project: str, options: tuple[str, ...]) -> dict[str, Any]:
    """The first step's batches, with the loss of changed weights, and these weights' logits."""
    import torch

    trainer = make_trainer(project, options)
    runner, step = trainer.runner, next(trainer.batches())
    with torch.no_grad():
        for number, parameter in enumerate(runner.model.parameters()):  # so that ratios reach the clip
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.02)
    out: dict[str, Any] = {"batches": [], "losses": [], "logits": [], "units": [micro.num_targets for micro in step]}
    for micro in step:
        out["losses"].append(runner.compute_loss(micro.data).item())
        out["logits"].append(runner.model.lm(input_ids=micro.data["input_ids"]).logits.detach().double().numpy())
        out["batches"].append({key: value.numpy() for key, value in micro.data.items()})
    return out


def test_advantages_and_losses_are_the_papers(project: Path) -> None:
    """Once more from tokens and logits, one completion after the other."""
    (found,) = run_ranks(1, _first_step, str(project), (f"run.output_dir={project.parent / 'out'}",))
    clipped = 0
    for batch, loss, logits, units in zip(*(found[k] for k in ("batches", "losses", "logits", "units")), strict=True):
        rewards, total, count = [], 0.0, 0
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            a, plus, b, equals = (int(token) for token in ids[:4])
            assert (plus, equals) == (10, EQUALS)
            completion = [int(label) for label in labels if label != -100]
            right = completion == [(a + b) % 10, END]
            digit = len(completion) == 2 and completion[0] < 10 and completion[1] == END
            rewards.append(1.0 if right else 0.1 if digit else 0.0)
        for row, (labels, own) in enumerate(zip(batch["labels"], rewards, strict=True)):
            group = rewards[row // 8 * 8 : row // 8 * 8 + 8]
            advantage = (own - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-4)
            assert batch["advantages"][row] == pytest.approx(advantage, abs=1e-5)
            for place in np.flatnonzero(labels != -100):
                scores = logits[row, place, :13]
                now = scores[labels[place]] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
                ratio = np.exp(now - batch["old"][row, place])
                bounded = min(max(ratio, 0.8), 1.2)
                clipped += bounded != ratio
                behind = batch["reference"][row, place] - now
                total -= min(ratio * advantage, bounded * advantage) - 0.04 * (np.exp(behind) - behind - 1)
                count += 1
        assert count == units
        assert loss == pytest.approx(total, rel=1e-5, abs=1e-5)
    assert clipped > 0
    assert all((batch["old"] == batch["reference"]).all() for batch in found["batches"]), "no step was made yet"


@pytest.mark.slow
def test_reward_rises(project: Path) -> None:
    rate = ("run.init_lr=5e-3", "run.min_lr=5e-3")
    run = train(project, "learns", "datasets.sums.digits=2", "run.objective.kl=0", *rate)
    rewards = run.column("reward")
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.3, rewards


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_reference(project: Path) -> None:
    whole = train(project, "whole", "run.max_iters=6")
    train(project, "halves", "run.max_iters=3")
    halves = train(project, "halves", "run.max_iters=6")
    keys = ("loss", "grad_norm", "reward", "kl")
    assert [halves.column(key) for key in keys] == [whole.column(key) for key in keys]
    assert whole.column("kl")[0] == 0
    assert whole.column("kl")[-1] > 0


def test_a_validation_generates_samples(project: Path) -> None:
    run = train(project, "validates", "run.eval_interval=2", "run.max_iters=2")
    assert "val_reward" in run.rows[-1]
