"""`crosstrain evaluate`: loss, perplexity, scores and text from a checkpoint."""

import argparse

from crosstrain.api.evaluation import asked_evaluations
from crosstrain.cli.command import Command
from crosstrain.cli.flags import CHECKPOINT, WEIGHTS, add_config, add_flags, new_file
from crosstrain.config.registry import registry


@registry.register_command("evaluate")
class EvaluateCommand(Command):
    """Compute loss, perplexity, scores and text from a checkpoint."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser, CHECKPOINT)
        add_config(parser, required=False)
        add_flags(
            parser,
            WEIGHTS
            | {
                "--splits": {
                    "nargs": "*",
                    "choices": ("train", "val", "test"),
                    "metavar": "SPLIT",
                    "help": "splits to compute the loss on (default: val and test if they have samples; "
                    "none with flags such as --generate)",
                },
                "--max-samples": {"type": int, "metavar": "N", "help": "use at most N samples of each split"},
                "--max-new-tokens": {
                    "type": int,
                    "default": 64,
                    "metavar": "N",
                    "help": "maximum number of tokens per generated text (default: 64)",
                },
                "--output": {"type": new_file, "metavar": "FILE", "help": "write the results as JSON"},
            },
        )
        for evaluation in registry.instances("evaluation").values():
            evaluation.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Evaluate a checkpoint and return the exit code."""
        from crosstrain.api.evaluate import start_evaluation

        job = vars(arguments)
        if asked_evaluations(job) and job["splits"] is None:
            job = job | {"splits": []}
        return start_evaluation(job)
