"""Training by every runner, to compare with one process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open

from conftest import ENVIRONMENT, ROOT, Run, Workspace
from fixtures_ranks import make_trainer, run_ranks

Boxes = list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]

# Relative. More than four times the noise of one process that takes its micro batches in reverse order, which a test
# below measures for this seed; sums over ranks are rounded in yet another order.
TOLERANCE = 2e-6


# bf16 rounds at 4e-3. Equal micro batches give equal results; what differs is the last bit of an fp32 weight, which now
# and then moves a rounded activation. Four times the largest that was seen (1.1e-4).
HALF_TOLERANCE = 5e-4


GRADIENT_TOLERANCE = 1e-5  # of a tensor's norm, in the first step


def sized(name: str) -> tuple[str, int]:
    runner, _, size = name.partition("@")
    return runner, int(size)


NOWHERE = np.float32(-1e30)  # no gradient is


@dataclass
class Followed:
    """A run, and the gradients of its first step as the ranks held them."""

    run: Run
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


def follow(workspace: Workspace, name: str, *options: str, label: str = "run") -> Followed:
    """Train under the runner and world size that `name` says (`zero2@4`)."""
    runner, size = sized(name)
    folder = workspace.path / f"{label}_{name}"
    options = (f"run.output_dir={folder}", f"run.runner={runner}", *options)
    ranks = run_ranks(size, _follow, str(workspace.project), options)
    whole: dict[str, np.ndarray] = {}
    for held in ranks:
        for tensor, (shape, boxes) in held.items():
            array = whole.setdefault(tensor, np.full(shape, NOWHERE, np.float32))
            for offset, extent, data in boxes:
                array[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = data
    assert not any((array == NOWHERE).any() for array in whole.values()), "a part of a gradient is nowhere"
    return Followed(Run(folder), whole)


def _follow(project: str, options: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], Boxes]]:
    trainer = make_trainer(project, options)
    runner = trainer.runner
    step, held = runner.optimizer_step, {}

    def first_step(apply: bool = True) -> Any:
        if not held:
            for shard in runner.held.gradients():
                boxes = [
                    (p.box.offset, p.box.shape, p.data.cpu().numpy() / runner.gradient_scale) for p in shard.pieces
                ]
                held[shard.name] = (shard.shape, boxes)
        return step(apply)

    runner.optimizer_step = first_step
    trainer.fit()
    runner.close()
    return held


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def assert_equal_training(one: Followed, other: Followed, tolerance: float) -> None:
    assert other.column("samples") == one.column("samples")
    assert other.column("lr") == one.column("lr")
    assert relative(other.column("loss"), one.column("loss")) < tolerance
    assert relative(other.column("grad_norm"), one.column("grad_norm")) < tolerance
    assert other.gradients.keys() == one.gradients.keys()
    for name, gradient in one.gradients.items():
        difference = np.linalg.norm(other.gradients[name] - gradient)
        assert difference <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), name  # some are exactly zero


COMMON = ("run.max_iters=20", "run.micro_batch_size=1", "run.global_batch_size=8")  # accumulation 8, 4, 2


SETTINGS = {
    # Adam amplifies rounding in gradients near zero; clipping is active in every step; two parameter groups decay
    # differently.
    "adamw": ("run.optimizer=adamw", "run.init_lr=1e-2", "run.grad_norm_clip=0.3", "model.dropout=0.1"),
    # Steps are proportional to gradients, so that a wrong scale shows, and nothing hides it by clipping.
    "sgd": ("run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.05", "run.grad_norm_clip=0", "model.dropout=0"),
}


PLUGINS = ROOT / "tests" / "third_party"


def compare(
    workspace: Workspace, *runners: str, options: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "crosstrain",
            "compare",
            "--cfg-path",
            str(workspace.project),
            "--steps",
            "4",
            *flags,
            "--output",
            "compare.json",
            "--runners",
            *runners,
            "--options",
            f"run.plugins=[{PLUGINS}]",
            "run.global_batch_size=8",
            "run.micro_batch_size=2",
            *options,
        ],
        cwd=workspace.path,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
        capture_output=True,
        text=True,
        timeout=280,
    )


def project(workspace: Workspace, model: dict[str, Any], runner: dict[str, Any] | None = None) -> Workspace:
    workspace.config["model"] = model
    workspace.config["run"]["output_dir"] = str(workspace.path / "out")
    if runner is not None:
        workspace.config["run"]["runner"] = runner
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


def stored(checkpoint: Path) -> set[str]:
    """Names of the tensors that a checkpoint's files hold."""
    names: set[str] = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def evaluate(checkpoint: str, options: tuple[str, ...]) -> tuple[float, list[list[float]], list[int]]:
    """Loss on the validation split, next-token logits of two prompts, and a greedy continuation with a cache."""
    import torch

    from crosstrain.data.splits import open_split
    from crosstrain.engine.build import build_model, make_runner
    from crosstrain.inference.open_checkpoint import saved_config
    from crosstrain.inference.perplexity import evaluate_loss

    config = saved_config(Path(checkpoint), list(options))
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    loss = evaluate_loss(runner, open_split(config, "val"), 3, 10).loss  # the last batch is smaller
    prompts = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
    tokens: list[int] = []
    with runner.evaluating():
        logits = runner.evaluate({"input_ids": prompts})
        cache, new = runner.model.new_cache(), prompts[:1]
        for _ in range(12):
            new = runner.evaluate({"input_ids": new, "cache": cache}).argmax(-1, keepdim=True)
            tokens.append(int(new))
    runner.close()
    return loss, logits.tolist(), tokens
