"""Count the documents that each step reads and drops, with examples, and measure their lengths."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...datasets.row_audit import RowAudit

EXAMPLES = 3  # number of examples to keep per kind, the first ones in input order
SNIPPET = 200  # maximum number of characters of an example


class Counts:
    """Counts of one shard, or sums over several shards.

    `plain` is the JSON form; its "documents" does not include blank documents. `rows` counts records that a reader
    cannot use, and parts of records that it does not read.
    """

    def __init__(self, ignore_columns: Sequence[str] = ()) -> None:
        self.rows = RowAudit(ignore_columns)
        self.plain: dict[str, Any] = {
            "blank": 0, "documents": 0, "bytes": 0, "dropped": {}, "rows": self.rows.plain,
        }  # fmt: skip

    def read(self, size: int) -> None:
        """Count a document of `size` bytes."""
        self.plain["documents"] += 1
        self.plain["bytes"] += size

    def drop(self, step: str, size: int, source: str, reason: str, text: str) -> None:
        """Count a document that `step` dropped."""
        example = {"source": source, "why": reason, "text": text[:SNIPPET]}
        self._add(step, {"documents": 1, "bytes": size, "examples": [example]})

    def add(self, other: dict[str, Any]) -> None:
        """Merge `plain` from another instance. Call this method in input order."""
        self.rows.add(other["rows"])
        for name in ("blank", "documents", "bytes"):
            self.plain[name] += other[name]
        for step, found in other["dropped"].items():
            self._add(step, found)

    def _add(self, step: str, found: dict[str, Any]) -> None:
        mine = self.plain["dropped"].setdefault(step, {"documents": 0, "bytes": 0, "examples": []})
        for name, value in found.items():
            mine[name] += value
        mine["examples"] = mine["examples"][:EXAMPLES]

    @property
    def kept(self) -> int:
        """Number of documents that were not dropped."""
        return self.plain["documents"] - sum(found["documents"] for found in self.plain["dropped"].values())

    def all_dropped(self) -> str:
        """Return the reason why no document is left."""
        if not self.plain["documents"]:
            return "all its documents are empty or white space" if self.plain["blank"] else "it is empty"
        steps = (f"{found['documents']:,} by {step}" for step, found in self.plain["dropped"].items())
        return f"all {self.plain['documents']:,} documents were dropped: {', '.join(steps)}"


def bins(lengths: Counter[int]) -> list[dict[str, int]]:
    """Return {from, to, documents} per bin; lengths: number of binary digits of a length -> number of documents."""
    return [
        {"from": (1 << digits) >> 1, "to": (1 << digits) - 1, "documents": lengths[digits]}
        for digits in range(min(lengths), max(lengths) + 1)
    ]
