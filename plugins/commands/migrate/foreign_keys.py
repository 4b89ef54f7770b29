"""Keys of other programs' configurations and their counterparts in a project, from configs/foreign_keys."""

from collections import ChainMap
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from crosstrain import registry
from crosstrain.config.hints import Hints
from crosstrain.utils import paths
from crosstrain.utils.program import command

# Prefixes of answers for keys without a counterpart; the reason follows the prefix. _SAID: the hint for each prefix.
NONE, UNNEEDED = "none: ", "unneeded: "
_SAID = {
    NONE: "{} has this setting, but there is no counterpart here: {}",
    UNNEEDED: "{} has this setting, but it is not needed here: {}",
}


@dataclass(frozen=True)
class Origin:
    """A foreign program: its name, its file in configs/foreign_keys, and aliases for `crosstrain migrate`."""

    name: str
    file: Path
    aliases: tuple[str, ...]
    answers: ChainMap[str, str]  # key -> answer: this program's answers, then the answers of included programs
    neutral: ChainMap[str, list[object]]  # key -> values that have no effect
    calls: dict[str, str]  # Python function that takes settings as arguments -> key of its first argument


@lru_cache
def origins() -> dict[str, Origin]:
    """Return a dict from file stems in configs/foreign_keys to programs."""
    folder = paths.home() / "configs" / "foreign_keys"
    found = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}
    programs = {}
    for path, document in found.items():
        included = [found[folder / f"{name}.yaml"] for name in (path.stem, *document.get("includes", ()))]
        answers, neutral = (ChainMap(*(each.get(part, {}) for each in included)) for part in ("keys", "neutral"))
        programs[path.stem] = Origin(
            document["origin"],
            path,
            tuple(document.get("aliases", ())),
            answers,
            neutral,
            document.get("calls", {}),
        )
    return programs


@registry.register_hints("foreign_keys")
class ForeignKeys(Hints):
    """Counterparts of keys of Megatron-LM, DeepSpeed, Hugging Face and others."""

    def of_key(self, key: str) -> str | None:
        """Return a hint with the key's counterpart, or the reason why no counterpart exists; None: unknown key."""
        wanted, programs = key.lstrip("-").replace("-", "_").lower(), dict[str, list[str]]()
        for origin in origins().values():
            if answer := origin.answers.maps[0].get(wanted):
                programs.setdefault(answer, []).append(origin.name)
        clauses = []
        for answer, names in programs.items():
            said = _SAID.get(answer[: answer.find(" ") + 1], "{} uses this name for {}")
            if len(names) > 1:
                said = said.replace(" uses this", " use this").replace(" has this", " have this")
            clauses.append(said.format(" and ".join(names), answer.removeprefix(NONE).removeprefix(UNNEEDED)))
        return "; ".join(clauses) or None

    def known(self) -> Set[str]:
        return {key for origin in origins().values() for key in origin.answers.maps[0]}

    def of_file(self, path: Path) -> str | None:
        from .migration import looks_like

        if (origin := looks_like(path)) is None:
            return None
        return f"this looks like a file of {origin.name}: {command('migrate', path, '--from', origin.file.stem)}"
