"""The hook that saves checkpoints."""

import signal
from contextlib import suppress
from dataclasses import asdict

from crosstrain.checkpoint import folders
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.logging import log
from crosstrain.utils.processes import on_parents_death
from crosstrain.utils.trust import signature


class Saving(Callback):
    """Saves a checkpoint every `run.save_interval` steps, when a hook calls `trainer.save_as`, and at the end."""

    def on_start(self) -> None:
        if self.trainer.run.on_bad_step.policy == "roll_back" and self.trainer.saved_step is None:
            with self.trainer.throughput.paused():
                self.save(background=False)
                self.trainer.checkpointer.wait()  # roll_back needs a checkpoint

    def after_step(self, metrics: StepMetrics) -> None:
        if self.trainer.stop.under_launcher:  # from now on, this worker saves if its launcher is killed
            on_parents_death(signal.SIGINT)
        if self.trainer.due(self.trainer.run.save_interval) or self.trainer.pointers:
            self.save(background=self.trainer.run.save_in_background)

    def before_end(self) -> None:
        self.save(background=False)
        self.trainer.checkpointer.wait()

    def save(self, *, background: bool) -> None:
        """Save the current state unless it is already saved. Collective."""
        trainer = self.trainer
        trainer.folder.check_kept()
        pointers, trainer.pointers = trainer.pointers, set()
        if trainer.runner.world.broadcast(self._is_saved()):
            return
        with trainer.throughput.paused(), trainer.runner.merged():
            trainer.hooks.call("on_save", folders.step_folder(trainer.folder.checkpoints, trainer.state.step))
            trainer.agree_to_end()  # so that the last checkpoint records that a callback ended the run
            config = trainer.config.plain
            document = asdict(trainer.complete_state()) | {"world_size": trainer.runner.world.size, "config": config}
            if trainer.is_main:
                document["signature"] = signature(config)
            log.info("saving %s/checkpoints/step_%06d", trainer.folder.address, trainer.state.step)
            shards = [s for s in trainer.runner.held.saved() if s.name not in trainer.frozen]
            trainer.checkpointer.save(
                trainer.state.step,
                shards + trainer.hooks.shards(),
                document,
                frozen=trainer.frozen,
                pointers=pointers,
                keep=set().union(*trainer.hooks.call("keep")),
                background=background,
            )
        trainer.saved_step = trainer.state.step

    def _is_saved(self) -> bool:
        trainer = self.trainer
        if trainer.state.step != trainer.saved_step:
            return False
        with suppress(CheckpointError):  # if the last save failed or its checkpoint was deleted, save again
            trainer.checkpointer.wait()
        return folders.step_folder(trainer.folder.checkpoints, trainer.state.step).exists()
