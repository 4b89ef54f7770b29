"""`crosstrain evaluate`: what a checkpoint is worth, and what it says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from crosstrain.checkpoint import folders
from crosstrain.config.load import Config
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.engine.build import build_model, check_fit, make_runner
from crosstrain.inference.conversation import ChatSession
from crosstrain.inference.generation import Sampling, generate
from crosstrain.inference.lm_eval_tasks import run_tasks
from crosstrain.inference.open_checkpoint import check_model, check_ranks, chosen_config, open_tokenizer
from crosstrain.inference.perplexity import evaluate_loss
from crosstrain.inference.vqa_report import answer_splits
from crosstrain.utils.errors import UserError, printable, sentence
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.optional_deps import require
from crosstrain.utils.units import finite

_MICRO_BATCH = 8  # samples per forward where the run does not say; the result does not depend on it


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate `arguments.checkpoint`; returns the exit code."""
    checkpoint = folders.find_checkpoint(Path(arguments.checkpoint))
    config = chosen_config(checkpoint, arguments)
    how = Launch.detect(arguments.nproc_per_node, config.run.device)
    if arguments.interactive and how.world_size > 1:
        raise UserError("--interactive: prompts are typed into one process; use --nproc-per-node 1")
    splits = arguments.splits
    if splits is None:
        others = arguments.generate or arguments.interactive or arguments.answers or arguments.tasks
        splits = [] if others else ["val", "test"]
    if arguments.sheet and not arguments.answers:
        raise UserError("--sheet: shows what --answers found; give both")
    if arguments.image and not (arguments.generate or arguments.interactive):
        raise UserError("--image: say what is asked about it, with --generate or --interactive")
    if arguments.tasks:
        require("lm_eval", "--tasks")
    elif arguments.task_path:
        raise UserError("--task-path: name tasks with --tasks")
    job = {
        "checkpoint": str(checkpoint),
        "trust": config.trust,
        "splits": splits,
        "max_samples": arguments.max_samples,
        "prompts": arguments.generate,
        "images": arguments.image,
        "answers": arguments.answers,
        "sheet": arguments.sheet,
        "tasks": arguments.tasks,
        "task_path": arguments.task_path,
        "interactive": arguments.interactive,
        "output": arguments.output,
    }
    sampling = Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p,
        arguments.num_completions, arguments.seed,
    )  # fmt: skip
    check_ranks(config, how.world_size)
    check_model(config, checkpoint)
    if opened := dict.fromkeys([*splits, *arguments.answers]):
        prepare_data(config)
        for split in opened:
            open_split(config, split)
    return launch(evaluate_worker, (config.plain, job, sampling), how)


def evaluate_worker(plain: dict[str, Any], job: dict[str, Any], sampling: Sampling) -> int:
    """What every worker runs."""
    config = Config.from_plain(plain, trust=job["trust"])
    runner = make_runner(config)
    runner.setup()
    is_main = runner.world.rank == 0
    set_up_logging(None, quiet=not is_main)
    checkpoint = Path(job["checkpoint"])
    build_model(config, runner, checkpoint, for_training=False)
    results: dict[str, Any] = {"checkpoint": str(checkpoint), "splits": {}, "completions": []}
    micro_batch = config.run.micro_batch_size or _MICRO_BATCH

    for split in job["splits"]:
        dataset = open_split(config, split)
        check_fit(runner.model, dataset)
        metrics = evaluate_loss(runner, dataset, micro_batch, job["max_samples"], config.run.num_workers)
        results["splits"][split] = {
            "loss": finite(metrics.loss), "perplexity": finite(metrics.perplexity), "tokens": metrics.targets,
        }  # fmt: skip
        log.info(
            "%s | loss %.6f | perplexity %.4f (%d tokens)", split, metrics.loss, metrics.perplexity, metrics.targets
        )

    if job["answers"]:
        results["answers"] = answer_splits(config, runner, open_tokenizer(checkpoint), job, sampling, is_main)
    if job["tasks"]:
        results["tasks"] = run_tasks(
            runner, open_tokenizer(checkpoint), job["tasks"], job["task_path"], job["max_samples"], is_main
        )
    if job["prompts"] or job["interactive"]:
        tokenizer = open_tokenizer(checkpoint)
        talk = ChatSession.about(job["images"], config, checkpoint) if job["images"] else None
        for prompt in job["prompts"]:
            texts = _complete(runner, tokenizer, prompt, sampling, show=is_main, talk=talk)
            results["completions"].append({"prompt": prompt, "completions": texts})
        if job["interactive"]:
            chat = talk or ChatSession.possible(config, checkpoint)
            _converse(runner, tokenizer, sampling, results["completions"], chat)
    if job["output"] and is_main:
        Path(job["output"]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        log.info("results are in %s", job["output"])
    runner.close()
    return 0


def _complete(
    runner: Any, tokenizer: Any, prompt: str, sampling: Sampling, *, show: bool, talk: ChatSession | None = None
) -> list[str]:
    """Completions of a prompt, or answers to it where it is about images; a single one is shown as it grows."""
    streaming = show and sampling.num_completions == 1

    def on_text(_completion: int, piece: str) -> None:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()

    asked = prompt if talk is None else talk.ask(prompt)
    if streaming:
        sys.stdout.write(prompt if talk is None else f"{prompt}\n")
    end = None if talk is None else talk.prompt_builder.end_id
    texts = generate(runner, tokenizer, asked, sampling, on_text if streaming else None, end)
    if streaming:
        sys.stdout.write("\n")
    elif show:
        for number, text in enumerate(texts, 1):
            print(printable(f"--- completion {number}\n{prompt}{text}"))
    return texts


def _converse(
    runner: Any,
    tokenizer: Any,
    sampling: Sampling,
    completions: list[dict[str, Any]],
    talk: ChatSession | None,
) -> None:
    about = "" if talk is None else "; `image FILE` adds an image, `new` forgets what was said"
    print(f"type a prompt, or `stop` to end{about}")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            return
        if prompt.strip() == "stop":
            return
        try:
            if talk is not None and talk.command(prompt):
                continue
            texts = _complete(runner, tokenizer, prompt, sampling, show=True, talk=talk)
        except UserError as error:  # too long a prompt should not end the conversation
            print(f"error: {sentence(error)}")
            continue
        if talk is not None:
            talk.remember(prompt, texts[0])
        completions.append({"prompt": prompt, "completions": texts})
