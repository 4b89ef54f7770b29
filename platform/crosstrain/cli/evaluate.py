"""`crosstrain evaluate`: loss, perplexity, scores and text from a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstrain.cli.flags import add_checkpoint, add_config, ask, new_file
from crosstrain.config.load import Config
from crosstrain.distributed.launch.launcher import launch
from crosstrain.utils.errors import UserError, printable, sentence
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.optional_deps import require
from crosstrain.utils.units import finite

if TYPE_CHECKING:
    from crosstrain.engine.runner import Runner
    from crosstrain.inference.conversation import ChatSession, TextSession
    from crosstrain.inference.encoding import Encoders
    from crosstrain.inference.generation import Sampling

    Session = ChatSession | TextSession

_MICRO_BATCH = 8  # samples per forward where the run has no number; the result does not depend on it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    splits: dict[str, Any] = {"nargs": "*", "default": None, "choices": ("train", "val", "test"), "metavar": "SPLIT"}
    add_checkpoint(parser)
    add_config(parser, required=False)
    parser.add_argument(
        "--splits", help="splits to evaluate (default: val and test, unless the flags ask for text)", **splits
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="at most N samples of each split")
    parser.add_argument("--generate", nargs="+", default=[], metavar="PROMPT", help="complete these prompts")
    parser.add_argument("--chat", action="store_true", help="the prompts are a user's turns, in the chat template")
    parser.add_argument("--image", nargs="+", default=[], metavar="FILE", help="images that the prompts are about")
    parser.add_argument("--answers", help="ask the questions of these splits, whose answers are known (default: test)",
                        **splits)  # fmt: skip
    parser.add_argument("--sheet", type=new_file, metavar="FILE", help="a picture of images, questions and --answers")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-evaluation-harness to run")
    parser.add_argument("--task-path", metavar="DIR", help="a folder with more task files of the harness")
    parser.add_argument("--interactive", action="store_true", help="complete prompts as you type them; `stop` ends")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps every token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--num-completions", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=new_file, metavar="FILE", help="write the results as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a checkpoint; returns the exit code."""
    from crosstrain.checkpoint.folders import find_checkpoint
    from crosstrain.data.splits import open_split, prepare_data
    from crosstrain.inference.open_checkpoint import open_on_workers

    a = arguments
    checkpoint = find_checkpoint(Path(a.checkpoint))
    asked = [] if a.answers is None else a.answers or ["test"]
    splits = a.splits
    if splits is None:
        splits = [] if a.generate or a.interactive or asked or a.tasks else ["val", "test"]
    if a.sheet and not asked:
        raise UserError("--sheet: shows what --answers found; give both")
    if a.image and not (a.generate or a.interactive):
        raise UserError("--image: ask about it with --generate or --interactive")
    if a.chat and (a.image or not (a.generate or a.interactive)):
        raise UserError("--chat: say something with --generate or --interactive, and without --image")
    if a.tasks:
        require("lm_eval", "--tasks")
    elif a.task_path:
        raise UserError("--task-path: name tasks with --tasks")
    config, how = open_on_workers(checkpoint, a.cfg_path, a.options, a.trust_data, a.nproc_per_node, a.interactive)
    if opened := dict.fromkeys([*splits, *asked]):
        prepare_data(config)
        for split in opened:
            open_split(config, split)
    job = vars(a) | {"checkpoint": checkpoint, "trust": config.trust, "splits": splits, "answers": asked}
    return launch(evaluate_worker, (config.plain, job), how)


def evaluate_worker(plain: dict[str, Any], job: dict[str, Any]) -> int:
    """Evaluate on this rank; `job` has the command line's flags."""
    from crosstrain.data.splits import open_split
    from crosstrain.engine.build import build_model, check_fit, make_runner
    from crosstrain.inference.conversation import ChatSession, TextSession
    from crosstrain.inference.encoding import Encoders
    from crosstrain.inference.generation import Sampling
    from crosstrain.inference.perplexity import evaluate_loss
    from crosstrain.inference.vqa import answer_splits

    config, checkpoint = Config.from_plain(plain, trust=job["trust"]), job["checkpoint"]
    sampling = Sampling(
        job["max_new_tokens"], job["temperature"], job["top_k"], job["top_p"], job["num_completions"], job["seed"]
    )
    runner = make_runner(config)
    runner.setup()
    is_main = runner.world.rank == 0
    set_up_logging(None, quiet=not is_main)
    with_text = job["answers"] or job["tasks"] or job["generate"] or job["interactive"]
    encoders = Encoders(checkpoint) if with_text else None
    build_model(config, runner, checkpoint, for_training=False)
    results: dict[str, Any] = {"checkpoint": str(checkpoint), "splits": {}, "completions": []}
    micro_batch = config.run.micro_batch_size or _MICRO_BATCH

    for split in job["splits"]:
        dataset = open_split(config, split)
        check_fit(runner.model, dataset)
        metrics = evaluate_loss(runner, dataset, micro_batch, job["max_samples"], config.run.num_workers)
        numbers = {name: finite(value) for name, value in metrics.named.items()}
        results["splits"][split] = numbers | {metrics.unit: metrics.targets}
        log.info("%s | %s", split, metrics.line(".6f"))

    if encoders is not None:
        tokenizer = encoders.load()
        if job["answers"]:
            results["answers"] = answer_splits(config, runner, tokenizer, job, sampling, is_main)
        if job["tasks"]:
            from crosstrain.inference.lm_eval_harness import run_tasks

            encode = partial(encoders.encode, "text")
            results["tasks"] = run_tasks(
                runner, tokenizer, encode, job["tasks"], job["task_path"], job["max_samples"], is_main
            )
        complete = partial(_complete, runner, tokenizer, encoders, sampling)
        talk: Session | None = None
        if job["image"]:
            talk = ChatSession.about(job["image"], config, checkpoint, encoders)
        elif job["chat"]:
            talk = TextSession(encoders, encoders.ends(tokenizer))
        for prompt in job["generate"]:
            texts = complete(prompt, talk, show=is_main)
            results["completions"].append({"prompt": prompt, "completions": texts})
        if job["interactive"]:
            talk = talk or ChatSession.possible(config, checkpoint, encoders)
            results["completions"] += _converse(complete, talk)
        encoders.close()
    if job["output"] and is_main:
        job["output"].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        log.info("results are in %s", job["output"])
    runner.close()
    return 0


def _complete(
    runner: Runner, tokenizer: Any, encoders: Encoders, sampling: Sampling, prompt: str, talk: Session | None, *,
    show: bool,
) -> list[str]:  # fmt: skip
    """Complete a prompt, or answer it in a conversation; a single completion is shown as it grows."""
    from crosstrain.inference.generation import as_prompt, generate

    end = tokenizer.eos_token_id
    ends = [end] if talk is None else talk.ends
    asked = as_prompt(encoders.encode("text", prompt), end) if talk is None else talk.ask(prompt)
    if not show or sampling.num_completions > 1:
        texts = generate(runner, tokenizer, asked, sampling, None, ends)
        for number, text in enumerate(texts if show else [], 1):
            print(printable(f"--- completion {number}\n{prompt}{text}"))
        return texts
    print(prompt, end="" if talk is None else "\n")
    texts = generate(
        runner, tokenizer, asked, sampling, lambda _, piece: print(printable(piece), end="", flush=True), ends
    )
    print()
    return texts


def _converse(complete: Callable[..., list[str]], talk: Session | None) -> list[dict[str, Any]]:
    """Complete the prompts that are typed, until `stop` or the end of the input; returns them with the completions."""
    about = "" if talk is None else f"; {talk.commands}"
    print(f"type a prompt, or `stop` to end{about}")
    found: list[dict[str, Any]] = []
    while True:
        try:
            prompt = ask()
        except EOFError:
            return found
        if prompt.strip() == "stop":
            return found
        try:
            if talk is not None and talk.command(prompt):
                continue
            texts = complete(prompt, talk, show=True)
        except UserError as error:  # too long a prompt should not end the conversation
            print(f"error: {sentence(error)}")
            continue
        if talk is not None:
            talk.remember(prompt, texts[0])
        found.append({"prompt": prompt, "completions": texts})
