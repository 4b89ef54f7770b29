"""`crosstrain prepare`: turn text into tokens, or make the files of a named dataset."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path

from crosstrain.config.bounds import FilePath
from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker, OptionError, defaults, options_class
from crosstrain.config.sources import Origins, merge, plain_layer, read_options, read_yaml, resolve
from crosstrain.corpus import tools
from crosstrain.corpus.options import PrepareOptions
from crosstrain.corpus.prepare import prepare
from crosstrain.utils import paths
from crosstrain.utils.errors import UserError, printable

_FLAGS = ("input", "output", "tokenizer", "train_tokenizer", "text_key", "separator", "min_tokens", "workers")


@dataclass(kw_only=True)
class Recipe(PrepareOptions):
    """Options of a recipe: how to prepare, and the output folder."""

    output: FilePath | None = None  # the folder to make

    def __post_init__(self) -> None:
        if self.output is None:
            raise OptionError("output", "required: the folder to make; --output says it too")
        super().__post_init__()

    @property
    def how(self) -> PrepareOptions:
        return PrepareOptions(**{field.name: getattr(self, field.name) for field in fields(PrepareOptions)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", nargs="?", metavar="WHAT",
                        help="inspect, merge or split; or a dataset that makes files")  # fmt: skip
    parser.add_argument("paths", nargs="*", metavar="DIR", help="of inspect, merge and split: prepared folders")
    parser.add_argument("--cfg-path", metavar="FILE", help="a recipe; the other flags override it")
    parser.add_argument("--input", nargs="+", metavar="PATH",
                        help=".txt files, folders of them, JSONL, parquet, or `stdlib`")  # fmt: skip
    parser.add_argument("--output", metavar="DIR")
    parser.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="a Hugging Face tokenizer, or vocab.json's folder")
    parser.add_argument("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N ids instead")
    parser.add_argument("--text-key", metavar="KEY", help="key of the text in JSONL and parquet")
    parser.add_argument("--separator", metavar="TEXT", help="cuts .txt files into documents (default: one per file)")
    parser.add_argument("--min-tokens", type=int, metavar="N", help="drop shorter documents")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--shares", type=float, nargs="+", metavar="N", help="of split: the parts' shares")
    parser.add_argument("--document", type=int, default=0, metavar="N", help="of inspect: number of the one to show")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe, or of the named dataset"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what the output folder holds")


def run(arguments: argparse.Namespace) -> int:
    """Prepare, inspect, merge or split; returns the exit code."""
    verbs = {"inspect": _inspect, "merge": _merge, "split": _split}
    if arguments.dataset in verbs:
        return verbs[arguments.dataset](arguments)
    if arguments.paths:
        raise UserError(f"prepare: only inspect, merge and split take folders, not {arguments.dataset}")
    if arguments.dataset is not None:
        return _prepare_dataset(arguments.dataset, _output(arguments), arguments.options)
    recipe = read_recipe(arguments)
    summary = prepare(recipe.how, Path(str(recipe.output)), overwrite=arguments.overwrite)
    print(
        f"{recipe.output}: {summary.documents:,} documents, {summary.tokens:,} tokens ({summary.dtype}), vocabulary "
        f"{summary.vocab_size:,}" + (f", {summary.dropped:,} documents dropped" if summary.dropped else "")
    )
    print(f"what became of every document: {recipe.output}/report.json and lengths.svg")
    print(f"train on it with datasets.<name>.path={recipe.output} and model.vocab_size={summary.vocab_size}")
    return 0


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe file, if one is named, under the flags and `--options`. ConfigError with file and line."""
    given = {name: value for name in _FLAGS if (value := getattr(arguments, name)) is not None}
    if len(given.get("input", ())) == 1:
        given["input"] = given["input"][0]
    if arguments.cfg_path is None and "input" not in given:
        raise UserError("prepare: --input or --cfg-path is required, or the name of a dataset that makes its own files")
    layers = [read_yaml(paths.find(arguments.cfg_path))] if arguments.cfg_path else []
    layers += [plain_layer("prepare", given), read_options(arguments.options)]
    origins = Origins(layers)
    tree = reduce(merge, (layer.tree for layer in layers))
    return Checker(origins.where).dataclass(Recipe, resolve(tree, origins), ())


def _output(arguments: argparse.Namespace) -> str:
    if not arguments.output:
        raise UserError("prepare: --output is required: the folder to make")
    return arguments.output


def _inspect(arguments: argparse.Namespace) -> int:
    if not arguments.paths:
        raise UserError("prepare inspect: name a prepared folder, or a Megatron prefix")
    for path in arguments.paths:
        print(printable(tools.inspect(path, arguments.document, arguments.tokenizer)))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) < 2:
        raise UserError("prepare merge: name two prepared folders or more")
    output = _output(arguments)
    summary = tools.merge(arguments.paths, Path(output), overwrite=arguments.overwrite)
    print(f"{output}: {summary.documents:,} documents, {summary.tokens:,} tokens")
    return 0


def _split(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) != 1 or not arguments.shares:
        raise UserError("prepare split: name one prepared folder, and --shares such as 90 10")
    made = tools.split(arguments.paths[0], Path(_output(arguments)), arguments.shares)
    for folder, summary in made:
        print(f"{folder}: {summary.documents:,} documents, {summary.tokens:,} tokens")
    return 0


def _prepare_dataset(name: str, output: str, options: list[str]) -> int:
    """Let the registered dataset make its files in `output`, as a project file with these options would."""
    dataset = registry.get("dataset", name)
    cls = options_class("dataset", dataset)
    if not {"path", "prepare"} & {f.name for f in fields(cls)}:
        raise UserError(f"prepare: the dataset {name} makes no files")
    given = read_options(options)
    place = {"path": output} if "path" in {f.name for f in fields(cls)} else {"prepare": {"output": output}}
    tree = reduce(merge, [defaults(cls), place, given.tree])
    dataset.prepare(Checker(lambda key: f"prepare {name}: {'.'.join(key)}").dataclass(cls, tree, ()))
    print(f"{output}: ready; train on it with datasets.<label>: {{name: {name}, ...}}")
    return 0
