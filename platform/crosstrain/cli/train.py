"""`crosstrain train`: check everything, then start the workers."""

import argparse

from crosstrain.cli.command import Command
from crosstrain.cli.flags import add_config, positive
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.distributed.launch.launcher import Launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.training.preflight_check import preflight_checks


@registry.register_command("train")
class TrainCommand(Command):
    """Train a project, or resume it from its last checkpoint."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument("--fresh", action="store_true", help="start over; the earlier folder is kept as NAME.1")
        parser.add_argument("--dry-run", action="store_true", help="check everything, and start nothing")
        parser.add_argument("--world-size", type=positive, metavar="N", help="of --dry-run: ranks, there or not")
        group = parser.add_argument_group("several machines, the same command on each; the names are torchrun's")
        group.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines that train together (default: 1)")
        group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
        group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="node 0's address, and a free port there")
        group.add_argument("--local-addr", metavar="ADDRESS", help="this machine's (default: the one facing node 0)")
        group.add_argument("--rdzv-conf", metavar="KEY=N,...", help="rendezvous, such as join_timeout=600 (s)")
        for check in preflight_checks():
            check.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Train a project and return the exit code. Raises UserError for every mistake that can be foreseen."""
        a = arguments
        nodes = Nodes.of(a.nnodes, a.node_rank, a.rdzv_endpoint, a.local_addr, a.rdzv_conf)
        with sigint_kills():  # importing torch and plugins may take long
            from crosstrain.api.train import check_start, start_training

            config = load_config(a.cfg_path, a.options)
        how = Launch.detect(a.nproc_per_node, config.run.device, nodes, config.run.max_restarts)
        if a.dry_run:
            check_start(a.cfg_path, a.options, config, how, a.fresh, vars(a), a.world_size or how.world_size)
            return 0
        return start_training(a.cfg_path, a.options, config, how, a.fresh, vars(a))
