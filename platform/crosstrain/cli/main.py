"""Verbs and flags. Parsing imports nothing heavy; each verb imports what it needs."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from crosstrain import __version__
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.utils.errors import UserError, first_line, printable, refusal, sentence

_MOST_MISTAKES = 50  # of one configuration, that are shown


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        debug = "show the traceback of an error (or CROSSTRAIN_DEBUG=1)"
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0, 1 for an error, 128+n when stopped by signal n."""
    debug = bool(os.environ.get("CROSSTRAIN_DEBUG"))
    try:
        arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        debug = debug or "debug" in arguments
        return arguments.run(arguments)
    except UserError as error:
        if debug:
            traceback.print_exc()
        for text in error.sentences[:_MOST_MISTAKES]:
            print(f"error: {sentence(text)}", file=sys.stderr)
        if more := error.sentences[_MOST_MISTAKES:]:
            print(f"error: and {len(more)} more mistakes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if type(error).__name__ == "WorkerFailure":
            text = printable(str(error))
        elif debug:
            raise
        elif refused := refusal(error):
            text = sentence(refused)
        else:
            text = sentence(f"{type(error).__name__}: {first_line(error)} (a traceback: --debug)")
        print(f"error: {text}", file=sys.stderr)
        return 1


def _parser() -> _Parser:
    parser = _Parser(prog="crosstrain", description="Train any model with any runner, chosen in one YAML file.")
    parser.add_argument("--version", action="version", version=f"crosstrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=_Parser)

    train = verbs.add_parser("train", help="train what a project file says, resuming where its folder left off")
    _add_config(train, required=True)
    train.add_argument("--fresh", action="store_true", help="start over; the earlier run's folder is kept under NAME.1")
    train.add_argument("--dry-run", action="store_true", help="say what it will cost, as `plan` does; start nothing")
    train.add_argument("--no-fit-check", action="store_true", help="start although the device's memory is too small")
    _add_nodes(train)
    _add_budget(train)
    train.set_defaults(run=_train)

    plan = verbs.add_parser("plan", help="what a project costs under each runner, before anything starts")
    _add_config(plan, required=True)
    _add_budget(plan)
    plan.set_defaults(run=_plan)

    evaluate = verbs.add_parser("evaluate", help="loss, perplexity and text from a checkpoint")
    evaluate.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's folder (its newest)"
    )
    _add_config(evaluate, required=False)
    _add_trust(evaluate)
    evaluate.add_argument("--splits", nargs="*", default=None, choices=("train", "val", "test"), metavar="SPLIT",
                          help="splits to evaluate (default: val and test unless text is asked for)")  # fmt: skip
    evaluate.add_argument("--max-samples", type=int, metavar="N", help="at most N samples of each split")
    evaluate.add_argument("--generate", nargs="+", default=[], metavar="PROMPT", help="complete these prompts")
    evaluate.add_argument("--image", nargs="+", default=[], metavar="FILE", help="the prompts are about these images")
    evaluate.add_argument("--answers", nargs="*", default=None, choices=("train", "val", "test"), metavar="SPLIT",
                          help="ask what these splits' answers are known of (default: test)")  # fmt: skip
    evaluate.add_argument("--sheet", metavar="FILE", help="a picture of images, questions and --answers")
    evaluate.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="of lm-evaluation-harness, to be run")
    evaluate.add_argument("--task-path", metavar="DIR", help="a folder with more of its task files")
    evaluate.add_argument("--interactive", action="store_true", help="complete prompts as you type them; `stop` ends")
    evaluate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    evaluate.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    evaluate.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps every token")
    evaluate.add_argument("--top-p", type=float, default=1.0, metavar="P")
    evaluate.add_argument("--num-completions", type=int, default=1, metavar="N")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--output", metavar="FILE", help="write the results as JSON")
    evaluate.set_defaults(run=_evaluate)

    serve = verbs.add_parser("serve", help="answer to OpenAI's interface and a web page from a checkpoint")
    serve.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's folder (its newest)"
    )
    _add_config(serve, required=False)
    _add_trust(serve)
    serve.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    serve.add_argument("--name", metavar="NAME", help="of the model (default: the run's folder's)")
    serve.add_argument("--api-key", metavar="KEY", help="what clients have to show (default: $CROSSTRAIN_API_KEY)")
    serve.add_argument("--batch", type=_positive, default=8, metavar="N",
                       help="sequences that are computed together (default: 8)")  # fmt: skip
    serve.add_argument("--max-waiting", type=_positive, default=512, metavar="N",
                       help="completions that may wait, others being refused (default: 512)")  # fmt: skip
    serve.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for a request (default: 600)")
    serve.add_argument("--header-timeout", type=float, default=10, metavar="SECONDS",
                       help="for a request's headers to arrive (default: 10)")
    serve.set_defaults(run=_serve)

    chat = verbs.add_parser("chat", help="talk with a server on the command line")
    chat.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000")
    chat.add_argument("--api-key", metavar="KEY", help="default: $CROSSTRAIN_API_KEY")
    chat.add_argument("--model", metavar="NAME", help="default: the server's first")
    chat.add_argument("--system", metavar="TEXT", help="what the conversation begins with")
    chat.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer (default: what fits)")
    chat.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    chat.add_argument("--top-p", type=float, default=1.0, metavar="P")
    chat.add_argument("--seed", type=int)
    chat.set_defaults(run=_chat)

    export = verbs.add_parser("export", help="write a checkpoint as a plain Hugging Face model folder")
    export.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's folder (its newest)"
    )
    export.add_argument("--output", required=True, metavar="DIR", help="a folder that is empty or does not exist")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="convert to it (default: as it is stored)")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="begin another file beyond this")
    export.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE",
                        help="change the configuration that says where frozen parameters come from")  # fmt: skip
    _add_trust(export)
    export.set_defaults(run=_export)

    prepare = verbs.add_parser("prepare", help="turn text into memory-mapped tokens, or make a dataset's files")
    prepare.add_argument("dataset", nargs="?", metavar="WHAT",
                         help="inspect, merge or split; or a dataset that makes files")  # fmt: skip
    prepare.add_argument("paths", nargs="*", metavar="DIR", help="of inspect, merge and split: what was prepared")
    prepare.add_argument("--cfg-path", metavar="FILE", help="a recipe; the other flags override it")
    prepare.add_argument("--input", nargs="+", metavar="PATH",
                         help=".txt files, folders of them, JSONL, parquet, or `stdlib`")  # fmt: skip
    prepare.add_argument("--output", metavar="DIR")
    prepare.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="a Hugging Face tokenizer, or vocab.json's folder")
    prepare.add_argument("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N ids instead")
    prepare.add_argument("--text-key", metavar="KEY", help="where JSONL and parquet keep the text")
    prepare.add_argument("--separator", metavar="TEXT", help="cuts .txt files into documents (default: one per file)")
    prepare.add_argument("--min-tokens", type=int, metavar="N", help="drop shorter documents")
    prepare.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    prepare.add_argument("--shares", type=float, nargs="+", metavar="N", help="of split: the parts' shares")
    prepare.add_argument("--document", type=int, default=0, metavar="N", help="of inspect: which one to show")
    prepare.add_argument(
        "--options", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe, or of the named dataset"
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace what the output folder holds")
    prepare.set_defaults(run=_prepare)

    compare = verbs.add_parser("compare", help="prove that runners train alike, on your own project")
    _add_config(compare, required=True)
    compare.add_argument("--runners", nargs="+", required=True, metavar="RUNNER[@N]",
                         help="runners or presets and their number of workers (default: as --nproc-per-node, or 1); "
                              "the first is the reference")  # fmt: skip
    compare.add_argument("--steps", type=_positive, default=5, metavar="K", help="steps under each (default: 5)")
    compare.add_argument("--scratch", metavar="DIR", help="where the reference's gradients are kept meanwhile")
    compare.add_argument("--output", metavar="FILE", help="write everything that was measured as JSON")
    compare.set_defaults(run=_compare)

    report = verbs.add_parser("report", help="one page about one or several runs: curves, timings, differences")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir)")
    report.add_argument("--output", default="report.html", metavar="FILE", help="the page (default: report.html)")
    report.set_defaults(run=_report)

    listing = verbs.add_parser("list", help="everything that a project file can name")
    listing.add_argument("kind", nargs="?", help="runner, model, dataset, ...")
    listing.set_defaults(run=_list)
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _add_config(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--cfg-path", required=required, metavar="FILE", help="a project file")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE", help="override it, such as run.seed=1")
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="workers (default: one per GPU, else one)")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-data", action="store_true", help="open data and pretrained weights that a stranger's checkpoint names"
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines, the same command on each; the names are torchrun's")
    group.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines that train together (default: 1)")
    group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="node 0's address, and a free port there")
    group.add_argument("--local-addr", metavar="ADDRESS", help="this machine's (default: that which faces node 0)")
    group.add_argument("--rdzv-conf", metavar="KEY=N,...", help="how nodes meet, such as join_timeout=600 (seconds)")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--world-size", type=_positive, metavar="N", help="ranks, there or not (default: as training)")
    group.add_argument("--device-memory", metavar="SIZE", help="of each rank's device, such as 24GiB: what fits?")
    group.add_argument("--throughput", metavar="FLOPS", help="a device's FLOP/s, such as 150T: how many days?")
    group.add_argument("--tokens-per-second", metavar="N", help="as measured, of all ranks: a number, or a run")
    group.add_argument("--tokens", metavar="N", help="of the whole training, such as 2.5B (default: run.max_iters)")
    group.add_argument("--no-presets", action="store_true", help="say nothing of other runners")
    group.add_argument("--output", metavar="FILE", help="write the plan as JSON")
    group.add_argument("--picture", metavar="FILE", help="draw memory as stacked bars, .svg or .png")


def _train(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _plan(arguments)
    with sigint_kills():
        from crosstrain.cli.train import train
        from crosstrain.distributed.launch.rendezvous import Nodes

    a = arguments
    nodes = Nodes.of(a.nnodes, a.node_rank, a.rdzv_endpoint, a.local_addr, a.rdzv_conf)
    memory = None if a.no_fit_check else a.device_memory or ""
    return train(a.cfg_path, a.options, a.nproc_per_node, a.fresh, memory, nodes)


def _plan(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.plan import plan

    return plan(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.evaluate import evaluate

    arguments.answers = [] if arguments.answers is None else arguments.answers or ["test"]
    return evaluate(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.serve import serve

    return serve(arguments)


def _chat(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.chat import chat

    return chat(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.compare import compare

    return compare(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.export import export

    return export(arguments)


def _prepare(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.prepare import prepare

    return prepare(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.report import report

    return report(arguments.runs, arguments.output)


def _list(arguments: argparse.Namespace) -> int:
    from crosstrain.cli.list_plugins import listing

    return listing(arguments.kind)
