"""What a rank says of itself to the others: where it is, and the collectives that it has called."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crosstrain.utils import paths

_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(paths.__file__).resolve().parent.parent, paths.home() / "plugins")
)


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{paths.show(Path(self.file))}:{self.line} in {self.function}"

    @property
    def is_plugged_in(self) -> bool:
        """Whether it does not come with Crosstrain."""
        return not self.file.startswith(_OURS)


@dataclass(frozen=True)
class Call:
    """A call of a collective, as far as ranks can compare it."""

    operation: str
    size: str  # such as "7 float32"; empty where ranks may differ
    place: Place

    def fits(self, other: Call) -> bool:
        """Whether the two can be one collective. Their places may differ: code may branch on the rank around both."""
        return (self.operation, self.size) == (other.operation, other.size)

    def __str__(self) -> str:
        return f"{self.operation} of {self.size}" if self.size else self.operation


@dataclass
class History:
    """The latest calls of one rank on one process group."""

    ranks: list[int]  # members of the group
    first: int  # number of calls[0]
    calls: list[Call]
    positions: list[int] = field(default_factory=list)  # for each, how many collectives the backend had begun before
    begun: int | None = None  # how many it has by now, also those that are not noted; None: it cannot tell
    in_background: bool = False  # whether threads beside training's have made some of them

    @property
    def next(self) -> int:
        return self.first + len(self.calls)

    def get(self, number: int) -> Call | None:
        return self.calls[number - self.first] if self.first <= number < self.next else None

    def keeps_step(self, other: History) -> bool:
        """Whether the backends of two ranks have counted alike so far."""
        numbers = range(max(self.first, other.first), min(self.next, other.next))
        return None not in (self.begun, other.begun) and all(
            self.positions[n - self.first] == other.positions[n - other.first] for n in numbers
        )


@dataclass
class Waiting:
    """The collective in which the main thread is."""

    group: str
    number: int
    seconds: float


@dataclass
class State:
    """What one rank says of itself."""

    rank: int
    answers: int  # the last question that it had heard
    at: Place  # of the main thread
    caller: Place | None  # the plugged-in code that called `at`, if `at` is Crosstrain's own
    still: float  # seconds for which the main thread has been at that very instruction
    aborting: bool  # whether the backend is about to end the process
    waiting: Waiting | None
    histories: dict[str, History] = field(default_factory=dict)  # by group

    def call(self, group: str, number: int) -> Call | None:
        """This rank's call at a position; None if it has not come so far, or it is forgotten."""
        return self.histories[group].get(number) if group in self.histories else None

    def count(self, group: str) -> int:
        """How many calls this rank has made."""
        return self.histories[group].next if group in self.histories else 0

    def begun(self, group: str) -> int | None:
        """How many collectives its backend has begun, noted or not; None if that is unknown."""
        return self.histories[group].begun if group in self.histories else None

    def waits_at(self, group: str, number: int) -> bool:
        return self.waiting is not None and (self.waiting.group, self.waiting.number) == (group, number)

    def dumps(self) -> str:
        """As JSON, in which equal calls stand once."""
        calls = list({call: None for history in self.histories.values() for call in history.calls})
        index = {call: i for i, call in enumerate(calls)}
        histories = {
            name: vars(history) | {"calls": [index[call] for call in history.calls]}
            for name, history in self.histories.items()
        }
        return json.dumps(vars(self) | {"histories": histories, "calls": calls}, default=asdict)

    @classmethod
    def loads(cls, text: str | bytes) -> State:
        document = json.loads(text)
        calls = [Call(**call | {"place": Place(**call["place"])}) for call in document.pop("calls")]
        for name, history in document["histories"].items():
            document["histories"][name] = History(**history | {"calls": [calls[i] for i in history["calls"]]})
        for name, kind in (("at", Place), ("caller", Place), ("waiting", Waiting)):
            document[name] = kind(**document[name]) if document[name] else None
        return cls(**document)
