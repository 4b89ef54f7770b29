"""`crosstrain sweep`: train a project with many settings, and rank them."""

import argparse
from pathlib import Path

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, add_flags, positive

_FLAGS = {
    "--search": {
        "nargs": "+",
        "action": "extend",
        "required": True,
        "metavar": "KEY=VALUES",
        "help": "options to try: a range such as run.init_lr=1e-4..1e-2:log, or choices such as model.dropout=0,0.1",
    },
    "--output": {
        "type": Path,
        "required": True,
        "metavar": "FOLDER",
        "help": "folder of all runs; a second call continues",
    },
    "--trials": {"type": positive, "default": 20, "metavar": "N", "help": "number of runs (default: 20)"},
    "--workers": {"type": positive, "default": 1, "metavar": "N", "help": "runs at a time (default: 1)"},
    "--metric": {"default": "val_loss", "help": "metric in metrics.jsonl (default: val_loss)"},
    "--mode": {"choices": ["min", "max"], "default": "min", "help": "which value is best (default: min)"},
    "--sampler": {
        "choices": ["tpe", "random"],
        "default": "tpe",
        "help": "tpe: prefer settings near good ones, after ten runs; random: draw all settings (default: tpe)",
    },
    "--seed": {"type": int, "default": 0, "help": "seed of the settings (default: 0)"},
}


@registry.register_command("sweep")
class SweepCommand(Command):
    """Train a project several times with different options, and rank the results by a validation metric."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the ranking, and write it with a picture. Raises UserError if no run has a result."""
        from .sweep import Sweep, read_space

        a = arguments
        sweep = Sweep(a.cfg_path, a.options, a.nproc_per_node, read_space(a.search), a.output, a.metric, a.mode)
        sweep.check()
        sweep.run(a.trials, a.workers, a.sampler, a.seed)
        print(sweep.table())
        sweep.draw(a.output / "sweep.png")
        print(f"\n  picture      {a.output / 'sweep.png'}\n  best         {a.output / sweep.folder(sweep.best.number)}")
