"""The interface of callback plugins, and the callbacks of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstrain.checkpoint.boxes import CALLBACK, Shard
from crosstrain.checkpoint.files import Reader
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.logging import log
from crosstrain.utils.program import blamed

if TYPE_CHECKING:
    from crosstrain.training.trainer import Trainer


class Callback:
    """Base class of all callbacks. `run.callbacks: [{name: ..., <Options>}]` chooses and configures some.

    Every rank makes one when weights and optimizer state are loaded, and anew after a roll back; then `state` and the
    boxes of `shards` are filled in from the checkpoint. All ranks call its methods at the same moments. It may call
    `trainer.end` and `trainer.save_as`.
    """

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        """Raise ConfigError for settings of the run that do not suit the options; no worker exists yet."""

    def __init__(self, options: Any, trainer: Trainer) -> None:
        self.options, self.trainer = options, trainer
        self.state: dict[str, Any] = {}  # JSON values, which checkpoints keep
        self.scalars: dict[str, float] = {}  # by name, for the next log line and row; rank 0's count

    def on_start(self) -> None:
        """Training begins, or goes on from a checkpoint."""

    def before_step(self) -> None:
        """The learning rate is set, and no forward has begun."""

    def after_backward(self) -> None:
        """`trainer.runner.gradients()` are complete, neither clipped nor checked."""

    def after_step(self, metrics: StepMetrics) -> None:
        """The weights are updated, unless the step was skipped."""

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        """Numbers of a validation are there, such as val_loss, the same on every rank."""

    def on_save(self, checkpoint: Path) -> None:
        """The present state is about to be saved as `checkpoint`, a folder that appears when it is complete."""

    def on_end(self) -> None:
        """Training ends, at its last step or a stop, and the last checkpoint is written."""

    def shards(self) -> list[Shard]:
        """This rank's part of tensors that checkpoints keep, in live memory, of kinds that the callback names."""
        return []

    def keep(self) -> set[int]:
        """Steps whose checkpoints are not to be deleted."""
        return set()

    # ---- for the platform

    def take_scalars(self) -> dict[str, float]:
        taken, self.scalars = {name: float(value) for name, value in self.scalars.items()}, {}
        return taken

    def saved_state(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.state))


class Callbacks:
    """The callbacks of a run on this rank. Whatever one raises becomes a TrainingError that names it and the moment."""

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        """Make the configured callbacks as they were in `checkpoint`; what it lacks begins anew."""
        self.by_name: dict[str, Callback] = {}
        for component in trainer.run.callbacks:
            with blamed(f"run.callbacks: {component.name} failed in __init__"):
                self.by_name[component.name] = registry.get("callback", component.name)(component.options, trainer)
        if checkpoint is None or not self.by_name:
            return
        for name, callback in self.by_name.items():
            if name not in trainer.state.callbacks:
                log.info("callback %s begins at step %d: %s has nothing of it", name, trainer.state.step, checkpoint)
            callback.state |= trainer.state.callbacks.get(name, {})
        reader = Reader.open(checkpoint)
        reader.fill([shard for shard in self.shards() if (shard.kind, shard.name) in reader.tensors])

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every callback; returns the results."""
        results = []
        for name, callback in self.by_name.items():
            with blamed(f"run.callbacks: {name} failed in {method}"):
                results.append(getattr(callback, method)(*arguments))
        return results

    def shards(self) -> list[Shard]:
        """This rank's boxes of all callbacks, under kinds that no optimizer has."""
        found = [replace(shard, kind=CALLBACK + shard.kind) for own in self.call("shards") for shard in own]
        if len({(shard.kind, shard.name) for shard in found}) < len(found):
            raise TrainingError("run.callbacks: two of them name their boxes alike; let one call its kind otherwise")
        return found
