"""`crosstrain evaluate --generate`, `--chat` and `--interactive`: text from a checkpoint."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crosstrain import Evaluation, UserError, registry
from crosstrain.cli.flags import add_flags

if TYPE_CHECKING:
    from crosstrain import OpenModel

_FLAGS = {
    "--generate": {"nargs": "+", "default": [], "metavar": "PROMPT", "help": "complete these prompts"},
    "--chat": {"action": "store_true", "help": "format each prompt as a user turn, as in training"},
    "--image": {"nargs": "+", "default": [], "metavar": "FILE", "help": "images that the prompts are about"},
    "--interactive": {"action": "store_true", "help": "complete prompts that you type; `stop` ends the session"},
    "--temperature": {
        "type": float,
        "default": 1.0,
        "metavar": "T",
        "help": "sampling temperature; 0: choose the most likely token (default: 1)",
    },
    "--top-k": {
        "type": int,
        "default": 0,
        "metavar": "K",
        "help": "sample from the K most likely tokens; 0: from all tokens (default: 0)",
    },
    "--top-p": {
        "type": float,
        "default": 1.0,
        "metavar": "P",
        "help": "sample from the most likely tokens with a total probability of P (default: 1)",
    },
    "--num-completions": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "number of completions per prompt (default: 1)",
    },
    "--seed": {"type": int, "default": 0, "help": "seed for sampling (default: 0)"},
}


@registry.register_evaluation("completions")
class Completions(Evaluation):
    """Complete prompts, or answer them as in a chat."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser, _FLAGS)

    def is_asked(self, given: Mapping[str, Any]) -> bool:
        """Return True if --generate or --interactive is given.

        Raises UserError for --image or --chat without --generate or --interactive.
        """
        talks = bool(given["generate"] or given["interactive"])
        for flag in ("image", "chat"):
            if given[flag] and not talks:
                raise UserError(f"--{flag}: needs --generate or --interactive")
        return talks

    def needs_one_process(self, given: Mapping[str, Any]) -> bool:
        return given["interactive"]

    def run(self, model: "OpenModel", given: Mapping[str, Any]) -> Any:
        from .talk import talk

        return talk(model, given)
