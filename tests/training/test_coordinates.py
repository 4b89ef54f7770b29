"""`crosstrain coordinates`: activations that grow with the width, and those that do not."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from conftest import ENVIRONMENT, Workspace

WIDTHS = ("--width", "model.n_embd=32", "model.n_head=2", "--width", "model.n_embd=128", "model.n_head=8")


@pytest.mark.parametrize(("base", "least", "most"), [("null", 6.0, math.inf), ("32", 1.0, 3.0)])
def test_only_the_standard_parametrization_depends_on_the_width(
    workspace: Workspace, base: str, least: float, most: float
) -> None:
    """With mup_base_width, the last norm is left out, because its outputs are scaled by 1 / m on purpose."""
    options = ("run.init_lr=0.01", "run.lr_sched=constant", "model.dropout=0", f"model.mup_base_width={base}")
    command = [sys.executable, "-m", "crosstrain", "coordinates", "--cfg-path", str(workspace.project), *WIDTHS]
    done = subprocess.run(
        [*command, "--options", *options], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    times = {line.split()[0]: float(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith(" times")}
    largest = max(change for module, change in times.items() if "ln_f" not in module)
    assert least <= largest <= most
