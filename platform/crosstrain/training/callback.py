"""The interface of hooks: the platform's own hooks, and the callbacks that a run adds."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from crosstrain.checkpoint.boxes import CALLBACK, Shard
from crosstrain.checkpoint.files import Reader
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.utils.errors import ConfigError, TrainingError
from crosstrain.utils.logging import log
from crosstrain.utils.program import blamed
from crosstrain.utils.types import Step
from crosstrain.utils.units import disjoint

if TYPE_CHECKING:
    from crosstrain.training.trainer import Trainer


class Callback:
    """Base class of all hooks. `run.callbacks: [{name: ..., <Options>}]` adds and configures callbacks.

    Every rank creates its own instance after weights and optimizer state are loaded, and a new instance after a
    rollback. Then `state` and the tensors of `shards` are loaded from the checkpoint. All ranks call the methods at the
    same points, in the order of `training/hook_order.py`. A hook may call `trainer.end` and `trainer.save_as`, and add
    metrics to `trainer.row`.
    """

    replaces: ClassVar[str | None] = None  # name of a platform hook that this callback replaces; None: an extra hook

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        """Raise ConfigError if the options conflict with the run's settings; called before workers start."""

    def __init__(self, options: Any, trainer: "Trainer") -> None:
        self.options, self.trainer = options, trainer
        self.state: dict[str, Any] = {}  # JSON values that are saved in checkpoints
        self.scalars: dict[str, float] = {}  # name -> metric for the next log line and `row`; rank 0's value is used

    def on_start(self) -> None:
        """Called when training starts or resumes from a checkpoint."""

    def before_batch(self) -> None:
        """Called at the start of a step, before its samples are loaded."""

    def before_step(self, batch: Step) -> None:
        """Called before the forward, when this rank's micro batches are loaded and the learning rate is set."""

    def after_backward(self, batch: Step, loss: float) -> str | None:
        """Called when the gradients, `trainer.runner.held.gradients()`, are complete but not yet clipped or checked.

        Return a reason to discard the gradients; None: apply them. Every rank must return the same value.
        """

    def after_step(self, metrics: StepMetrics) -> None:
        """Called after the weights are updated, or after the step was skipped (see `metrics.applied`)."""

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        """Called after a validation; `metrics`, such as val_loss, are the same on every rank."""

    def on_save(self, checkpoint: Path) -> None:
        """Called before a save; the folder `checkpoint` appears when the save is complete."""

    def before_end(self) -> None:
        """Called when training ends, at its last step or on request, before the last checkpoint is written."""

    def on_end(self) -> None:
        """Called after the last checkpoint is written."""

    def close(self) -> None:
        """Called when training has ended, perhaps with an error."""

    def places(self) -> list[tuple[str, str]]:
        """Return (title, place) pairs for the last lines of a run's log; a place is a file, an address or a command."""
        return []

    def shards(self) -> list[Shard]:
        """Return this rank's shards of the callback's tensors, to be saved in checkpoints and restored in place.

        The callback may use any names as `Shard.kind`.
        """
        return []

    def keep(self) -> set[int]:
        """Return the steps of checkpoints that must not be deleted."""
        return set()

    # ---- for the platform

    def take_scalars(self) -> dict[str, float]:
        taken, self.scalars = {name: float(value) for name, value in self.scalars.items()}, {}
        return taken

    def saved_state(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.state))


HookKinds = Mapping[str, type[Callback] | None]  # in call order: name -> class; None: the callback plugin of this name


class Hooks:
    """The hooks of a run on this rank: platform hooks, the run's callbacks, then the other platform hooks.

    An error in one of the run's callbacks becomes a TrainingError that names the callback and the method.
    """

    def __init__(self, trainer: "Trainer", before: HookKinds, after: HookKinds) -> None:
        """Create all hooks. before, after: platform hooks called before and after the run's callbacks, in order."""
        self._trainer, self._places = trainer, (tuple(before), tuple(after))
        self.callbacks: dict[str, Callback] = {}  # name -> callback of the run; more may be added later
        self._platform: dict[str, Callback] = {}
        names = [component.name for component in trainer.run.callbacks]
        if twice := {*names} & {*before, *after}:
            raise ConfigError(f"run.callbacks: {min(twice)} is a hook of every run: remove it")
        replaced = {registry.get("callback", name).replaces for name in names}
        for name, kind in {**before, **after}.items():
            if name not in replaced:
                self._platform[name] = (kind or registry.get("callback", name))(None, trainer)
        if unknown := replaced - {None, *before, *after}:
            raise ConfigError(
                f"run.callbacks: a callback replaces {min(map(str, unknown))}, which is not a platform hook"
            )
        self.load(trainer.start)

    def load(self, checkpoint: Path | None) -> None:
        """Create the run's callbacks and load their states from `checkpoint`; callbacks without a state start fresh."""
        trainer, self.callbacks = self._trainer, {}
        for component in trainer.run.callbacks:
            with blamed(f"run.callbacks: {component.name} failed in __init__"):
                self.callbacks[component.name] = registry.get("callback", component.name)(component.options, trainer)
        if checkpoint is not None and self.callbacks:
            for name, callback in self.callbacks.items():
                if name not in trainer.state.callbacks:
                    log.info(
                        "callback %s starts fresh at step %d: %s has no state for it",
                        name,
                        trainer.state.step,
                        checkpoint,
                    )
                callback.state |= trainer.state.callbacks.get(name, {})
            reader = Reader.open(checkpoint)
            reader.fill([shard for shard in self.shards() if (shard.kind, shard.name) in reader.tensors])

    def ordered(self) -> dict[str, Callback]:
        """Return name -> hook in call order."""
        in_place_of = {callback.replaces: name for name, callback in self.callbacks.items() if callback.replaces}
        before, after = ([in_place_of.get(name, name) for name in names] for names in self._places)
        further = [name for name, callback in self.callbacks.items() if callback.replaces is None]
        known = self._platform | self.callbacks
        return {name: known[name] for name in (*before, *further, *after)}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every hook in order, and return the results."""
        results = []
        for name, hook in self.ordered().items():
            with blamed(f"run.callbacks: {name} failed in {method}") if name in self.callbacks else nullcontext():
                results.append(getattr(hook, method)(*arguments))
        return results

    def scalars(self) -> dict[str, float]:
        """Collect and clear the metrics of all hooks for the next log line."""
        return reduce(disjoint, self.call("take_scalars"), {})

    def saved_states(self) -> dict[str, dict[str, Any]]:
        """Return name -> state of the run's callbacks, for a checkpoint."""
        states = dict(zip(self.ordered(), self.call("saved_state"), strict=True))
        return {name: states[name] for name in self.callbacks}

    def shards(self) -> list[Shard]:
        """Return this rank's shards of all hooks; a prefix distinguishes their kinds from those of optimizer state."""
        found = [replace(shard, kind=CALLBACK + shard.kind) for own in self.call("shards") for shard in own]
        if len({(shard.kind, shard.name) for shard in found}) < len(found):
            raise TrainingError(
                "run.callbacks: two callbacks store tensors with the same kind and name; rename the kind in one of them"
            )
        return found
