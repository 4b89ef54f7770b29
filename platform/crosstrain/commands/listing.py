"""`crosstrain list`: everything that a project file can name, found without importing any of it."""

from __future__ import annotations

from crosstrain.errors import ConfigError
from crosstrain.registry import KINDS, registry


def listing(kind: str | None) -> int:
    """Print the components of one kind, or of all; returns the exit code."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"list: there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    for each in [kind] if kind else KINDS:
        entries = sorted(registry.entries(each), key=lambda e: e.name)
        if entries:
            print(f"{each}:")
            width = max(len(entry.name) for entry in entries)
            for entry in entries:
                print(f"  {entry.name:<{width}}  {entry.summary}  [{entry.file}:{entry.line}]")
    return 0
