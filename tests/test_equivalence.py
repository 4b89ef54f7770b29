"""The product's sentence: the number of workers changes nothing but the time."""

from __future__ import annotations

import pytest

from conftest import Workspace

# A sum of two fp32 numbers is rounded once, whoever adds them; a norm over 30,000 gradients in another memory layout
# is summed in another order, which moves its last digits.
TOLERANCE = 1e-6


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["{name: adamw}", "{name: sgd}"])
def test_two_workers_equal_one_with_double_accumulation(workspace: Workspace, optimizer: str, dropout: float) -> None:
    rate = "1e-2" if "adamw" in optimizer else "0.5"
    options = [
        f"run.optimizer={optimizer}",
        f"run.init_lr={rate}",
        f"model.dropout={dropout}",
        "run.grad_norm_clip=1.0",
    ]
    one = workspace.train("one", *options, nproc=1)
    two = workspace.train("two", *options, nproc=2)

    assert len(one.rows) == len(two.rows) == 20
    assert one.column("loss") == pytest.approx(two.column("loss"), rel=TOLERANCE)
    assert one.column("grad_norm") == pytest.approx(two.column("grad_norm"), rel=TOLERANCE)
    assert one.column("samples") == two.column("samples")
    assert one.rows[-1]["loss"] < 0.8 * one.rows[0]["loss"], "nothing was learned, so nothing was compared"


def test_micro_batch_size_changes_nothing_without_dropout(workspace: Workspace) -> None:
    whole = workspace.train("whole", "model.dropout=0.0", "run.micro_batch_size=8")
    parts = workspace.train("parts", "model.dropout=0.0", "run.micro_batch_size=1")
    # Adam divides by the gradient's own size, so that rounding in small gradients is amplified step by step.
    assert whole.column("loss") == pytest.approx(parts.column("loss"), rel=2e-5)
