"""A callback that notes its moments, and does on request what callbacks should not."""

import json
from dataclasses import dataclass

import torch

from crosstrain import Callback, registry

poisoned = set()  # steps at which this process has spoiled the weights


@registry.register_callback("diary")
class Diary(Callback):
    """Notes its moments."""

    @dataclass
    class Options:
        fails_in: str = ""  # a moment
        poison: int = 0  # the step before which a weight becomes NaN, once
        ends_after: int = 0  # a step, on the last rank
        notes_gradients: bool = False

    def __init__(self, options, trainer):
        super().__init__(options, trainer)
        self.state = {"moments": [], "steps": []}
        self.gradients = []

    def note(self, moment):
        self.state["moments"].append(moment)
        if moment == self.options.fails_in:
            raise ValueError("ink is dry")

    def on_start(self):
        self.note("on_start")

    def before_step(self, batch):
        self.note("before_step")
        if (step := self.trainer.state.step + 1) == self.options.poison and step not in poisoned:
            poisoned.add(step)
            with torch.no_grad():
                next(self.trainer.runner.model.parameters())[0] = torch.nan

    def after_backward(self, batch, loss):
        self.note("after_backward")
        if self.options.notes_gradients:
            pieces = [p.data for shard in self.trainer.runner.held.gradients() for p in shard.pieces]
            self.gradients.append(torch.cat([data.flatten() for data in pieces]).double())

    def after_step(self, metrics):
        self.note("after_step")
        self.state["steps"].append(metrics.step)
        self.scalars["diary/pages"] = len(self.state["moments"])
        world = self.trainer.runner.world
        if metrics.step == self.options.ends_after and world.rank == world.size - 1:
            self.trainer.end("the diary is full")

    def on_validation(self, metrics):
        self.note("on_validation")
        self.scalars["diary/val_loss"] = metrics["val_loss"]

    def on_save(self, checkpoint):
        self.note(f"on_save {checkpoint.name}")
        self.scalars["diary/saved"] = self.trainer.state.step

    def on_end(self):
        self.note("on_end")
        (self.trainer.folder.path / "diary.json").write_text(json.dumps(self.state["moments"]))
