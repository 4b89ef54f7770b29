"""Validation hooks: the loss on the val split, and the checkpoint with the lowest loss."""

import math
from collections.abc import Mapping

from crosstrain.data.dataset import Dataset
from crosstrain.data.splits import named_splits, open_split
from crosstrain.inference.perplexity import LossMetrics, evaluate_loss
from crosstrain.monitor.metrics import Row, StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.logging import log
from crosstrain.utils.units import disjoint


class Validation(Callback):
    """Validates every `run.eval_interval` steps and at the end, and then calls `on_validation` of all hooks."""

    last: LossMetrics | None = None  # validation result of the current step; None: no validation in this step

    @property
    def at_end(self) -> bool:
        """True unless validation is off or the run is shorter than the interval, as in a smoke test."""
        interval = self.trainer.run.eval_interval
        return interval == "epoch" or (interval is not None and interval <= self.trainer.max_iters)

    def after_step(self, metrics: StepMetrics) -> None:
        trainer, self.last = self.trainer, None
        if not trainer.due(trainer.run.eval_interval) and not (self.at_end and metrics.step == trainer.max_iters):
            return
        with trainer.throughput.paused(), trainer.runner.merged():
            assert trainer.val_dataset is not None
            self.last = self.measure(trainer.val_dataset)
            log.info("validation at step %d | %s", metrics.step, self.last.line(".6E"))
            row: Row = {f"val_{name}": value for name, value in self.last.named.items()}
            trainer.hooks.call("on_validation", row)
        trainer.row |= disjoint(row, trainer.hooks.scalars())

    def on_end(self) -> None:
        """Log the final perplexity, and the loss on the test split, if there is one."""
        trainer = self.trainer
        if trainer.val_dataset is not None and self.at_end and not trainer.stopped:
            metrics = self.last
            if metrics is None:  # a resumed run has no steps left
                metrics = self.measure(trainer.val_dataset)
                log.info("validation %s", metrics.line(".6E"))
            if metrics.of_tokens:
                log.info(
                    "validation perplexity %.2f (loss %.4f, %d tokens)",
                    metrics.perplexity,
                    metrics.loss,
                    metrics.targets,
                )
        if "test" in named_splits(trainer.config) and not trainer.stopped:
            log.info("test %s", self.measure(open_split(trainer.config, "test")).line(".6E"))

    def measure(self, dataset: Dataset) -> LossMetrics:
        """Measure the loss on the first `eval_iters` global batches of a split. Collective."""
        trainer = self.trainer
        samples = trainer.run.eval_iters * trainer.plan.global_batch
        return evaluate_loss(trainer.runner, dataset, trainer.plan.micro_batch, samples, trainer.run.num_workers)


class BestPointer(Callback):
    """Tracks the lowest validation loss. With `run.save_best`, `checkpoints/best` points to the best checkpoint."""

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        if (loss := metrics.get("val_loss")) is None:
            raise ConfigError("run.callbacks: the validation has no val_loss, by which the best checkpoint is chosen")
        state = self.trainer.state
        if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
            state.best_loss = loss
            if self.trainer.run.save_best:
                self.trainer.save_as("best")
