"""Flags that plugins declare, as keywords of a Python function."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class DeclaresFlags(Protocol):
    """A plugin with flags, such as a preflight check or an evaluation."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...


def with_defaults(
    given: Mapping[str, Any], plugins: Iterable[DeclaresFlags], function: str, kind: str
) -> dict[str, Any]:
    """Return flag -> value for every flag of `plugins`: the value in `given`, or else the default.

    function, kind: names of the function and of the plugins, for the error message. Raises TypeError for an unknown
    keyword.
    """
    parser = argparse.ArgumentParser()
    for plugin in plugins:
        plugin.add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"{function}() has no keyword {min(unknown)!r}; {kind} take {', '.join(defaults)}")
    return defaults | dict(given)
