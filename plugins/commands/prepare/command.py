"""`crosstrain prepare`: turn text into tokens, or make the files of a named dataset."""

import argparse
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path

from crosstrain import Command, FilePath, UserError, registry
from crosstrain.cli.flags import add_options
from crosstrain.config.schema import Checker, defaults, options_class
from crosstrain.config.sources import Origins, merge, plain_layer, read_options, read_yaml, resolve
from crosstrain.utils import paths
from crosstrain.utils.errors import printable
from crosstrain.utils.program import command
from crosstrain.utils.storage import is_url

from . import tools
from .options import PrepareOptions
from .prepare import prepare

_FLAGS = ("input", "output", "tokenizer", "train_tokenizer", "text_key", "separator", "min_tokens", "workers")


@dataclass(kw_only=True)
class Recipe(PrepareOptions):
    """Options of a recipe: those of `PrepareOptions`, and the output folder."""

    output: FilePath  # the folder to make


@registry.register_command("prepare")
class PrepareCommand(Command):
    """Turn text into tokens, or make a dataset's files."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "dataset", nargs="?", metavar="WHAT", type=_what, help="inspect or merge; or a dataset that makes files"
        )
        parser.add_argument("paths", nargs="*", metavar="DIR", help="of inspect and merge: prepared folders")
        parser.add_argument("--cfg-path", metavar="FILE", help="a recipe; the other flags override it")
        parser.add_argument(
            "--input",
            nargs="+",
            metavar="PATH",
            help="files of text, JSON, CSV, Parquet, HTML, WARC, folders, or `stdlib`",
        )
        parser.add_argument("--output", metavar="DIR")
        parser.add_argument(
            "--tokenizer", metavar="NAME_OR_PATH", help="a Hugging Face tokenizer, or vocab.json's folder"
        )
        parser.add_argument("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N ids instead")
        parser.add_argument("--text-key", metavar="KEY", help="key of the text in JSONL and parquet")
        parser.add_argument(
            "--separator", metavar="TEXT", help="cuts .txt files into documents (default: one per file)"
        )
        parser.add_argument("--min-tokens", type=int, metavar="N", help="drop shorter documents")
        parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
        parser.add_argument(
            "--document", type=int, default=0, metavar="N", help="of inspect: number of the one to show"
        )
        add_options(parser, "of the recipe, or of a dataset")
        parser.add_argument("--overwrite", action="store_true", help="replace what the output folder holds")

    def run(self, arguments: argparse.Namespace) -> int:
        """Prepare, inspect or merge; return the exit code."""
        if arguments.dataset in ("inspect", "merge"):
            return _existing(arguments)
        if arguments.paths:
            raise UserError(f"prepare: only inspect and merge take folders, not {arguments.dataset}")
        if arguments.dataset is not None:
            return _prepare_dataset(arguments.dataset, _output(arguments), arguments.options)
        recipe = _read_recipe(arguments)
        summary = prepare(recipe, recipe.output, overwrite=arguments.overwrite)
        print(
            f"{recipe.output}: {summary.documents:,} documents, {summary.tokens:,} tokens ({summary.dtype}), "
            f"vocabulary {summary.vocab_size:,}{f', {summary.dropped:,} documents dropped' if summary.dropped else ''}"
        )
        print(f"what became of every document: {recipe.output}/report.json and lengths.svg")
        print(f"train on it with datasets.<name>.path={recipe.output} and model.vocab_size={summary.vocab_size}")
        return 0


def _read_recipe(arguments: argparse.Namespace) -> Recipe:
    """Read the recipe file, if one is given; the flags and `--options` override it."""
    given = {name: value for name in _FLAGS if (value := getattr(arguments, name)) is not None}
    if len(given.get("input", ())) == 1:
        given["input"] = given["input"][0]
    layers = [read_yaml(paths.find(arguments.cfg_path))] if arguments.cfg_path else []
    layers += [plain_layer("prepare", given), read_options(arguments.options)]
    origins = Origins(layers)
    tree = reduce(merge, (layer.tree for layer in layers))
    if arguments.cfg_path is None and "input" not in tree:
        raise UserError("prepare: --input or --cfg-path is required, or the name of a dataset that makes its own files")
    return Checker(origins.where).dataclass(Recipe, resolve(tree, origins), ())


def _what(text: str) -> str:
    if text.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(f"{text} is a recipe, not a dataset")
    return text


def _output(arguments: argparse.Namespace) -> str:
    if not arguments.output:
        raise UserError("prepare: --output is required: the folder to make")
    return arguments.output


def _existing(arguments: argparse.Namespace) -> int:
    """Inspect or merge prepared folders."""
    given = arguments.paths
    if arguments.dataset == "inspect":
        if not given:
            hint = f"`{command('samples')}` shows what a project trains"
            raise UserError(f"prepare inspect: name a prepared folder, or a Megatron prefix; {hint}")
        for path in given:
            print(printable(tools.inspect(path, arguments.document, arguments.tokenizer)))
        return 0
    if len(given) < 2:
        raise UserError("prepare merge: name two prepared folders or more")
    name = _output(arguments)
    summary = tools.merge(given, name if is_url(name) else Path(name), overwrite=arguments.overwrite)
    print(f"{name}: {summary.documents:,} documents, {summary.tokens:,} tokens")
    return 0


def _prepare_dataset(name: str, output: str, options: list[str]) -> int:
    """Make a registered dataset create its files in `output`, as for a project file with these options."""
    dataset = registry.get("dataset", name)
    cls = options_class("dataset", dataset)
    if "path" not in {f.name for f in fields(cls)}:
        raise UserError(f"prepare: the dataset {name} makes no files")
    given = read_options(options)
    tree = reduce(merge, [defaults(cls), {"path": output}, given.tree])
    dataset.prepare(Checker(lambda key: f"prepare {name}: {'.'.join(key)}").dataclass(cls, tree, ()))
    print(f"{output}: ready; train on it with datasets.<label>: {{name: {name}, ...}}")
    return 0
