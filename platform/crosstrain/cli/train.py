"""`crosstrain train`: check everything, then start the workers."""

import argparse

from crosstrain.cli.command import Command
from crosstrain.config.registry import registry

from crosstrain.cli import plan
from crosstrain.cli.flags import add_config
from crosstrain.config.load import load_config
from crosstrain.distributed.launch.launcher import Launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills


@registry.register_command("train")
class TrainCommand(Command):
    """Train a project, resuming where its folder left off."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument(
            "--fresh", action="store_true", help="start over; the earlier run's folder is kept as NAME.1"
        )
        parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; start nothing")
        parser.add_argument(
            "--no-fit-check", action="store_true", help="start although the device's memory is too small"
        )
        group = parser.add_argument_group("several machines, the same command on each; the names are torchrun's")
        group.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines that train together (default: 1)")
        group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
        group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="node 0's address, and a free port there")
        group.add_argument(
            "--local-addr", metavar="ADDRESS", help="this machine's (default: the one that faces node 0)"
        )
        group.add_argument("--rdzv-conf", metavar="KEY=N,...", help="rendezvous settings, such as join_timeout=600 (s)")
        plan.add_budget(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Train what the project file says; returns the exit code. Raises UserError for every mistake it can foresee."""
        if arguments.dry_run:
            return plan.run(arguments, check=True)
        a = arguments
        nodes = Nodes.of(a.nnodes, a.node_rank, a.rdzv_endpoint, a.local_addr, a.rdzv_conf)
        with sigint_kills():  # torch and plugins are imported
            from crosstrain.api.train import start_training

            config = load_config(a.cfg_path, a.options)
        how = Launch.detect(a.nproc_per_node, config.run.device, nodes, config.run.max_restarts)
        return start_training(a.cfg_path, a.options, config, how, a.fresh, not a.no_fit_check, a.device_memory)
