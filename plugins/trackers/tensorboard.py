"""TensorBoard, for eyes."""

import textwrap

import yaml

from crosstrain.monitor.metrics import Row, flat, scalars, texts
from crosstrain.monitor.tracker import TrackedRun, Tracker
from crosstrain.registry import registry


@registry.register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """TensorBoard: curves, generated text, the configuration and the hyper-parameters."""

    def __init__(self, options: Tracker.Options, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        super().__init__(options, run)
        self._folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), purge_step=run.resumed_step + 1)
        if not run.resumed_step:
            self._text("config", yaml.safe_dump(run.config, sort_keys=False), 0)
        # add_hparams would open a second run folder; the plugin's own summaries put them into this one.
        for summary in hparams(dict(flat(run.config)), {"train/loss": None, "val/loss": None}):
            self._writer._get_file_writer().add_summary(summary)

    def log(self, row: Row) -> None:
        for tag, value in scalars(row):
            self._writer.add_scalar(tag, value, row["step"])
        for tag, text in texts(row):
            self._text(tag, text, row["step"])

    def close(self, finished: bool) -> None:
        self._writer.close()

    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def _text(self, tag: str, text: str, step: int) -> None:
        # It reads Markdown, in which four spaces make code: nothing in the text is markup.
        self._writer.add_text(tag, textwrap.indent(text, "    ", lambda _: True), step)
