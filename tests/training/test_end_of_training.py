"""What a run logs of its size when it starts, and of the test split when it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.data.splits import open_split
from crosstrain.engine.build import make_runner
from crosstrain.inference.open_checkpoint import load_model
from crosstrain.inference.perplexity import evaluate_loss
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import EmptySplit
from fixtures_ranks import run_ranks, train

SHORT = ("run.max_iters=2", "model.dropout=0")


def test_a_named_test_split_is_measured_at_the_end(workspace: Workspace, dataset: Path) -> None:
    named = (f"datasets.tiny.test={dataset}", "run.eval_iters=1", *SHORT)
    log = (train(workspace.project, "named", *named).folder / "log.txt").read_text()
    found = re.search(r"test .*loss value: ([0-9.E+-]+)|test .*loss ([0-9.E+-]+)", log)
    assert found is not None, log
    said = float(found[1] or found[2])
    (expected,) = run_ranks(1, test_loss, str(workspace.project), named, str(workspace.path / "named"))
    assert said == pytest.approx(expected, rel=1e-5)
    assert "test " not in (train(workspace.project, "not_named", *SHORT).folder / "log.txt").read_text()


def test_loss(project: str, options: tuple[str, ...], folder: str) -> float:
    from crosstrain.inference.open_checkpoint import find_model

    config = load_config(project, options)
    runner = make_runner(config)
    runner.setup()
    load_model(config, runner, find_model(folder, None), None)
    loss = evaluate_loss(runner, open_split(config, "test"), 4, 8).loss
    runner.close()
    return loss


test_loss.__test__ = False  # type: ignore[attr-defined]


def test_a_named_test_split_without_a_sample_is_refused_before_training(workspace: Workspace, dataset: Path) -> None:
    options = [f"datasets.tiny.test={dataset}", "datasets.tiny.seq_length=32", *SHORT]
    config = load_config(workspace.project, options)
    config.datasets["tiny"].options.seq_length = 10**6
    with pytest.raises(EmptySplit):
        preflight(config, 1)


@pytest.mark.slow
def test_the_log_has_a_rank_s_parameters_and_those_of_all_with_padding(workspace: Workspace) -> None:
    def numbers(name: str, *more: str, size: int = 1) -> tuple[str, ...]:
        log = (train(workspace.project, name, *SHORT, *more, size=size).folder / "log.txt").read_text()
        found = re.search(r"gpt2: ([\d,]+) parameters \(([\d,]+) trainable, ([\d,]+) on rank 0\)", log)
        assert found is not None, log
        return tuple(int(number.replace(",", "")) for number in found.groups())

    # 320 rows become 384, a multiple of 128, and 512, one of 256. A block has 12 h^2 + 13 h parameters.
    others = 2 * (12 * 32**2 + 13 * 32) + 32 * 32 + 2 * 32
    assert numbers("one") == (384 * 32 + others,) * 3
    whole, trained, mine = numbers("two", "run.runner=megatron_tp2", size=2)
    assert whole == trained == 512 * 32 + others
    column, row = 32 * 96 + 96 + 32 * 128 + 128, 32 * 32 + 128 * 32  # halves; biases of rows and norms are whole
    assert mine == 256 * 32 + 2 * ((column + row) // 2 + 2 * 32 + 4 * 32) + 32 * 32 + 2 * 32
    assert numbers("zero", "run.runner=zero1", size=2) == (384 * 32 + others,) * 3
