"""A rank's report to the other ranks: its location, and the collectives that it has called."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crosstrain.utils import paths

_BUILT_IN = tuple(
    f"{folder}{os.sep}" for folder in (Path(paths.__file__).resolve().parent.parent, paths.home() / "plugins")
)


@dataclass(frozen=True)
class Location:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{paths.show(Path(self.file))}:{self.line} in {self.function}"

    @property
    def is_external(self) -> bool:
        """True for code that does not come with Crosstrain, such as a user's plugin."""
        return not self.file.startswith(_BUILT_IN)


@dataclass(frozen=True)
class Call:
    """A call of a collective, as far as ranks can compare it."""

    operation: str
    size: str  # such as "7 float32"; empty where ranks may differ
    location: Location

    def matches(self, other: Call) -> bool:
        """True if both can be one collective. Locations may differ: code may branch on the rank around both."""
        return (self.operation, self.size) == (other.operation, other.size)

    def __str__(self) -> str:
        return f"{self.operation} of {self.size}" if self.size else self.operation


@dataclass
class History:
    """The latest calls of one rank on one process group."""

    ranks: list[int]  # members of the group
    first: int  # number of calls[0]
    calls: list[Call]
    sequence_numbers: list[int] = field(default_factory=list)  # of the backend, before each call
    sequence_number: int | None = None  # by now, unrecorded collectives included; None: unknown
    has_background_calls: bool = False  # threads other than training's made some of the calls

    @property
    def next(self) -> int:
        return self.first + len(self.calls)

    def get(self, number: int) -> Call | None:
        return self.calls[number - self.first] if self.first <= number < self.next else None

    def counts_like(self, other: History) -> bool:
        """True if the backends of two ranks have had the same sequence number at each call."""
        numbers = range(max(self.first, other.first), min(self.next, other.next))
        return None not in (self.sequence_number, other.sequence_number) and all(
            self.sequence_numbers[n - self.first] == other.sequence_numbers[n - other.first] for n in numbers
        )


@dataclass
class Waiting:
    """The collective that the main thread is in."""

    group: str
    number: int
    seconds: float


@dataclass
class RankReport:
    """The state of one rank, in the words of its watchdog."""

    rank: int
    question: int  # the last one that it had heard
    location: Location  # of the main thread
    external_caller: Location | None  # the user's code that called `location`, if that is Crosstrain's own
    idle_seconds: float  # for which the main thread has been at this instruction
    aborting: bool  # the backend is about to end the process
    waiting: Waiting | None
    histories: dict[str, History] = field(default_factory=dict)  # by group

    def call(self, group: str, number: int) -> Call | None:
        """Return the call at a position; None if it is not reached yet, or forgotten."""
        return self.histories[group].get(number) if group in self.histories else None

    def count(self, group: str) -> int:
        """Return the number of calls made so far."""
        return self.histories[group].next if group in self.histories else 0

    def sequence_number(self, group: str) -> int | None:
        return self.histories[group].sequence_number if group in self.histories else None

    def waits_at(self, group: str, number: int) -> bool:
        return self.waiting is not None and (self.waiting.group, self.waiting.number) == (group, number)

    def dumps(self) -> str:
        """Encode as JSON, each distinct call once."""
        calls = list({call: None for history in self.histories.values() for call in history.calls})
        index = {call: i for i, call in enumerate(calls)}
        histories = {
            name: vars(history) | {"calls": [index[call] for call in history.calls]}
            for name, history in self.histories.items()
        }
        return json.dumps(vars(self) | {"histories": histories, "calls": calls}, default=asdict)

    @classmethod
    def loads(cls, text: str | bytes) -> RankReport:
        document = json.loads(text)
        calls = [Call(**call | {"location": Location(**call["location"])}) for call in document.pop("calls")]
        for name, history in document["histories"].items():
            document["histories"][name] = History(**history | {"calls": [calls[i] for i in history["calls"]]})
        for name, kind in (("location", Location), ("external_caller", Location), ("waiting", Waiting)):
            document[name] = kind(**document[name]) if document[name] else None
        return cls(**document)
