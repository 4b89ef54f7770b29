"""Flags that plugins declare, as keywords of a Python function."""

import argparse
from collections.abc import Mapping
from typing import Any

from crosstrain.config.registry import registry


def with_defaults(given: Mapping[str, Any], kind: str, function: str, takers: str) -> dict[str, Any]:
    """Return flag -> value for every flag that plugins of a kind declare: the value in `given`, or else the default.

    function, takers: names of the function and of the plugins, for the error message. Raises TypeError for an unknown
    keyword.
    """
    parser = argparse.ArgumentParser()
    for plugin in registry.instances(kind).values():
        plugin.add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"{function}() has no keyword {min(unknown)!r}; {takers} take {', '.join(defaults)}")
    return defaults | dict(given)
