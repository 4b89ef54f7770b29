"""Planning flags of `crosstrain plan` and `crosstrain train`, and the output of a plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crosstrain.cli.flags import new_file

if TYPE_CHECKING:
    from .plan import Plan


def add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--device-memory", metavar="SIZE", help="of each rank's device, such as 24GiB: what fits?")
    group.add_argument("--throughput", metavar="FLOPS", help="a device's FLOP/s, such as 150T: how many days?")
    group.add_argument("--tokens-per-second", metavar="N", help="as measured, of all ranks: a number, or a run")
    group.add_argument("--tokens", metavar="N", help="of the whole training, such as 2.5B (default: run.max_iters)")
    group.add_argument("--no-presets", action="store_true", help="leave other runners out")
    group.add_argument("--parameters", action="store_true", help="list the model's parameters instead")
    group.add_argument("--output", type=new_file, metavar="FILE", help="write the plan as JSON")


def budget(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the flags to arguments of `plan_of`."""
    names = ("device_memory", "throughput", "tokens_per_second", "tokens")
    return {name: given[name] for name in names} | {"presets": not (given["no_presets"] or given["parameters"])}


def show(made: Plan, given: Mapping[str, Any]) -> None:
    """Print the plan or its parameters, and write the plan to --output if given."""
    print(*made.parameters(), sep="\n") if given["parameters"] else print(made)
    if given["output"]:
        given["output"].write_text(json.dumps(made.as_json(), indent=1) + "\n", encoding="utf-8")
