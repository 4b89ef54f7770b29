"""Flags that plugins declare, as keywords of a Python function."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def with_defaults(
    given: Mapping[str, Any], declare: Iterable[Callable[[argparse.ArgumentParser], None]], function: str, kind: str
) -> dict[str, Any]:
    """Return flag -> value for every declared flag: the value in `given`, or else the default.

    declare: method `add_arguments` of each plugin. function, kind: names of the function and of the plugins, for the
    error message. Raises TypeError for an unknown keyword.
    """
    parser = argparse.ArgumentParser()
    for add_arguments in declare:
        add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"{function}() has no keyword {min(unknown)!r}; {kind} take {', '.join(defaults)}")
    return defaults | dict(given)
