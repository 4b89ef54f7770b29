"""Saving sharded state: no rank gathers, and a save that fails leaves the checkpoint before it the newest."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import Workspace, kill, wait_until
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.files import Reader
from fixtures_kill import SLOW_MODEL, workers
from fixtures_ranks import make_trainer, mostly_slow, run_ranks

MB = 2**20


# ---- memory


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _peak_of(action: Any) -> int:
    """Highest resident size while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return _resident("VmHWM")


def _measure(project: str, options: tuple[str, ...]) -> dict[str, int]:
    from crosstrain.checkpoint.checkpointer import Checkpointer
    from crosstrain.config.load import load_config
    from crosstrain.distributed.launch.signals import StopRequest
    from crosstrain.engine.build import make_runner
    from crosstrain.training.worker import build_trainer

    config = load_config(project, options)
    runner = make_runner(config)
    runner.setup()
    before = _resident("VmRSS")
    trainer = build_trainer(config, runner, StopRequest(True))
    batches = trainer.batches()
    trainer.train_step(batches)
    out = {"training": _peak_of(lambda: trainer.train_step(batches)) - before}
    shards = runner.held.shards()
    out["share"] = sum(p.data.numel() * 4 for s in shards for p in s.pieces)
    saver = Checkpointer(Path(config.run.output_dir) / "measured", runner.world.twin(), lambda *_: None)
    out["foreground"] = _peak_of(lambda: saver.save(1, runner.held.shards(), {"step": 1}, background=False)) - before
    base = _resident("VmRSS") - before

    def in_background() -> None:
        saver.save(2, runner.held.shards(), {"step": 2})
        saver.wait()

    out["background"] = _peak_of(in_background) - before - base
    runner.close()
    return out


@pytest.mark.parametrize("runner", mostly_slow(["zero3", "fsdp"], []))
def test_no_rank_gathers_to_save(workspace: Workspace, runner: str) -> None:
    options = (
        f"run.runner={runner}", f"run.output_dir={workspace.path}/out", "model.n_embd=512", "model.n_layer=6",
        "run.micro_batch_size=4",
    )  # fmt: skip
    for rank in run_ranks(2, _measure, str(workspace.project), options):
        print({key: f"{value / MB:.0f} MB" for key, value in rank.items()})
        whole = 2 * rank["share"]
        assert whole > 200 * MB, "too small to see a copy of it"
        # A few percent: the file system's and the allocator's own.
        assert rank["foreground"] < 1.05 * rank["training"]
        assert rank["background"] < rank["share"] + 20 * MB


# ---- failure


def _train_until_the_disk_is_full(project: str, options: tuple[str, ...]) -> str:
    from crosstrain.utils.errors import CheckpointError

    trainer = make_trainer(project, options)
    runner = trainer.runner
    step = trainer.train_step

    def full_after_six(batches: Any) -> dict[str, Any]:
        if trainer.state.step == 6 and runner.world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # writing more fails, on this rank alone
        return step(batches)

    trainer.train_step = full_after_six
    try:
        trainer.fit()
    except CheckpointError as error:
        runner.close()
        return str(error)
    return "nothing failed"


@pytest.mark.parametrize("background", mostly_slow(["true", "false"], []))
def test_a_full_disk_on_one_rank_fails_the_save_on_all(workspace: Workspace, background: str) -> None:
    folder = workspace.path / "out"
    options = (
        "run.runner=zero3", f"run.output_dir={folder}", "run.max_iters=10", "run.save_interval=5",
        f"run.save_in_background={background}",
    )  # fmt: skip
    for said in run_ranks(2, _train_until_the_disk_is_full, str(workspace.project), options):
        assert (
            "step_000010 could not be written: [Errno 27] File too large (rank 1); earlier checkpoints are intact"
            in said
        )
    assert folders.newest_valid(folder / "checkpoints") == (folder / "checkpoints" / "step_000005", [])
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["latest", "step_000005"]


@pytest.mark.slow
def test_a_rank_killed_while_it_saves(workspace: Workspace) -> None:
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "slow.py").write_text(SLOW_MODEL)
    folder = workspace.path / "out"
    model = json.dumps(workspace.config["model"] | {"arch": "slow_to_save"})
    process = workspace.start(
        "out",
        f"run.plugins=[{workspace.path}/plugins]",
        f"model={model}",
        "run.runner=zero3",
        "run.save_interval=5",
        "run.max_iters=10",
        nproc=2,
    )
    try:
        wait_until(lambda: (folder / "checkpoints" / ".step_000010.tmp" / "config.json").exists(), process)
        os.kill(max(workers(process.pid)), signal.SIGKILL)
        out = process.communicate(timeout=60)[0]
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in out
    assert folders.newest_valid(folder / "checkpoints") == (folder / "checkpoints" / "step_000005", [])
    assert Reader.open(folder / "checkpoints" / "step_000005").names("exp_avg")
