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
        parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="machines (default: 1)")
        group = parser.add_argument_group("for the targets that use them")
        group.add_argument("--name", help="of the job (default: the project file's)")
        group.add_argument("--image", help="the container's (default: crosstrain)")
        group.add_argument("--claim", metavar="NAME", help="volume claim with data and output (default: crosstrain)")
        group.add_argument("--gpu", metavar="NAME", help="kind of device (default: any with memory enough)")
        group.add_argument("--queue", "--partition", metavar="NAME", help="Kueue's local queue, or SLURM's partition")
        group.add_argument("--account", metavar="NAME", help="that SLURM charges")
        group.add_argument("--time", metavar="H:M:S", help="limit after which SLURM requeues it (default: 24:00:00)")
        group.add_argument("--grace", type=positive, metavar="SECONDS", help="for the last save (default: by its size)")
        group.add_argument("--spot", action="store_const", const=True, help="machines that the cloud may take back")
        for flag, name, metavar, meaning in (
            ("--env", r"[A-Za-z_]\w*", "NAME=VALUE", "variables of the environment, such as NCCL_SOCKET_IFNAME=eth0"),
            ("--node-selector", r"[\w./-]+", "LABEL=VALUE", "Kubernetes' labels of machines to run on"),
        ):
            group.add_argument(
                flag, type=partial(_pair, name), nargs="+", action="extend", metavar=metavar, help=meaning
            )
        group.add_argument("--secret", metavar="NAME", help="secret of Kubernetes whose entries are variables")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the manifest; return the exit code."""
        from .manifest import manifest

        print(manifest(arguments, _known()["gpus"]), end="")
        return 0


def _pair(name: str, word: str) -> tuple[str, str]:
    """Split NAME=VALUE; NAME has to match the pattern `name`."""
    if not (found := re.fullmatch(f"({name})=(.*)", word)):
        raise argparse.ArgumentTypeError(f"{word!r} is not a name, = and a value")
    return found[1], found[2]


def _known() -> dict[str, Any]:
    """Read configs/launch/targets.yaml: descriptions of the `targets` by name, memory of the `gpus` by name."""
    return yaml.safe_load((paths.home() / "configs" / "launch" / "targets.yaml").read_text(encoding="utf-8"))
