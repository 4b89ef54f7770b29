"""`crosstrain launch`: print the manifest that starts a project on a cluster."""

import argparse
import re
from functools import partial
from typing import Any

import yaml

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, add_flags, positive
from crosstrain.utils import paths


def _pair(name: str, word: str) -> tuple[str, str]:
    """Split NAME=VALUE; NAME has to match the pattern `name`."""
    if not (found := re.fullmatch(f"({name})=(.*)", word)):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {word!r}")
    return found[1], found[2]


_PAIRS = {"nargs": "+", "action": "extend"}
# Flags that only some targets use -> (value in the templates if the flag is not given, arguments for argparse). The
# project decides the values that replace None for --name and --grace.
FLAGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "--name": (None, {"help": "name of the job (default: the project file's name)"}),
    "--image": ("crosstrain", {"help": "container image (default: crosstrain)"}),
    "--claim": ("crosstrain", {"metavar": "NAME", "help": "persistent volume claim for data and output (default: "
                                                          "crosstrain)"}),
    "--gpu": (None, {"metavar": "NAME", "help": "type of GPU, such as H100 (default: any with enough memory)"}),
    "--queue --partition": (None, {"metavar": "NAME", "help": "local queue of Kueue, or partition of SLURM"}),
    "--account": (None, {"metavar": "NAME", "help": "account that SLURM charges"}),
    "--time": ("24:00:00", {"metavar": "H:M:S", "help": "time limit after which SLURM requeues the job (default: "
                                                        "24:00:00)"}),
    "--grace": (None, {"type": positive, "metavar": "SECONDS", "help": "time for the last save (default: estimated "
                                                                       "from the checkpoint's size)"}),
    "--spot": (False, {"action": "store_const", "const": True, "help": "use spot machines, which the cloud may "
                                                                       "reclaim"}),
    "--env": ({}, {"type": partial(_pair, r"[A-Za-z_]\w*"), **_PAIRS, "metavar": "NAME=VALUE",
                   "help": "environment variables, such as NCCL_SOCKET_IFNAME=eth0"}),
    "--node-selector": ({}, {"type": partial(_pair, r"[\w./-]+"), **_PAIRS, "metavar": "LABEL=VALUE",
                             "help": "Kubernetes labels of the machines to run on"}),
    "--secret": (None, {"metavar": "NAME", "help": "Kubernetes secret whose entries become environment variables"}),
}  # fmt: skip


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
        add_flags(group, {flags: how for flags, (_, how) in FLAGS.items()})

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the manifest."""
        from .manifest import manifest

        print(manifest(arguments, _known()["gpus"]), end="")


def _known() -> dict[str, Any]:
    """Read configs/launch/targets.yaml: `targets` is name -> description, `gpus` is name -> GiB of device memory."""
    return yaml.safe_load((paths.home() / "configs" / "launch" / "targets.yaml").read_text(encoding="utf-8"))
