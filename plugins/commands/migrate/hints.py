"""Hints for keys of other programs, from the tables in configs/foreign_keys."""

from collections.abc import Set
from pathlib import Path

from crosstrain import registry
from crosstrain.config.hints import Hints
from crosstrain.utils.program import command

from .foreign_keys import foreign_hint, origins


@registry.register_hints("foreign_keys")
class ForeignKeys(Hints):
    """Counterparts of keys of Megatron-LM, DeepSpeed, Hugging Face and others."""

    def of_key(self, key: str) -> str | None:
        return foreign_hint(key)

    def known(self) -> Set[str]:
        return {key for origin in origins().values() for key in origin.answers.maps[0]}

    def of_file(self, path: Path) -> str | None:
        from .migration import looks_like

        if (origin := looks_like(path)) is None:
            return None
        return f"this looks like a file of {origin.name}: {command('migrate', path, '--from', origin.file.stem)}"
