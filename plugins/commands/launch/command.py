"""`crosstrain launch`: print the manifest that starts a project on a cluster."""

import argparse
import re
from functools import partial
from typing import Any

import yaml

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, positive
from crosstrain.utils import paths


@registry.register_command("launch")
class LaunchCommand(Command):
    """Print a cluster manifest: Kubernetes, SLURM, SkyPilot, Ray."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        targets = _known()["targets"]
        parser.epilog = "targets: " + "; ".join(f"{name}: {summary}" for name, summary in targets.items())
        parser.add_argument(
            "--to", required=True, choices=targets, metavar="TARGET", help=f"one of {', '.join(targets)}"
        )
        add_config(parser, required=True)
        parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of machines (default: 1)")
        group = parser.add_argument_group("flags that only some targets use")
        group.add_argument("--name", help="name of the job (default: the project file's name)")
        group.add_argument("--image", help="container image (default: crosstrain)")
        group.add_argument(
            "--claim", metavar="NAME", help="persistent volume claim for data and output (default: crosstrain)"
        )
        group.add_argument("--gpu", metavar="NAME", help="type of GPU, such as H100 (default: any with enough memory)")
        group.add_argument("--queue", "--partition", metavar="NAME", help="local queue of Kueue, or partition of SLURM")
        group.add_argument("--account", metavar="NAME", help="account that SLURM charges")
        group.add_argument(
            "--time", metavar="H:M:S", help="time limit after which SLURM requeues the job (default: 24:00:00)"
        )
        group.add_argument(
            "--grace",
            type=positive,
            metavar="SECONDS",
            help="time for the last save (default: estimated from the checkpoint's size)",
        )
        group.add_argument(
            "--spot", action="store_const", const=True, help="use spot machines, which the cloud may reclaim"
        )
        for flag, name, metavar, meaning in (
            ("--env", r"[A-Za-z_]\w*", "NAME=VALUE", "environment variables, such as NCCL_SOCKET_IFNAME=eth0"),
            ("--node-selector", r"[\w./-]+", "LABEL=VALUE", "Kubernetes labels of the machines to run on"),
        ):
            group.add_argument(
                flag, type=partial(_pair, name), nargs="+", action="extend", metavar=metavar, help=meaning
            )
        group.add_argument(
            "--secret", metavar="NAME", help="Kubernetes secret whose entries become environment variables"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the manifest; return the exit code."""
        from .manifest import manifest

        print(manifest(arguments, _known()["gpus"]), end="")
        return 0


def _pair(name: str, word: str) -> tuple[str, str]:
    """Split NAME=VALUE; NAME has to match the pattern `name`."""
    if not (found := re.fullmatch(f"({name})=(.*)", word)):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {word!r}")
    return found[1], found[2]


def _known() -> dict[str, Any]:
    """Read configs/launch/targets.yaml: `targets` is name -> description, `gpus` is name -> GiB of device memory."""
    return yaml.safe_load((paths.home() / "configs" / "launch" / "targets.yaml").read_text(encoding="utf-8"))
