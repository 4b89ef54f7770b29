"""Keys of other programs' configurations and what they are called here, as configs/foreign_keys lists them."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from crosstrain.utils import paths

# The beginnings of answers for keys without a counterpart, before the reason, and what a hint says of them.
NONE, UNNEEDED = "none: ", "unneeded: "
_SAID = {NONE: "{} has it, and there is none here: {}", UNNEEDED: "{} has it, and it is not needed here: {}"}


@dataclass(frozen=True)
class Origin:
    """Another program: its name, its file in configs/foreign_keys, and further names for `crosstrain migrate`."""

    name: str
    file: Path
    aliases: tuple[str, ...]
    answers: ChainMap[str, str]  # by key; first its own, then those of programs whose keys its files may have
    neutral: ChainMap[str, list[object]]  # values, by key, at which a setting says nothing
    calls: dict[str, str]  # functions of Python scripts whose arguments are settings; the key of the first one


@lru_cache
def origins() -> dict[str, Origin]:
    """Return the programs by the names of their files."""
    folder = paths.home() / "configs" / "foreign_keys"
    found = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}
    programs = {}
    for path, document in found.items():
        included = [found[folder / f"{name}.yaml"] for name in (path.stem, *document.get("includes", ()))]
        answers, neutral = (ChainMap(*(each.get(part, {}) for each in included)) for part in ("keys", "neutral"))
        aliases, calls = tuple(document.get("aliases", ())), document.get("calls", {})
        programs[path.stem] = Origin(document["origin"], path, aliases, answers, neutral, calls)
    return programs


def foreign_hint(key: str) -> str | None:
    """Return a clause that says what another program's key is here, or why it is not; None for a key of none."""
    wanted, programs = key.lstrip("-").replace("-", "_").lower(), dict[str, list[str]]()
    for origin in origins().values():
        if answer := origin.answers.maps[0].get(wanted):
            programs.setdefault(answer, []).append(origin.name)
    clauses = []
    for answer, names in programs.items():
        said = _SAID.get(answer[: answer.find(" ") + 1], "what {} calls so is {}")
        if len(names) > 1:
            said = said.replace(" calls so", " call so").replace(" has it", " have it")
        clauses.append(said.format(" and ".join(names), answer.removeprefix(NONE).removeprefix(UNNEEDED)))
    return "; ".join(clauses) or None
