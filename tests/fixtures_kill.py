"""Runs that die and go on: how they are killed, and how it is told that nothing was lost."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from conftest import Run, Workspace
from crosstrain.checkpoint.digests import digests
from crosstrain.checkpoint.files import Reader

COMPARED = ("step", "loss", "lr", "grad_norm", "samples", "val_loss")
INTERVALS = (
    "run.save_interval=4",
    "run.eval_interval=5",
    "run.eval_iters=2",
    "run.lr_sched=cosine",
    "run.warmup_steps=3",
)

# A model whose checkpoints take a second to write, so that a kill can be aimed at the middle of a save.
SLOW_MODEL = '''
import time
from crosstrain import TransformersExport
from crosstrain.config.registry import registry
GPT2 = registry.get("model", "gpt2")

class SlowExport(TransformersExport):
    def save_config(self, folder):
        super().save_config(folder)
        time.sleep(1.0)

@registry.register_model("slow_to_save")
class SlowToSave(GPT2):
    """GPT-2 that dawdles."""
    def __init__(self, options):
        super().__init__(options)
        self.export = SlowExport(self)
'''


def numbers(run: Run) -> list[tuple]:
    return [tuple(row.get(key) for key in COMPARED) for row in run.rows]


def assert_same_weights(a: Path, b: Path) -> None:
    names = sorted(path.name for path in a.glob("*.safetensors"))
    assert {name[:5] for name in names} == {"model", "train"}
    assert names == sorted(path.name for path in b.glob("*.safetensors"))
    for name in names:
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].equal(right[key]), f"{name}: {key} differs"


# A runner whose workers die, each death once: it leaves a file behind that says so.
DYING_RUNNER = '''
import os, pathlib, signal
from dataclasses import dataclass, field
from crosstrain.utils.errors import TrainingError
from crosstrain.config.registry import registry
DDP = registry.get("runner", "ddp")

@registry.register_runner("dying")
class Dying(DDP):
    """DDP in which a rank dies at its n-th step after a start, for every entry `n:rank:how` of `deaths`."""
    @dataclass
    class Options(DDP.Options):
        deaths: list[str] = field(default_factory=list)
        graves: str = "."
    steps = 0
    def forward_backward(self, micro_batches, num_targets):
        self.steps += 1
        for death in self.options.deaths:
            step, rank, how = death.split(":")
            grave = pathlib.Path(self.options.graves, death)
            if (self.steps, self.world.rank) == (int(step), int(rank)) and not grave.exists():
                if not how.startswith("always"):
                    grave.touch()
                if how.endswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "user":
                    raise TrainingError("the moon is in the wrong phase; wait a week")
                raise ZeroDivisionError("a bug in a plugin")
        return super().forward_backward(micro_batches, num_targets)
'''


def dying(folder: Path, *deaths: str) -> tuple[str, str]:
    """Options that train with DYING_RUNNER, which is written into `folder`; its deaths are noted there."""
    (folder / "dying.py").write_text(DYING_RUNNER)
    return f"run.plugins=[{folder}]", f"run.runner={{name: dying, deaths: {json.dumps(deaths)}, graves: {folder}}}"


def workers(launcher: int) -> list[int]:
    """Processes that the launcher started to train."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == launcher and b"spawn_main" in command:
                found.append(int(entry.name))
    assert found
    return found


def sentence(run: Run) -> str:
    """The one sentence that a failed run ends with."""
    assert run.code == 1
    errors = [text for text in run.err.splitlines() if "error:" in text.lower() or "Traceback" in text]
    assert len(errors) == 1, run.err
    assert run.err.rstrip().splitlines()[-1] == errors[0]
    assert errors[0].startswith("error: ")
    return errors[0].removeprefix("error: ")


def plant(workspace: Workspace, plugin: str) -> Workspace:
    """Write a plugin whose ranks go astray into the workspace's folder `elsewhere`."""
    folder = workspace.path / "elsewhere"
    folder.mkdir()
    (folder / "astray.py").write_text(plugin)
    return workspace


def end_of(folder: Path) -> dict[str, str]:
    """The digests of a run's only checkpoint."""
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    return digests(Reader.open(checkpoint))


def changes(folder: Path) -> list[str]:
    """The log's lines about ranks that go on, without times."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [line.split(" ", 2)[2] for line in lines if "ranks go on" in line]
