"""What became of every document, and why: counts, bytes and examples for each step, and how long documents are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.corpus import plot
from crosstrain.utils.errors import UserError
from crosstrain.utils.files import write_json

EXAMPLES = 3  # kept of each kind, the first ones in the order of the input
_SNIPPET = 200  # characters of an example
BINS = 40  # lengths are counted by powers of two: bin k has those of k binary digits
_log = logging.getLogger(__name__)


def size_of(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


class Counts:
    """Of one shard, or of several added up. `plain` is what JSON can hold."""

    def __init__(self) -> None:
        self.plain: dict[str, Any] = {"blank": 0, "documents": 0, "bytes": 0, "dropped": {}, "changed": {}}

    def blank(self) -> None:
        """A document of white space was passed over."""
        self.plain["blank"] += 1

    def read(self, size: int) -> None:
        self.plain["documents"] += 1
        self.plain["bytes"] += size

    def drop(self, step: str, size: int, source: str, why: str, text: str) -> None:
        """A document was dropped by `step`."""
        example = {"source": source, "why": why, "text": text[:_SNIPPET]}
        self._add("dropped", step, {"documents": 1, "bytes": size, "examples": [example]})

    def wants_example(self, step: str) -> bool:
        """Whether an example of what `step` drops would be kept."""
        return len(self.plain["dropped"].get(step, {"examples": []})["examples"]) < EXAMPLES

    def change(self, step: str, source: str, before: str, after: str) -> None:
        """A document was changed by `step`; the example begins a little before the first difference."""
        pairs = enumerate(zip(before, after, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
        window = slice(max(0, first - 20), first + _SNIPPET // 2)
        example = {"source": source, "text": before[window], "became": after[window]}
        self._add("changed", step, {"documents": 1, "examples": [example]})

    def add(self, other: dict[str, Any]) -> None:
        """Take another's `plain` into these; call it in the order of the input."""
        for name in ("blank", "documents", "bytes"):
            self.plain[name] += other[name]
        for kind in ("dropped", "changed"):
            for step, found in other[kind].items():
                self._add(kind, step, found)

    def _add(self, kind: str, step: str, found: dict[str, Any]) -> None:
        mine = self.plain[kind].setdefault(step, {name: 0 for name in found if name != "examples"} | {"examples": []})
        for name, value in found.items():
            mine[name] = (mine[name] + value)[:EXAMPLES] if name == "examples" else mine[name] + value

    @property
    def kept(self) -> int:
        """Documents that were not dropped."""
        return self.plain["documents"] - sum(found["documents"] for found in self.plain["dropped"].values())

    def all_dropped(self) -> str:
        """A clause that says why nothing is left."""
        if not self.plain["documents"]:
            return "everything in it is empty or white space" if self.plain["blank"] else "there is nothing in it"
        steps = (f"{found['documents']:,} by {step}" for step, found in self.plain["dropped"].items())
        return f"all {self.plain['documents']:,} documents were dropped: {', '.join(steps)}"


def histogram(lengths: np.ndarray) -> np.ndarray:
    """int64 [BINS]: how many lengths have k binary digits, k = 0, 1, ..."""
    digits = np.ceil(np.log2(np.asarray(lengths, np.float64) + 1)).astype(np.int64)
    return np.bincount(np.minimum(digits, BINS - 1), minlength=BINS)


def bins(counts: Iterable[int]) -> list[dict[str, int]]:
    """A histogram for people: {from, to, documents} of each bin up to the last that is not empty."""
    rows = [{"from": (1 << k) >> 1, "to": (1 << k) - 1, "documents": int(n)} for k, n in enumerate(counts)]
    while rows and not rows[-1]["documents"]:
        rows.pop()
    while rows and not rows[0]["documents"]:
        rows.pop(0)
    return rows


def write_report(
    folder: Path,
    inputs: dict[str, Any],
    repeated: dict[str, Any],
    tokenized: dict[str, Any],
    **lengths: np.ndarray,
) -> None:
    """`report.json` and `lengths.svg`: what the inputs gave, what was repeated, what came to be tokens, and lengths.

    lengths: histograms by unit, `tokens` of what was kept and `bytes` after cleaning.
    """
    rows = {unit: bins(counts) for unit, counts in lengths.items()}
    content = {"inputs": inputs, "repeated": repeated, "tokenized": tokenized, "lengths": rows}
    write_json(folder / "report.json", content)
    titles = {f"documents by length in {unit}": found for unit, found in rows.items()}
    try:
        plot.draw(folder / "lengths.svg", titles)
    except UserError as error:  # matplotlib is missing; the numbers are there
        _log.warning("%s", error)
