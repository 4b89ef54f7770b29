"""Write the tables of keys in docs/from-*.md from configs/foreign_keys: python docs/write_foreign_keys.py"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
_TABLE = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end of the keys -->)", re.DOTALL)


def table(name: str) -> str:
    """Return the table of a program's keys in Markdown; consecutive keys with the same answer share a row."""
    keys = yaml.safe_load((ROOT / "configs" / "foreign_keys" / f"{name}.yaml").read_text())["keys"]
    rows = ["| key | here |", "|---|---|"]
    for answer, group in groupby(keys, key=keys.__getitem__):
        kind, _, reason = answer.partition(": ")
        here = {"none": "none", "unneeded": "not needed"}.get(kind, f"`{kind}`")
        names = ", ".join(f"`{key}`" for key in group)
        rows.append(f"| {names} | {here}{f': {reason}' if reason else ''} |")
    return "".join(f"{row}\n" for row in rows)


def written(page: Path) -> str:
    """Return the text of a page, with tables written from the current lists of keys."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in sorted((ROOT / "docs").glob("from-*.md")):
        each.write_text(written(each), encoding="utf-8")
