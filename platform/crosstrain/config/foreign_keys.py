"""Keys of other programs' configurations and what they are called here, as configs/foreign_keys lists them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml

from crosstrain.utils import paths

_NONE = "none: "  # begins an answer for a key that has no counterpart, before the reason


def foreign_keys() -> dict[str, dict[str, str]]:
    """Return the answers for each key, by the program that has it."""
    return _read(paths.home() / "configs" / "foreign_keys")


@lru_cache(maxsize=4)
def _read(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.yaml")):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key, answer in document["keys"].items():
            found.setdefault(key, {})[document["origin"]] = answer
    return found


def foreign_hint(key: str) -> str | None:
    """Return a clause that says what another program's key is here, or why it is not; None for a key of none."""
    programs: dict[str, list[str]] = {}
    for program, answer in foreign_keys().get(key.lstrip("-").replace("-", "_").lower(), {}).items():
        programs.setdefault(answer, []).append(program)
    clauses = [
        f"{' and '.join(names)} has it, and there is none here: {answer.removeprefix(_NONE)}"
        if answer.startswith(_NONE)
        else f"what {' and '.join(names)} calls so is {answer}"
        for answer, names in programs.items()
    ]
    return "; ".join(clauses) or None
