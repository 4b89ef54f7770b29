"""`crosstrain prepare`: turn text into tokens, or inspect prepared tokens."""

import argparse
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import Any

from crosstrain import Command, FilePath, UserError, printable, registry
from crosstrain.cli.flags import add_flags, add_options
from crosstrain.config.schema import Checker
from crosstrain.config.sources import merge, plain_layer, read_options, read_yaml, resolve, where
from crosstrain.utils import paths
from crosstrain.utils.program import command

from .options import PrepareOptions
from .prepare import prepare
from .tools import inspect

_FLAGS: dict[str, dict[str, Any]] = {
    "what": {"nargs": "?", "choices": ["inspect"], "help": "show prepared folders instead of preparing one"},
    "paths": {
        "nargs": "*", "metavar": "DIR", "help": "with inspect: prepared folders, or prefixes of Megatron files",
    },
    "--cfg-path": {"metavar": "FILE", "help": "recipe file; the other flags override it"},
    "--input": {
        "nargs": "+", "metavar": "PATH",
        "help": "text, JSON, CSV, Parquet, HTML or WARC files, folders of such files, or `stdlib`",
    },
    "--output": {"metavar": "DIR"},
    "--tokenizer": {
        "metavar": "NAME_OR_PATH",
        "help": "Hugging Face name of a tokenizer, or a folder with tokenizer.json or vocab.json",
    },
    "--train-tokenizer": {
        "type": int, "metavar": "N",
        "help": "train a byte-level BPE with a vocabulary of N tokens, in place of --tokenizer",
    },
    "--text-key": {"metavar": "KEY", "help": "key of the text in a JSON line, or column of the text in a table"},
    "--separator": {
        "metavar": "TEXT", "help": "text between documents of a .txt file (default: one document per file)",
    },
    "--workers": {"type": int, "metavar": "N", "help": "number of processes (default: one per core)"},
    "--document": {
        "type": int, "default": 0, "metavar": "N", "help": "with inspect: number of the document to show (default: 0)",
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Recipe(PrepareOptions):
    """Options of a recipe: the options of `PrepareOptions` and the output folder."""

    output: FilePath  # folder to write


@registry.register_command("prepare")
class PrepareCommand(Command):
    """Turn text into tokens, or inspect prepared tokens."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser, _FLAGS)
        add_options(parser, "options of the recipe to override")
        parser.add_argument("--overwrite", action="store_true", help="replace the content of the output folder")

    def run(self, arguments: argparse.Namespace) -> None:
        """Prepare or inspect."""
        if arguments.what == "inspect":
            if not arguments.paths:
                raise UserError(
                    f"prepare inspect: give a prepared folder or a Megatron prefix; `{command('samples')}` shows the "
                    f"samples of a project"
                )
            for path in arguments.paths:
                print(printable(inspect(path, arguments.document, arguments.tokenizer)))
            return
        recipe = _read_recipe(arguments)
        summary = prepare(recipe, recipe.output, overwrite=arguments.overwrite)
        print(
            f"{recipe.output}: {summary.documents:,} documents, {summary.tokens:,} tokens ({summary.dtype}), "
            f"vocabulary {summary.vocab_size:,}{f', {summary.dropped:,} documents dropped' if summary.dropped else ''}"
        )
        print(f"report on kept and dropped documents: {recipe.output}/report.json")
        print(f"train on this data with datasets.<name>.path={recipe.output} and model.vocab_size={summary.vocab_size}")


def _read_recipe(arguments: argparse.Namespace) -> Recipe:
    """Read the recipe file, if one is given; the flags and `--options` override it."""
    names = {option.name for option in fields(Recipe)}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    if len(given.get("input", ())) == 1:
        given["input"] = given["input"][0]
    layers = [read_yaml(paths.find(arguments.cfg_path))] if arguments.cfg_path else []
    layers += [plain_layer("prepare", given), read_options(arguments.options)]
    tree = reduce(merge, (layer.tree for layer in layers))
    return Checker(partial(where, layers)).dataclass(Recipe, resolve(tree, layers), ())
