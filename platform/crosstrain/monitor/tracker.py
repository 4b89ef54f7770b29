"""Tracker: where a run's numbers go. The interface that a tracker plugin fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.monitor.metrics import Row


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run that it follows."""

    folder: Path  # of the run; a tracker that keeps files has a folder of its own in it
    config: dict[str, Any]  # resolved, as config.yaml holds it
    resumed_step: int  # the step that training goes on after; 0: it begins

    @property
    def name(self) -> str:
        """What a person calls it: the folder's name."""
        return self.folder.resolve().name


class Tracker(ABC):
    """Base class of all trackers. `run.trackers: [{name: ..., <Options>}]` chooses and configures some.

    One is made on rank 0 when training begins. Whatever it raises is said once and costs its own numbers alone:
    training goes on, and the tracker is offered the next row.
    """

    # Whether calls may take long, such as those over a network. They are made by a thread of the tracker's own then.
    remote = False

    @dataclass
    class Options:
        """A tracker without options of its own."""

    @classmethod  # noqa: B027 - most miss nothing
    def check(cls, options: Any) -> None:
        """Raise UserError for what is missing, such as a package or a login; no worker exists yet."""

    def __init__(self, options: Any, run: TrackedRun) -> None:
        self.options, self.run = options, run

    @abstractmethod
    def log(self, row: Row) -> None:
        """A step was logged, validated or both. `crosstrain.monitor.metrics` names what is in a row.

        A resumed run tells the steps after its checkpoint again, with the same numbers.
        """

    def close(self, finished: bool) -> None:  # noqa: B027 - some keep nothing open
        """Training ends here; `finished` says whether it has reached its last step."""

    def place(self) -> str | None:
        """How to look at what was tracked, for the closing lines of a run: a file, an address, a command."""
        return None
