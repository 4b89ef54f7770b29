"""How a global batch is cut into micro batches changes nothing; test_runners has what runners must not change."""

from __future__ import annotations

import pytest

from conftest import Workspace
from fixtures_ranks import train


@pytest.mark.slow
def test_micro_batch_size_changes_nothing_without_dropout(workspace: Workspace) -> None:
    whole = train(workspace.project, "whole", "model.dropout=0.0", "run.micro_batch_size=8")
    parts = train(workspace.project, "parts", "model.dropout=0.0", "run.micro_batch_size=1")
    # Adam divides by the gradient's own size, so that rounding in small gradients is amplified step by step.
    assert whole.column("loss") == pytest.approx(parts.column("loss"), rel=2e-5)
