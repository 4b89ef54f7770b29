"""`crosstrain train`: check everything, then start the workers."""

import argparse

from crosstrain.cli.command import Command
from crosstrain.cli.flags import add_config, add_flags, positive
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills


@registry.register_command("train")
class TrainCommand(Command):
    """Train a project, or resume it from its last checkpoint."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(
            parser,
            {
                "--fresh": {"action": "store_true", "help": "start over; the earlier folder is renamed to NAME.1"},
                "--dry-run": {"action": "store_true", "help": "run all checks, but do not start the training"},
                "--world-size": {
                    "type": positive,
                    "metavar": "N",
                    "help": "with --dry-run: number of ranks; they do not have to exist",
                },
            },
        )
        group = parser.add_argument_group(
            "several machines: run the same command on each; the flags are named as in torchrun"
        )
        add_flags(
            group,
            {
                "--nnodes": {
                    "metavar": "N|MIN:MAX",
                    "help": "number of machines, or its minimum and maximum (default: 1)",
                },
                "--node-rank": {"type": int, "metavar": "R", "help": "rank of this machine, from 0"},
                "--rdzv-endpoint": {"metavar": "HOST:PORT", "help": "address of node 0 and a free port there"},
                "--local-addr": {
                    "metavar": "ADDRESS",
                    "help": "address of this machine (default: the address from which it connects to node 0)",
                },
                "--rdzv-conf": {
                    "metavar": "KEY=N,...",
                    "help": "settings of the rendezvous, such as join_timeout=600 (seconds)",
                },
            },
        )
        for check in registry.instances("preflight").values():
            check.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Train a project and return the exit code. Raises UserError for all mistakes that the checks find."""
        a = arguments
        nodes = Nodes.of(a.nnodes, a.node_rank, a.rdzv_endpoint, a.local_addr, a.rdzv_conf)
        with sigint_kills():  # importing torch and plugins may take a long time
            from crosstrain.api.train import check_start, start_training

            config = load_config(a.cfg_path, a.options)
        how = Launch.detect(a.nproc_per_node, config.run.device, nodes, config.run.max_restarts)
        if a.dry_run:
            check_start(a.cfg_path, a.options, config, how, a.fresh, vars(a), a.world_size or how.world_size)
            return 0
        return start_training(a.cfg_path, a.options, config, how, a.fresh, vars(a))
