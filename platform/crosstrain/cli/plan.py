"""`crosstrain plan` and `train --dry-run`: estimate what a project costs, and whether it fits, before it starts."""

import argparse
import json

from crosstrain.cli.flags import add_config, new_file, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, required=True)
    add_budget(parser)


def add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--world-size", type=positive, metavar="N", help="ranks, there or not (default: as training)")
    group.add_argument("--device-memory", metavar="SIZE", help="of each rank's device, such as 24GiB: what fits?")
    group.add_argument("--throughput", metavar="FLOPS", help="a device's FLOP/s, such as 150T: how many days?")
    group.add_argument("--tokens-per-second", metavar="N", help="as measured, of all ranks: a number, or a run")
    group.add_argument("--tokens", metavar="N", help="of the whole training, such as 2.5B (default: run.max_iters)")
    group.add_argument("--no-presets", action="store_true", help="leave other runners out")
    group.add_argument("--parameters", action="store_true", help="list the model's parameters instead")
    group.add_argument("--output", type=new_file, metavar="FILE", help="write the plan as JSON")


def run(arguments: argparse.Namespace, check: bool = False) -> int:
    """Print the plan of a project, and write it where the flags say; returns the exit code. `check`: of `api.plan`."""
    from crosstrain.api.plan import plan

    a = arguments
    made = plan(
        a.cfg_path, a.options, world_size=a.world_size or a.nproc_per_node, device_memory=a.device_memory,
        throughput=a.throughput, tokens_per_second=a.tokens_per_second, tokens=a.tokens,
        presets=not (a.no_presets or a.parameters),
        check=check,
    )  # fmt: skip
    print(*made.parameters(), sep="\n") if a.parameters else print(made)
    if a.output:
        a.output.write_text(json.dumps(made.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0
