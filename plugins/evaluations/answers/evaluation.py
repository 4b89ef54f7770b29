"""`crosstrain evaluate --answers`: answers to a dataset's questions, and their scores."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crosstrain import Evaluation, UserError, registry
from crosstrain.cli.flags import new_file

if TYPE_CHECKING:
    from crosstrain import OpenModel, Split


@registry.register_evaluation("answers")
class Answers(Evaluation):
    """Answer the questions of splits with and without the image, and score the answers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--answers",
            nargs="*",
            choices=("train", "val", "test"),
            metavar="SPLIT",
            help="ask the questions of these splits (default: test) and score the answers",
        )
        parser.add_argument(
            "--sheet",
            type=new_file,
            metavar="FILE",
            help="write a picture of the images, questions and answers to this file",
        )

    def is_asked(self, given: Mapping[str, Any]) -> bool:
        """Return True if --answers is given. Raises UserError for --sheet without --answers."""
        if given["sheet"] and given["answers"] is None:
            raise UserError("--sheet: needs --answers; give both")
        return given["answers"] is not None

    def splits(self, given: Mapping[str, Any]) -> "list[Split]":
        return given["answers"] or ["test"]

    def run(self, model: "OpenModel", given: Mapping[str, Any]) -> Any:
        from .vqa import answer_splits

        return answer_splits(model, self.splits(given), given)
