"""Audit the rows of a dataset: count unread keys, and rows that cannot be used."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from crosstrain import DataError, printable

_NAMED = 1000  # maximum number of dropped rows listed in `plain`
_LONGEST = 80  # maximum length of a key in a message, in characters
_KINDS = 100  # maximum number of reasons, and of keys, that are counted separately; data may contain more


class RowAudit:
    """Counts rows, unread keys, and dropped rows by kind of reason, and records the first location of each.

    All code that reads rows reports to this class, so that no key is silently ignored. A key is named by its path:
    `source` for a column, `messages.weight` for a key of a turn. `plain` is the JSON form of the counts.
    """

    def __init__(self, ignore_columns: Collection[str] = ()) -> None:
        """ignore_columns: paths of keys that are not reported; a path includes all keys below it."""
        self.ignore_columns = frozenset(ignore_columns)
        self.plain: dict[str, Any] = {"rows": 0, "dropped": 0, "unread": {}, "reasons": {}, "named": []}

    def row(self, place: str, unread: Iterable[str] = ()) -> None:
        """Count a row that is used, and the paths of its unread keys."""
        self.add({"rows": 1, "unread": {path: [1, place] for path in unread}})

    def drop(self, place: str, reason: str) -> None:
        """Count a dropped row. Reasons that differ only in their digits are counted together."""
        said = f"{place}: {reason}"
        self.add({"rows": 1, "dropped": 1, "reasons": {re.sub(r"\d+", "N", reason): [1, said]}, "named": [said]})

    def add(self, plain: dict[str, Any]) -> None:
        """Add counts of more rows, except for ignored keys. `plain` has the form of `self.plain` or of a part of it."""
        for name in ("rows", "dropped"):
            self.plain[name] += plain.get(name, 0)
        for name in ("unread", "reasons"):
            for key, (number, first) in plain.get(name, {}).items():
                if name == "reasons" or not any(f"{key}.".startswith(f"{given}.") for given in self.ignore_columns):
                    counts = self.plain[name]
                    kept = key if key in counts or len(counts) < _KINDS else "others"
                    counts.setdefault(kept, [0, first])[0] += number
        self.plain["named"] += plain.get("named", [])[: _NAMED - len(self.plain["named"])]

    def notices(self) -> list[str]:
        """Return sentences about unread keys and about dropped rows, if there are any."""
        said, total = [], self.plain["rows"]
        if unread := self.plain["unread"]:
            parts = [
                f"{key[:_LONGEST]} ({number} of {total} rows, first in {place})"
                for key, (number, place) in unread.items()
            ]
            more = f" and {len(parts) - 8} more" if len(parts) > 8 else ""
            said.append(f"unused keys: {', '.join(parts[:8])}{more}; list them in ignore_columns if this is intended")
        if reasons := self.plain["reasons"]:
            kinds = sorted(reasons.values(), key=lambda kind: -kind[0])[:3]
            why = "; ".join(f"{number} such as {first}" for number, first in kinds)
            said.append(f"{self.plain['dropped']} of {total} rows are dropped, {why}")
        return [printable(text) for text in said]

    def check(self, source: str, max_dropped: float) -> None:
        """Raise DataError if the fraction of dropped rows is above `max_dropped`, or if all rows are dropped."""
        dropped, total = self.plain["dropped"], self.plain["rows"]
        if dropped and (dropped == total or dropped > max_dropped * total):
            raise DataError(
                f"{source}: {self.notices()[-1]}: more than max_dropped={max_dropped:g}; fix the rows or raise "
                f"max_dropped"
            )
