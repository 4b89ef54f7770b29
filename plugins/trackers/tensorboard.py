"""TensorBoard event files."""

import os
import socket
import textwrap
import time
from typing import Any

import yaml

from crosstrain import Row, TrackedRun, Tracker, flat, registry, scalars, texts
from crosstrain.utils.files import append


@registry.register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """TensorBoard: curves, generated text, the configuration and the hyperparameters."""

    def __init__(self, options: Any, run: TrackedRun) -> None:
        from torch.utils.tensorboard.summary import hparams

        super().__init__(options, run)
        self._folder = run.folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._file = self._folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._write(file_version="brain.Event:2")
        # A START event makes TensorBoard hide the points that earlier starts logged at or after this event's step.
        self._write(step=run.resumed_step + 1, session_log={"status": "START"})
        if not run.resumed_step:
            self._summarize(0, _text("config", yaml.safe_dump(run.config, sort_keys=False)))
        self._summarize(0, *hparams(dict(flat(run.config)), {"train/loss": None, "val/loss": None}))

    def log(self, row: Row) -> None:
        from torch.utils.tensorboard.summary import scalar

        numbers = [scalar(tag, value) for tag, value in scalars(row)]
        self._summarize(row["step"], *numbers, *(_text(tag, text) for tag, text in texts(row)))

    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def _summarize(self, step: int, *summaries: Any) -> None:
        self._write(step=step, summary={"value": [value for summary in summaries for value in summary.value]})

    def _write(self, **event: Any) -> None:
        """Append an event; a dict stands for a message inside it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # torch's SummaryWriter opens its file later, in a thread; by then, a new run may have a folder at this path.
        RecordWriter(self).write(Event(wall_time=time.time(), **event).SerializeToString())

    def write(self, record: bytes) -> None:
        """Append a record to the file atomically."""
        append(self._file, record)


def _text(tag: str, content: str) -> Any:
    from torch.utils.tensorboard.summary import text

    # TensorBoard renders Markdown; four spaces make the text a code block.
    return text(tag, textwrap.indent(content, "    ", lambda _: True))
